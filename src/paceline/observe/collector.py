"""Aggregate the metrics of a run in the process that starts it: the launcher, or the scheduler.

Ranks send reports (:mod:`paceline.observe.recording`) to a datagram socket in a private folder of this user. Other
sources call :meth:`Collector.update`. Once a second the collector passes all values to its sinks.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeAlias

import msgspec
from typing_extensions import override

from paceline.closing import Closing
from paceline.decoded_types import register_type
from paceline.errors import AddressError, printable
from paceline.observe.metrics import Labels, MetricValues, Samples, is_valid
from paceline.observe.recording import MAX_REPORT_BYTES, RankReport
from paceline.temporary import TemporaryFolder

_EVERY_S: Final = 1.0
SILENT_S: Final = 5.0
"""A rank is silent after this time without a report."""
_VARIABLE: Final = "PACELINE_METRICS"
_MAX_EVENTS: Final = 200
_MAX_OPEN_EXCHANGES: Final = 1024
_MAX_RANKS: Final = 1 << 16

AgedReport: TypeAlias = tuple[RankReport, float]
"""A report, and the seconds since its arrival."""

_decode = msgspec.msgpack.Decoder(register_type(RankReport)).decode


class MetricSink(Closing):
    """Receives the values of all metrics once a second."""

    option = ""
    """The option and the file of this output, for warnings."""

    @abstractmethod
    def write(self, samples: Samples, *, is_last: bool) -> None:
        """Process the current values. `is_last` is true in the last call, at the end of the run."""


class ExchangeTimes:
    """Compares the times at which the ranks were ready for the same exchange of gradients.

    The comparison ends when a rank has a new process, because this process counts its exchanges from 1.
    """

    def __init__(self) -> None:
        self._open: dict[int, dict[int, float]] = {}
        self._processes: dict[int, int] = {}

    def add(self, report: RankReport) -> Iterator[tuple[int, int, float]]:
        """Add a rank's times. For each earlier rank, yield the rank, the last rank, and the seconds between them."""
        if self._processes.setdefault(report.rank, report.process) != report.process:
            return
        for number, time_s in report.arrivals:
            times = self._open.setdefault(number, {})
            times[report.rank] = time_s
            if len(times) == report.world_size > 1:
                del self._open[number]
                last = max(times, key=lambda rank: times[rank])
                yield from ((rank, last, times[last] - times[rank]) for rank in times if rank != last)
        while len(self._open) > _MAX_OPEN_EXCHANGES:
            del self._open[next(iter(self._open))]


class Collector(Closing):
    """The values of all metrics of a run. Thread-safe. Start it by :meth:`start`, before the ranks."""

    def __init__(
        self,
        *,
        warn: Callable[[str], None] = lambda text: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`warn` receives a sentence if a sink fails; the other sinks continue."""
        self._sinks: list[MetricSink] = []
        self._warn, self._clock = warn, clock
        self._lock = threading.Lock()
        self._values = MetricValues()
        self._reports: dict[int, tuple[RankReport, float]] = {}
        self._silent: set[int] = set()
        self._exchange_times = ExchangeTimes()
        self._events: deque[tuple[float, str]] = deque(maxlen=_MAX_EVENTS)
        self._closing = contextlib.ExitStack()
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def add_sink(self, sink: MetricSink) -> None:
        """Pass the values to this sink too, and own it. Call this before :meth:`start`."""
        self._sinks.append(sink)

    def start(self) -> None:
        """Open the socket, start the thread, and set ``PACELINE_METRICS`` for the processes that start later."""
        folder = self._closing.enter_context(TemporaryFolder.make("metrics")).path
        listener = self._closing.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        path = str(folder / "reports")
        try:
            listener.bind(path)
        except OSError as error:
            raise AddressError(
                f"cannot receive the ranks' metrics at {path}: {error}. Set TMPDIR to a folder with a shorter name"
            ) from None
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
        before = os.environ.get(_VARIABLE)
        os.environ[_VARIABLE] = path
        self._closing.callback(_restore, before)
        self._thread = threading.Thread(target=self._run, args=(listener,), name="paceline-collector", daemon=True)
        self._thread.start()

    @override
    def close(self) -> None:
        """Write the last values to the sinks if the collector was started, and close the sinks. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        with self._closing:
            if self._thread is not None:
                self._thread.join()
                self._write(is_last=True)
            for sink in self._sinks:
                sink.close()

    def update(self, values: MetricValues) -> None:
        """Replace the values of a source's metrics."""
        with self._lock:
            self._values.samples |= values.samples

    def add_event(self, text: str) -> None:
        """Record an event of the run."""
        with self._lock:
            self._events.append((self._clock(), printable(text)))

    def recent_events(self) -> list[tuple[float, str]]:
        """Return time (of the monotonic clock) and text of the last events, such as a change of the members."""
        with self._lock:
            return list(self._events)

    def receive(self, datagram: bytes) -> None:
        """Process a rank's report. Malformed reports and values are dropped."""
        try:
            report = _decode(datagram)
        except msgspec.MsgspecError:
            return
        self._add(report, 0.0)

    def reports(self) -> list[AgedReport]:
        """Return the last report of each rank, for the collector of another machine.

        The reports have no arrivals, because machines have different clocks.
        """
        with self._lock:
            time_s, found = self._clock(), list(self._reports.values())
        return [(msgspec.structs.replace(report, arrivals=()), time_s - seen_s) for report, seen_s in found]

    def add_reports(self, reports: Sequence[AgedReport]) -> None:
        """Process the :meth:`reports` of another machine."""
        for report, age_s in reports:
            self._add(report, age_s)

    def has_last_reports(self, *, of_all_machines: bool) -> bool:
        """Return whether all known ranks have sent their last report; with `of_all_machines`, all ranks of the run."""
        with self._lock:
            reports = [report for report, _ in self._reports.values()]
        num_ranks = max((report.world_size for report in reports), default=0) if of_all_machines else len(reports)
        return len(reports) >= num_ranks and all(report.is_last for report in reports)

    def _add(self, report: RankReport, age_s: float) -> None:
        if not 0 <= report.rank < _MAX_RANKS:
            return
        with self._lock:
            before, _ = self._reports.get(report.rank, (report, 0.0))
            if before.process != report.process:
                self._events.append((self._clock(), f"rank {report.rank} has a new process"))
            if report.rank in self._silent and age_s < SILENT_S:
                self._silent.remove(report.rank)
                self._events.append((self._clock(), f"rank {report.rank} reports again"))
            self._reports[report.rank] = report, self._clock() - age_s
            for rank, last, seconds in self._exchange_times.add(report):
                self._values.add("paceline_wait_seconds_total", seconds, str(rank), str(last))

    def samples(self) -> Samples:
        """Return the current values of all metrics, by name and labels."""
        with self._lock:
            samples: Samples = {name: dict(values) for name, values in self._values.samples.items()}
            reports, time_s = list(self._reports.items()), self._clock()
        for rank, (report, seen_s) in sorted(reports):
            label: Labels = (str(rank),)
            for name, values in report.samples.items():
                for labels, value in values:
                    if is_valid(name, labels, value, without_rank=True):
                        samples.setdefault(name, {})[label + labels] = value
            samples.setdefault("paceline_rank_last_seen_seconds", {})[label] = (
                0.0 if report.is_last else time_s - seen_s
            )
        return samples

    def find_silent(self) -> None:
        """Record an event for each rank that has not ended, and has sent no report for a few seconds."""
        with self._lock:
            time_s = self._clock()
            for rank, (report, seen_s) in self._reports.items():
                if time_s - seen_s > SILENT_S and rank not in self._silent and not report.is_last:
                    self._silent.add(rank)
                    self._events.append((time_s, f"rank {rank} has sent no report for {SILENT_S:g} s"))

    def _run(self, listener: socket.socket) -> None:
        due_s = time.monotonic() + _EVERY_S
        while not self._is_closed:
            listener.settimeout(min(max(due_s - time.monotonic(), 0.001), 0.1))
            with contextlib.suppress(TimeoutError):
                self.receive(listener.recv(MAX_REPORT_BYTES))
            if time.monotonic() >= due_s:
                due_s += _EVERY_S
                self.find_silent()
                self._write(is_last=False)
        listener.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                self.receive(listener.recv(MAX_REPORT_BYTES))

    def _write(self, *, is_last: bool) -> None:
        for sink in list(self._sinks):
            try:
                sink.write(self.samples(), is_last=is_last)
            except OSError as error:  # such as a full disk
                self._sinks.remove(sink)
                self._warn(f"{sink.option}: {error.strerror or error}. The run continues without this output")
                with contextlib.suppress(OSError):
                    sink.close()


def _restore(before: str | None) -> None:
    os.environ.pop(_VARIABLE, None)
    if before is not None:
        os.environ[_VARIABLE] = before
