"""The callee's end of connections: requests are read and run by one thread per connection, without a hop.

Where a function takes longer than a moment (it computes, sleeps, waits for another call), `Standby` has another thread
go on reading the connection, so that calls of one caller run beside one another, and one that waits for a later one
gets it. The standby looks every 2 ms while there is something to look after, and sleeps otherwise.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from typing_extensions import override

from paceline.errors import ProtocolError, UsageError
from paceline.rpc.calling import CallerEnd, unreadable
from paceline.rpc.futures import BlockedThreads, TimedFuture, left_until, wait_by
from paceline.rpc.wire.framed_socket import FramedSocket, Received

_logger = logging.getLogger("paceline.rpc")
_MOMENT_S = 0.002
_IDLE_TICKS = 100
_SPARE_S = 5.0
MAX_WAITING = 1000
"""How many functions of a process may wait at once for calls that they have made."""


class SpareThreads(BlockedThreads):
    """Threads that run what they are given; made when needed, ended when not needed for a while.

    At most `max_threads` of them run something; those that wait for the result of a call of their own do not count, so
    that a chain of calls from process to process and back ends. Of these there are at most a thousand.
    """

    def __init__(self, max_threads: int) -> None:
        self._max_threads = max_threads
        self._tasks: queue.SimpleQueue[tuple[Callable[..., object], tuple[Any, ...]]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_threads = self._num_idle = self._num_waiting = 0

    def run(self, task: Callable[..., object], *args: Any) -> None:
        """Run it in another thread: soon, or once one is free where there are as many as there may be."""
        with self._lock:
            self._tasks.put((task, args))
            is_needed = self._needs_thread()
        if is_needed:
            self._start()

    def has_room(self) -> bool:
        """Return whether one more task would run at once."""
        return self._num_threads - self._num_idle - self._num_waiting < self._max_threads

    @override
    def begin(self) -> None:
        with self._lock:
            if self._num_waiting >= MAX_WAITING:
                raise UsageError(
                    f"{MAX_WAITING:,} functions of this process wait for calls that they have made: calls are nested "
                    "too deep, or too many at once; return a Future under async_execution, which takes no thread"
                )
            self._num_waiting += 1
            is_needed = self._needs_thread()
        if is_needed:
            self._start()

    @override
    def end(self) -> None:
        with self._lock:
            self._num_waiting -= 1

    def _needs_thread(self) -> bool:
        """Return whether a thread is to be started, which is counted."""
        if self._num_idle >= self._tasks.qsize() or self._num_threads - self._num_waiting >= self._max_threads:
            return False
        self._num_threads += 1
        return True

    def _start(self) -> None:
        threading.Thread(target=self._work, name="paceline-rpc", daemon=True).start()

    def _work(self) -> None:
        wait_by(self)
        while True:
            with self._lock:
                self._num_idle += 1
            try:
                task, args = self._tasks.get(timeout=_SPARE_S)
            except queue.Empty:
                with self._lock:
                    self._num_idle -= 1
                    if self._tasks.qsize():
                        continue
                    self._num_threads -= 1
                return
            with self._lock:
                self._num_idle -= 1
            try:
                task(*args)
            except BaseException:
                _logger.exception("a thread of rpc failed")
            del task, args


class RequestServer(Protocol):
    """Who answers requests."""

    def serve_request(self, end: CalleeEnd, received: Received) -> None:
        """Carry a request out and answer it; :meth:`CalleeEnd.begin` before what may take long."""

    def caller_lost(self, end: CalleeEnd) -> None:
        """Take note that a caller's connection has ended."""


class CalleeEnd:
    """The connection of one caller."""

    def __init__(self, framed: FramedSocket, rank: int, server: RequestServer) -> None:
        self.rank, self.framed = rank, framed
        self._server = server
        self._lock = threading.Lock()
        self._turn: object = None
        self._busy_since = 0.0

    def read_on(self, turn: object) -> None:
        """Read requests and carry them out, until another thread has taken the turn or the connection ends."""
        self._turn = turn
        while True:
            try:
                self.framed.wait_readable(None)
                received = self.framed.receive()
            except Exception as error:
                ended = unreadable(self.framed.name, error)
                level = logging.WARNING if isinstance(ended, ProtocolError) else logging.DEBUG
                _logger.log(level, "the connection of %s has ended: %s", self.framed.name, ended)
                self._server.caller_lost(self)
                self.framed.close()
                self.framed.release()
                return
            self._server.serve_request(self, received)
            with self._lock:
                if self._turn is not turn:
                    return
                self._busy_since = 0.0
            del received  # its memory, before the next is awaited

    def begin(self) -> None:
        """What follows may take long: from now on another thread may take the reading over."""
        self._busy_since = time.monotonic()

    def take_over(self, now: float) -> object | None:
        """Return a turn to read on with, if the thread that reads has been busy for more than a moment."""
        since = self._busy_since
        if not since or now - since < _MOMENT_S:
            return None
        with self._lock:
            if self._busy_since != since:
                return None
            self._busy_since = 0.0
            self._turn = object()
            return self._turn

    @property
    def is_busy(self) -> bool:
        """Whether a request is being carried out by the thread that reads."""
        return bool(self._busy_since)


class Standby:
    """One thread that sees to it that every connection is read that has to be."""

    def __init__(self, threads: SpareThreads) -> None:
        self._threads = threads
        self._callees: list[CalleeEnd] = []
        self._callers: list[CallerEnd] = []
        self._timed: dict[TimedFuture[Any], None] = {}
        self._sleeps_until = math.inf
        self._is_awake = self._is_touched = self._is_closed = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="paceline-rpc-standby", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def watch_callee(self, end: CalleeEnd) -> None:
        """Look after a caller's connection."""
        self._callees = [*self._callees, end]

    def watch_caller(self, end: CallerEnd) -> None:
        """Look after a connection that was made here."""
        self._callers = [*self._callers, end]

    def watch_timed(self, future: TimedFuture[Any]) -> None:
        """Look after a call of this process to itself, for which nobody may wait."""
        self._timed[future] = None
        future.add_done_callback(lambda _: self._timed.pop(future, None))
        if future.deadline < self._sleeps_until:
            self._wake.set()

    def forget(self, end: CalleeEnd | CallerEnd) -> None:
        """Look after it no more."""
        self._callees = [each for each in self._callees if each is not end]
        self._callers = [each for each in self._callers if each is not end]

    def touch(self) -> None:
        """There is something to look after."""
        self._is_touched = True
        if not self._is_awake:
            self._wake.set()

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._is_closed = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _watch(self) -> None:
        idle = _IDLE_TICKS
        while not self._is_closed:
            if self._is_touched:
                self._is_touched, idle = False, 0
            if idle >= _IDLE_TICKS:
                self._is_awake = False
                self._sleeps_until = min((each.deadline for each in list(self._timed)), default=math.inf)
                if not self._is_touched:  # who touched before that did not wake
                    self._wake.wait(left_until(self._sleeps_until))
                self._wake.clear()
                self._is_awake = True
                self._expire_timed()
                continue
            time.sleep(_MOMENT_S)
            idle = 0 if self._look() else idle + 1

    def _expire_timed(self) -> None:
        """End the calls of this process to itself whose time is up."""
        now = time.monotonic()
        for future in list(self._timed):
            if now >= future.deadline and future.expire():
                self._threads.run(future.run_callbacks)

    def _look(self) -> bool:
        """Have threads read what nobody does; return whether there is more to look after."""
        now = time.monotonic()
        self._expire_timed()
        is_needed = False
        for callee in self._callees:
            is_needed |= callee.is_busy
            if self._threads.has_room():
                turn = callee.take_over(now)
                if turn is not None:
                    self._threads.run(callee.read_on, turn)
        for caller in self._callers:
            if caller.is_unattended:
                is_needed = True
                if not caller.is_read and now - caller.free_since > _MOMENT_S and self._threads.has_room():
                    self._threads.run(caller.read_on)
        return is_needed
