"""The callee's end of connections. One thread per connection reads requests and runs them, without thread switches.

If a function runs longer than 2 ms, :class:`Standby` assigns another thread to read the connection. So the calls of one
caller run concurrently, and a call may wait for a later call. :class:`Standby` checks the connections every 2 ms while
requests run or replies are pending.
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
"""The maximum number of functions of this process that may wait for remote calls at one time."""


class SpareThreads(BlockedThreads):
    """A thread pool that starts threads on demand and ends idle threads.

    At most `max_threads` threads run tasks. Threads that wait for a remote call are not counted, so that nested calls
    between processes can finish. At most `MAX_WAITING` threads may wait.
    """

    def __init__(self, max_threads: int) -> None:
        self._max_threads = max_threads
        self._tasks: queue.SimpleQueue[tuple[Callable[..., object], tuple[Any, ...]]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_threads = self._num_idle = self._num_waiting = 0

    def run(self, task: Callable[..., object], *args: Any) -> None:
        with self._lock:
            self._tasks.put((task, args))
            is_needed = self._needs_thread()
        if is_needed:
            self._start()

    def has_room(self) -> bool:
        return self._num_threads - self._num_idle - self._num_waiting < self._max_threads

    @override
    def begin(self) -> None:
        with self._lock:
            if self._num_waiting >= MAX_WAITING:
                raise UsageError(
                    f"{MAX_WAITING:,} functions of this process wait for remote calls: calls are nested too deeply, or "
                    "too many run concurrently; return a Future under async_execution, which needs no thread"
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
    """An object that runs requests and sends the replies."""

    def serve_request(self, end: CalleeEnd, received: Received) -> None:
        """Run a request, and send the reply. The method must call :meth:`CalleeEnd.begin` before slow work."""

    def caller_lost(self, end: CalleeEnd) -> None: ...


class CalleeEnd:
    """The callee's end of one caller's connection."""

    def __init__(self, framed: FramedSocket, rank: int, server: RequestServer) -> None:
        self.rank, self.framed = rank, framed
        self._server = server
        self._lock = threading.Lock()
        self._turn: object = None
        self._busy_since = 0.0

    def read_on(self, turn: object) -> None:
        """Read requests and run them until another thread takes over the connection, or the connection ends."""
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
            del received  # frees the memory of the request before the wait for the next one

    def begin(self) -> None:
        """Mark the start of slow work, during which another thread may read the connection."""
        self._busy_since = time.monotonic()

    def take_over(self, time_s: float) -> object | None:
        """Return a token for a new reading thread if the current reading thread has been busy too long.

        Return None if it is idle, or busy for less than `_MOMENT_S`.
        """
        since = self._busy_since
        if not since or time_s - since < _MOMENT_S:
            return None
        with self._lock:
            if self._busy_since != since:
                return None
            self._busy_since = 0.0
            self._turn = object()
            return self._turn

    @property
    def is_busy(self) -> bool:
        return bool(self._busy_since)


class Standby:
    """A background thread that assigns a reading thread to each connection that needs one and has none."""

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
        self._thread.start()

    def watch_callee(self, end: CalleeEnd) -> None:
        self._callees = [*self._callees, end]

    def watch_caller(self, end: CallerEnd) -> None:
        self._callers = [*self._callers, end]

    def watch_timed(self, future: TimedFuture[Any]) -> None:
        """Watch the deadline of a call within this process.

        At the deadline the call must fail, even if no thread waits.
        """
        self._timed[future] = None
        future.add_done_callback(lambda _: self._timed.pop(future, None))
        if future.deadline < self._sleeps_until:
            self._wake.set()

    def forget(self, end: CalleeEnd | CallerEnd) -> None:
        self._callees = [watched for watched in self._callees if watched is not end]
        self._callers = [watched for watched in self._callers if watched is not end]

    def touch(self) -> None:
        self._is_touched = True
        if not self._is_awake:
            self._wake.set()

    def close(self) -> None:
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
                self._sleeps_until = min((watched.deadline for watched in list(self._timed)), default=math.inf)
                if not self._is_touched:  # touch() does not set the event while `_is_awake` is true
                    self._wake.wait(left_until(self._sleeps_until))
                self._wake.clear()
                self._is_awake = True
                self._expire_timed()
                continue
            time.sleep(_MOMENT_S)
            idle = 0 if self._check() else idle + 1

    def _expire_timed(self) -> None:
        time_s = time.monotonic()
        for future in list(self._timed):
            if time_s >= future.deadline and future.expire():
                self._threads.run(future.run_callbacks)

    def _check(self) -> bool:
        """Assign a reading thread to each connection that needs one. Return whether connections need more checks."""
        time_s = time.monotonic()
        self._expire_timed()
        is_needed = False
        for callee in self._callees:
            is_needed |= callee.is_busy
            if self._threads.has_room():
                turn = callee.take_over(time_s)
                if turn is not None:
                    self._threads.run(callee.read_on, turn)
        for caller in self._callers:
            if caller.is_unattended:
                is_needed = True
                if not caller.is_read and time_s - caller.free_since > _MOMENT_S and self._threads.has_room():
                    self._threads.run(caller.read_on)
        return is_needed
