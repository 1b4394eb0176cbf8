"""Write the metrics of a run to a file of JSON lines, or for TensorBoard."""

from __future__ import annotations

import math
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final

import msgspec
from typing_extensions import override

from paceline.errors import UsageError
from paceline.observe.collector import MetricSink
from paceline.observe.history import Rates
from paceline.observe.metrics import METRICS, Samples, as_json

_EVERY_S: Final = 5.0


class MetricLines(MetricSink):
    """One line every five seconds, and at the end: an object with ``time`` (Unix, in seconds) and ``metrics``."""

    def __init__(self, path: Path) -> None:
        """Create the file. Raises OSError."""
        self._file, self.option = path.open("wb", buffering=0), f"--metrics-file {path}"
        self._due_s = 0.0

    @override
    def write(self, samples: Samples, *, is_last: bool) -> None:
        if time.monotonic() < self._due_s and not is_last:
            return
        self._due_s = time.monotonic() + _EVERY_S
        line = {"time": datetime.now(timezone.utc).timestamp(), "metrics": as_json(samples)}
        unwritten = memoryview(msgspec.json.encode(line) + b"\n")
        while unwritten:
            unwritten = unwritten[self._file.write(unwritten) :]

    @override
    def close(self) -> None:
        self._file.close()


class TensorBoard(MetricSink):
    """Scalars in a log directory of TensorBoard, every five seconds.

    A counter becomes a rate per second, and a histogram the mean of its new values. The step of the horizontal axis is
    the number of seconds since the start.
    """

    def __init__(self, directory: Path) -> None:
        """Create the directory. Raises UsageError if tensorboardX is not installed, and OSError."""
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            raise UsageError(
                "--tensorboard needs tensorboardX, which is not installed: pip install 'paceline[observe]'"
            ) from None
        self._writer: Any = SummaryWriter(str(directory))
        self.option = f"--tensorboard {directory}"
        self._start_s = self._last_s = time.monotonic()
        self._before: Samples = {}

    @override
    def write(self, samples: Samples, *, is_last: bool) -> None:
        time_s = time.monotonic()
        passed_s = time_s - self._last_s
        if passed_s <= 0.0 or (passed_s < _EVERY_S and not is_last):
            return
        self._last_s = time_s
        rates, self._before = Rates(self._before, samples, passed_s), samples
        for name, values in samples.items():
            metric = METRICS[name]
            suffix = {"gauge": "", "counter": "/per_second", "histogram": "/mean"}[metric.kind]
            shown = values if metric.kind == "gauge" else rates.values(name, means=metric.kind == "histogram")
            for labels, value in shown.items():
                assert not isinstance(value, list)
                tag = "/".join([name, *(f"{key}_{text}" for key, text in zip(metric.labels, labels, strict=True))])
                if not math.isnan(value):  # the sum of a histogram may be unknown
                    self._writer.add_scalar(tag + suffix, value, round(time_s - self._start_s))
        self._writer.flush()

    @override
    def close(self) -> None:
        self._writer.close()
