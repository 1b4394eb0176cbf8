"""The file with the profiled operators of a rank, which the launcher merges into the timeline."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from paceline.decoded_types import register_type
from paceline.observe.stuck.processes import WatchedProcess

_SUFFIX: Final = ".operators"
_MOST_SPANS: Final = 100_000
"""About 10 MB."""


class OperatorSpan(NamedTuple):
    """A profiled operation. Times are nanoseconds since 1970."""

    track: str
    """Such as ``torch.profiler, thread 1``."""
    name: str
    start_ns: int
    end_ns: int


class OperatorFile:
    """The spans of one process as lines of JSON. The file is bounded."""

    def __init__(self, folder: Path, process: WatchedProcess) -> None:
        """Use the file of a process in its job's folder."""
        self._path = process.path(folder, _SUFFIX)
        self._num_left = _MOST_SPANS

    def write(self, spans: Iterable[OperatorSpan]) -> None:
        """Append spans. If the disk is full, they are lost."""
        kept = list(itertools.islice(spans, self._num_left))
        self._num_left -= len(kept)
        with contextlib.suppress(OSError), self._path.open("ab") as file:
            file.write(msgspec.json.Encoder().encode_lines(kept))

    def read(self, start_ns: int, end_ns: int) -> list[OperatorSpan]:
        """Return the spans that overlap with this time; 0: without a limit."""
        spans: list[OperatorSpan] = []
        with contextlib.suppress(OSError, msgspec.DecodeError):
            spans = msgspec.json.Decoder(register_type(OperatorSpan)).decode_lines(self._path.read_bytes())
        return [span for span in spans if span.end_ns >= start_ns and not 0 < end_ns < span.start_ns]


def num_operator_bytes(folder: Path) -> int:
    """Return the size of all files of a job. A later profile increases it."""
    return sum(path.stat().st_size for path in folder.glob(f"*{_SUFFIX}"))
