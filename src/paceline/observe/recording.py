"""Record metrics in a rank, and send them once a second to the launcher, which aggregates the ranks.

Without a launcher that collects metrics, :data:`recorder` is None and nothing is recorded. A report is one datagram of
a few kilobytes with the current values. So a lost report changes nothing, and a rank never waits for the launcher.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Final, TypeVar

import msgspec
from typing_extensions import override

from paceline.closing import Closing
from paceline.environment import Environment
from paceline.observe.metrics import Labels, MetricValues, Value
from paceline.observe.spans.window import StepSpans, StepWindow, parse_steps
from paceline.observe.stuck.processes import flight_recorder

MAX_REPORT_BYTES: Final = 1 << 17
REPORT_EVERY_S: Final = 1.0
_MAX_ARRIVALS: Final = 256
"""A report has the times of at most this many exchanges."""
_MAX_LABELS: Final = 200
"""A metric has at most this many combinations of labels, so that a report fits into a datagram."""
_MAX_LABEL_CHARS: Final = 100
_Batch = TypeVar("_Batch")


class RankReport(msgspec.Struct, frozen=True, array_like=True):
    """The current values of one rank's metrics, without the label ``rank``."""

    rank: int
    world_size: int
    process: int
    samples: dict[str, list[tuple[Labels, Value]]]
    arrivals: tuple[tuple[int, float], ...] = ()
    """Number and time of recent exchanges of gradients, at the moment when the rank was ready for the exchange."""
    is_last: bool = False
    """Whether the rank ends, or stops recording, after this report."""


class Recorder:
    """The metrics of this process. Thread-safe; the phases are those of the thread that calls :meth:`begin_step`."""

    def __init__(self, *, rank: int, world_size: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._rank, self._world_size, self._clock = rank, world_size, clock
        self._lock = threading.Lock()
        self._values = MetricValues()
        self._has_warned = False
        self._seconds: dict[str, float] = {}
        self._phase: str | None = None
        self._since = 0.0
        self._step_since: float | None = None
        self._thread = 0
        self._num_arrivals = 0
        self._arrivals: list[tuple[int, float]] = []
        self.spans: StepSpans | None = None
        """Records the steps for the timeline; None without one."""

    def begin_step(self) -> None:
        """End the current iteration of the training loop, and begin the next one with the phase ``data``."""
        with self._lock:
            self._thread = threading.get_ident()
            time_s = self._switch("data")
            if self._step_since is not None:
                self._values.observe("paceline_step_seconds", time_s - self._step_since)
            self._step_since = time_s
        if self.spans is not None:
            self.spans.begin_step()

    def steps(self, batches: Iterator[_Batch], phase: str = "other") -> Iterator[_Batch]:
        """Yield the batches of a training loop. An iteration lasts from the request of a batch to the next request.

        Each batch is followed by the given phase.
        """
        try:
            self.begin_step()
            for batch in batches:
                self.enter(phase)
                yield batch
                self.begin_step()
        finally:
            self.end_loop()

    def end_loop(self) -> None:
        """End the training loop, so that its phases stop."""
        with self._lock:
            self._switch(None)
            self._step_since = None
        if self.spans is not None:
            self.spans.end_loop()

    def enter(self, phase: str, *, after: str | None = None) -> str | None:
        """Count the time from now on for `phase`. Return the former phase; None outside of the training loop.

        Calls of other threads are ignored, except in the phase `after`, in which the loop waits for these threads.
        """
        if self._phase is None or (threading.get_ident() != self._thread and self._phase != after):
            return None
        with self._lock:
            before = self._phase
            self._switch(phase)
        if self.spans is not None:
            self.spans.enter(phase)
        return before

    def arrive(self) -> None:
        """Record that this rank is ready for the next exchange of gradients, for which all ranks wait."""
        with self._lock:
            self._num_arrivals += 1
            if len(self._arrivals) < _MAX_ARRIVALS:
                self._arrivals.append((self._num_arrivals, self._clock()))

    def add(self, name: str, amount: float, *labels: str) -> None:
        """Add to a counter. As in the following methods, `labels` does not contain the rank."""
        with self._lock:
            if self._may_have(name, labels):
                self._values.add(name, amount, *labels)

    def set(self, name: str, value: float, *labels: str) -> None:
        """Set a gauge."""
        with self._lock:
            if self._may_have(name, labels):
                self._values.set(name, value, *labels)

    def observe(self, name: str, value: float, *labels: str) -> None:
        """Add a value to a histogram."""
        with self._lock:
            if self._may_have(name, labels):
                self._values.observe(name, value, *labels)

    def _may_have(self, name: str, labels: Labels) -> bool:
        """Return whether the metric may have these labels; warn once if it has too many."""
        known = self._values.samples.get(name, {})
        if labels in known or (len(known) < _MAX_LABELS and _is_short_text("".join(labels))):
            return True
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{name}: the values of {labels} are not reported, because a rank reports at most {_MAX_LABELS} names "
                f"of at most {_MAX_LABEL_CHARS} characters in UTF-8. Use fewer, shorter or valid names",
                stacklevel=4,
            )
        return False

    def report(self, *, is_last: bool = False) -> RankReport:
        """Return the current values, and the arrivals since the last report."""
        with self._lock:
            self._switch(self._phase)
            for phase, seconds in self._seconds.items():
                self._values.set("paceline_step_phase_seconds_total", seconds, phase)
            arrivals, self._arrivals = tuple(self._arrivals), []
            samples: dict[str, list[tuple[Labels, Value]]] = {
                name: [(labels, list(value) if isinstance(value, list) else value) for labels, value in values.items()]
                for name, values in self._values.samples.items()
            }
        return RankReport(self._rank, self._world_size, os.getpid(), samples, arrivals, is_last)

    def _switch(self, phase: str | None) -> float:
        time_s = self._clock()
        if self._phase is not None:
            self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + time_s - self._since
        self._phase, self._since = phase, time_s
        return time_s


def _is_short_text(label: str) -> bool:
    """Return whether a report may contain the label: it is short, and can be encoded in UTF-8."""
    try:
        label.encode()
    except UnicodeEncodeError:  # a lone surrogate, such as in the name of a file that is not UTF-8
        return False
    return len(label) <= _MAX_LABEL_CHARS


class ReportSender(Closing):
    """Sends a recorder's reports to a socket, in a thread, until it is closed."""

    def __init__(self, recorder: Recorder, path: Path) -> None:
        """Create the sender; :meth:`start` creates and starts it. `path` is the launcher's datagram socket."""
        import psutil

        self._recorder, self._path = recorder, path
        self._process = psutil.Process()
        self._closed = threading.Event()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MAX_REPORT_BYTES)
        self._socket.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="paceline-metrics", daemon=True)

    @classmethod
    def start(cls, recorder: Recorder, path: Path) -> ReportSender:
        """Create a sender, and start its thread."""
        sender = cls(recorder, path)
        sender._thread.start()
        return sender

    @override
    def close(self) -> None:
        """Send the last report."""
        if not self._closed.is_set():
            self._closed.set()
            self._thread.join()
            self._socket.close()

    def send(self, *, is_last: bool = False) -> None:
        """Send a report now. May be called from any thread."""
        self._recorder.set("paceline_rank_memory_bytes", self._process.memory_info().rss)
        with contextlib.suppress(OSError):  # the launcher has ended or is busy: the next report has all values
            self._socket.sendto(msgspec.msgpack.encode(self._recorder.report(is_last=is_last)), str(self._path))

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._closed.wait(REPORT_EVERY_S)
            if is_last:
                self._socket.settimeout(REPORT_EVERY_S)  # no later report replaces a lost one
            self.send(is_last=is_last)


recorder: Recorder | None = None
"""The recorder of this process; None if no launcher collects metrics."""
_sender: ReportSender | None = None
_NOT_RECORDED: Final = contextlib.nullcontext()


def start(settings: Environment, *, rank: int | None = None) -> Recorder | None:
    """Start recording if the launcher collects metrics or writes a timeline. Return the process's recorder.

    `rank` is the number of this process; default: the launcher's number. Later calls have no effect.
    """
    global recorder, _sender
    if recorder is None and (settings.metrics is not None or settings.timeline_steps is not None):
        rank = settings.rank or 0 if rank is None else rank
        recorder = Recorder(rank=rank, world_size=settings.world_size or 1)
        if settings.metrics is not None:
            _sender = ReportSender.start(recorder, settings.metrics)
        if settings.timeline_steps is not None and settings.job_dir is not None:
            with contextlib.suppress(OSError):  # the training works without a timeline
                window = StepWindow(settings.job_dir)
                recorder.spans = StepSpans(flight_recorder(), window, parse_steps(settings.timeline_steps))
        atexit.register(stop)
    return recorder


def stop() -> None:
    """Send the last report, and stop recording. Idempotent."""
    global recorder, _sender
    stopped, sender, _sender, recorder = recorder, _sender, None, None
    if stopped is not None and stopped.spans is not None:
        stopped.spans.end_profile()
    if sender is not None:
        sender.close()


def flush() -> None:
    """Send a report now, because this process may be killed soon."""
    if _sender is not None:
        _sender.send()


def steps(batches: Iterator[_Batch]) -> Iterator[_Batch]:
    """See :meth:`Recorder.steps`."""
    return batches if recorder is None else recorder.steps(batches)


def _forget() -> None:
    global recorder, _sender
    recorder = _sender = None


os.register_at_fork(after_in_child=_forget)


class _Phase:
    def __init__(self, recorder: Recorder, phase: str) -> None:
        self._recorder, self._phase = recorder, phase
        self._before: str | None = None

    def __enter__(self) -> None:
        self._before = self._recorder.enter(self._phase)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            self._recorder.enter(self._before)


def phase(name: str) -> AbstractContextManager[None]:
    """Return a context whose time counts for a phase of the training loop. Then the former phase continues."""
    return _NOT_RECORDED if recorder is None else _Phase(recorder, name)


def waiting() -> AbstractContextManager[None]:
    """Return a context for waiting: its time counts for the phase ``communication``."""
    return phase("communication")
