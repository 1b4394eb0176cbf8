"""Run the ranks until they end: show their output, forward signals, and handle failures."""

from __future__ import annotations

import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from typing_extensions import Self, override

from paceline.closing import Closing
from paceline.errors import name_ranks
from paceline.launch.run.blame import (
    RankFailure,
    Tracebacks,
    choose_culprit,
    describe_failure,
    exit_status,
    follow_names,
    waiting_time,
)
from paceline.launch.run.elastic import ElasticRun
from paceline.launch.run.processes import Rank, RankProcesses
from paceline.launch.run.streams import Stream
from paceline.launch.screen import Screen
from paceline.launch.supervisor import describe_status
from paceline.observe.stuck.jobs import current_job
from paceline.observe.stuck.report import print_stall

_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SIGNAL_GRACE_S = 30.0
"""Time limit for the end of the ranks after a signal, for example to write a checkpoint (torchrun's default)."""
_FAILURE_GRACE_S = 3.0
_GLIMPSE_S = 5.0
_NOTE_S = 2.0
_POLL_S = 1.0


class Signals(Closing):
    """Forwards signals to the ranks during its block. Signals, and the ends of children, wake the loop."""

    def __init__(self, processes: RankProcesses) -> None:
        self.first: int | None = None
        self.since = 0.0
        self._processes = processes
        self._before: dict[int, Any] = {}
        self.wakeup, self._other_end = socket.socketpair()
        self.wakeup.setblocking(False)
        self._other_end.setblocking(False)
        self._wakeup_before = -1
        self.is_awake = threading.current_thread() is threading.main_thread()
        """Whether signals arrive in this thread; otherwise the loop has to poll."""

    @override
    def __enter__(self) -> Self:
        if self.is_awake:
            for number in _PASSED_ON:
                if signal.getsignal(number) is not signal.SIG_IGN:  # an ignored signal stays ignored, as under nohup
                    self._before[number] = signal.signal(number, self._pass_on)
            self._before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda number, frame: None)
            self._wakeup_before = signal.set_wakeup_fd(self._other_end.fileno(), warn_on_full_buffer=False)
        return self

    @override
    def close(self) -> None:
        if self.is_awake:
            signal.set_wakeup_fd(self._wakeup_before)
            for number, handler in self._before.items():
                signal.signal(number, handler)
        self.wakeup.close()
        self._other_end.close()

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        # Forward the signal here and not in the loop, because a slow reader of standard output may block the loop.
        if self.first is not None:
            self._processes.signal(signal.SIGKILL, groups=True)
            return
        self.first, self.since = number, time.monotonic()
        # A terminal sends SIGINT and SIGHUP to all processes of a program; SIGTERM usually goes to the main process.
        self._processes.signal(number, groups=number != signal.SIGTERM)


class RunLoop:
    """Runs the ranks until all ranks have ended."""

    def __init__(
        self,
        processes: RankProcesses,
        screen: Screen,
        tracebacks: Tracebacks,
        *,
        world_size: int,
        log_dir: Path | None,
        find_lost_server: Callable[[], str | None],
        elastic: ElasticRun | None = None,
    ) -> None:
        self._processes, self._screen, self._tracebacks = processes, screen, tracebacks
        self._world_size, self._log_dir, self._find_lost_server = world_size, log_dir, find_lost_server
        self._elastic = elastic
        self._started = time.monotonic()
        self._failures: list[RankFailure] = []
        """The failures that end the run. An elastic run reports each failure and continues."""
        self._failed_at = 0.0
        self._decides_at: float | None = None
        self._culprit: RankFailure | None = None
        self._lost_server: str | None = None
        self._kills_at: float | None = None
        self._has_noted = False

    def run(self, signals: Signals) -> int:
        selector = selectors.DefaultSelector()
        with selector:
            selector.register(signals.wakeup, selectors.EVENT_READ)
            for rank in self._processes.ranks:
                _read_from(rank, selector)
            checks_at = glimpses_at = 0.0
            while self._processes.living() or self._must_wait(signals):
                time_s = time.monotonic()
                events = selector.select(self._patience(time_s, signals))
                must_check = time.monotonic() >= checks_at or not signals.is_awake
                for key, _ in events:
                    if key.data is None:
                        must_check = _drain(signals.wakeup) or must_check
                    else:
                        self._read(key.data, selector)
                if must_check:
                    self._check(signals, selector)
                    checks_at = time.monotonic() + _POLL_S
                time_s = time.monotonic()
                for number, lines in self._tracebacks.overdue(time_s):
                    self._screen.write(number, lines, is_error=True)
                if time_s >= glimpses_at:
                    glimpses_at = time_s + _GLIMPSE_S
                    for rank in self._processes.living():
                        for stream in rank.streams:
                            stream.glimpse()
                self._decide(time_s, signals)
                if self._elastic is not None and signals.first is None:
                    for rank in self._elastic.replace(self._processes, time_s):
                        _read_from(rank, selector)
        return self._finish(signals)

    def _must_wait(self, signals: Signals) -> bool:
        """Whether an elastic run continues without a living rank on this node."""
        return self._elastic is not None and self._elastic.must_wait and signals.first is None

    def _patience(self, time_s: float, signals: Signals) -> float:
        if not signals.is_awake:
            return 0.05
        times = [self._tracebacks.due(), self._decides_at, self._kills_at, time_s + _POLL_S]
        if self._elastic is not None:
            times.append(self._elastic.next_start_s())
        return max(min(moment for moment in times if moment is not None) - time_s, 0.0)

    def _read(self, stream: Stream, selector: selectors.BaseSelector) -> None:
        if stream.pipe >= 0 and not stream.read():
            # A readable pipe without data means that the rank has closed it. The rank itself may still run.
            selector.unregister(stream.pipe)
            stream.close(drain=True)

    def _check(self, signals: Signals, selector: selectors.BaseSelector) -> None:
        """Detect ranks that have ended, and the loss of a server."""
        for rank in self._processes.find_ended():
            for stream in rank.streams:
                if stream.pipe >= 0:  # unregister before the pipe is closed, because its number may then be reused
                    selector.unregister(stream.pipe)
            self._processes.reap(rank)
            assert rank.status is not None
            if rank.status and signals.first is None and self._elastic is None:
                self._failed_at = self._failed_at or time.monotonic()
                self._failures.append(RankFailure(rank.rank, rank.status, rank.last_lines()))
            if self._elastic is not None:
                if rank.status > 0 and self._elastic.failure() is None:  # neither killed nor ended by a failed training
                    self._screen.write(rank.rank, self._tracebacks.release(rank.rank), is_error=True)
                message = self._elastic.ended(rank)
                if message is not None and signals.first is None:
                    self._screen.write_bytes(f"{message}\n".encode(), is_error=True)
        if self._elastic is not None and signals.first is None:
            for note in [*self._elastic.notes(), *self._elastic.kill_stopped(time.monotonic())]:
                self._screen.write_bytes(f"paceline run: {note}\n".encode(), is_error=True)
        if self._lost_server is None and signals.first is None:
            self._lost_server = self._find_lost_server()

    def _decide(self, time_s: float, signals: Signals) -> None:
        """Find the rank that caused the failures, and end the other ranks."""
        if signals.first is not None:
            self._wait_for_end_after_signal(time_s, signals)
        elif self._culprit is None and self._kills_at is None:
            if self._lost_server is not None:
                culprit = choose_culprit(self._failures)
                self._end_all(time_s, None if culprit is None else culprit.rank)
            elif self._failures:
                culprit = choose_culprit(self._failures)
                living = [rank.rank for rank in self._processes.living()]
                decides_at = self._failed_at + waiting_time(self._failures, living)
                self._decides_at = decides_at
                if culprit is None and (time_s >= decides_at or not living):
                    culprit = follow_names(self._failures)[0]
                if culprit is not None:
                    self._culprit = culprit
                    self._end_all(time_s, culprit.rank)
        if self._kills_at is not None and time_s >= self._kills_at:
            self._kills_at = time_s + _POLL_S
            job = current_job()
            if signals.first is not None and job is not None:
                print_stall(f"paceline run: ranks have not ended {_SIGNAL_GRACE_S:g} s after the signal", job.folder)
            self._processes.signal(signal.SIGKILL, groups=True)

    def _end_all(self, time_s: float, culprit: int | None) -> None:
        self._decides_at = None
        self._kills_at = time_s + _FAILURE_GRACE_S
        lines = self._tracebacks.blame(culprit)
        if culprit is not None:
            self._screen.write(culprit, lines, is_error=True)
        self._processes.signal(signal.SIGTERM, groups=True)

    def _wait_for_end_after_signal(self, time_s: float, signals: Signals) -> None:
        if self._kills_at is None or self._decides_at is not None:
            self._decides_at = None
            self._kills_at = signals.since + _SIGNAL_GRACE_S
        if not self._has_noted and time_s >= signals.since + _NOTE_S and self._processes.living():
            self._has_noted = True
            ranks = name_ranks([rank.rank for rank in self._processes.living()])
            text = f"waiting up to {_SIGNAL_GRACE_S:g} s for {ranks} to end. A second signal kills all ranks"
            self._screen.write_bytes(f"paceline run: {text}\n".encode(), is_error=True)

    def _finish(self, signals: Signals) -> int:
        if signals.first is not None:
            self._tracebacks.blame(None)
        else:
            self._decide(time.monotonic(), signals)
            self._lost_server = self._lost_server or self._find_lost_server()
        for number, lines in self._tracebacks.finish():
            self._screen.write(number, lines, is_error=True)
        if signals.first is not None:
            text = "interrupted" if signals.first == signal.SIGINT else f"ended by {signal.Signals(signals.first).name}"
            self._screen.write_bytes(f"paceline run: {text}\n".encode(), is_error=True)
            return 128 + signals.first
        if self._lost_server is not None:
            text = f"paceline run: {self._lost_server}. The ranks cannot continue and were ended\n"
            self._screen.write_bytes(text.encode(), is_error=True)
            return 1
        if self._culprit is None:
            return int(self._elastic is not None and self._elastic.has_given_up)
        self._report_culprit(self._culprit)
        return exit_status(self._culprit.status)

    def failure(self) -> str | None:
        """Return what ended the run: the lost server, or the rank that failed first."""
        if self._lost_server is not None or self._culprit is None:
            return self._lost_server
        return f"rank {self._culprit.rank} {describe_status(self._culprit.status)}"

    def _report_culprit(self, culprit: RankFailure) -> None:
        is_captured = any(rank.streams for rank in self._processes.ranks)
        if not is_captured and culprit.status > 0:
            return  # the rank has inherited standard error, so its error is already there
        report = describe_failure(
            culprit,
            world_size=self._world_size,
            seconds=time.monotonic() - self._started,
            num_held=self._tracebacks.num_dropped,
            log_dir=str(self._log_dir) if self._log_dir is not None else None,
        )
        self._screen.write_bytes(report, is_error=True)


def _read_from(rank: Rank, selector: selectors.BaseSelector) -> None:
    for stream in rank.streams:
        selector.register(stream.pipe, selectors.EVENT_READ, stream)


def _drain(wakeup: socket.socket) -> bool:
    try:
        while wakeup.recv(4096):
            pass
    except BlockingIOError:
        pass
    return True
