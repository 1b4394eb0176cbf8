"""Futures: the results of pending calls. A caller waits for a future, or adds functions that run when it is done."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, Generic, Protocol, TypeVar, cast

from typing_extensions import override

from paceline.environment import Timeout, timedelta_of
from paceline.errors import DeadlineError, UsageError

_Result = TypeVar("_Result")
_Other = TypeVar("_Other")
_logger = logging.getLogger("paceline.rpc")
_local = threading.local()


class BlockedThreads(Protocol):
    """An object that is notified when threads begin and end to wait for futures."""

    def begin(self) -> None:
        """Record that this thread starts to wait. Raises UsageError if too many threads wait."""

    def end(self) -> None: ...


def wait_by(waiting: BlockedThreads) -> None:
    """Register `waiting`. From then on, it is notified whenever this thread waits for a future."""
    _local.waiting = waiting


class Future(Generic[_Result]):
    """A result or exception that is set once. Thread-safe."""

    def __init__(self) -> None:
        self._is_done = False
        self._result: Any = None
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._waiters: list[threading.Lock] = []
        self._callbacks: list[Callable[[Future[_Result]], object]] = []

    def done(self) -> bool:
        """Return whether the result or the exception of the future is set."""
        return self._is_done

    def wait(self, timeout: Timeout | None = None) -> _Result:
        """Wait, then return the result or raise the exception. Raises DeadlineError after `timeout`."""
        timeout_s = None if timeout is None else seconds_of(timeout)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        if not self._is_done and not self._wait_reported(deadline):
            raise DeadlineError(f"a future was not set within {timeout_s:g} s")
        return self.value()

    def _wait_reported(self, deadline: float | None) -> bool:
        waiting: BlockedThreads | None = getattr(_local, "waiting", None)
        if waiting is None:
            return self.wait_until(deadline)
        waiting.begin()
        try:
            return self.wait_until(deadline)
        finally:
            waiting.end()

    def value(self) -> _Result:
        """Return the result of a done future, or raise its exception."""
        if self._error is not None:
            raise self._error
        if not self._is_done:
            raise UsageError("the future is not done yet; wait() for it")
        return cast(_Result, self._result)

    def exception(self) -> BaseException | None:
        """Return the exception of a future that is done. Return None if the future has a result."""
        return self._error

    def set_result(self, result: _Result) -> None:
        """Set the result, and run the callbacks in this thread. Raises UsageError if the future is already done."""
        if not self.resolve(result, None):
            raise UsageError("the future has its result already")

    def set_exception(self, error: BaseException) -> None:
        """Set the exception, and run the callbacks in this thread. Raises UsageError if the future is already done."""
        if not self.resolve(None, error):
            raise UsageError("the future has its result already")

    def add_done_callback(self, callback: Callable[[Future[_Result]], object]) -> None:
        """Call ``callback(self)`` when this future is done. The thread that sets the result runs the callback.

        If the future is done already, the callback runs now.
        """
        with self._lock:
            if not self._is_done:
                self._callbacks.append(callback)
                return
        callback(self)

    def then(self, function: Callable[[Future[_Result]], _Other]) -> Future[_Other]:
        """Call ``function(self)`` when this future is done, and return the future of its result."""
        if not callable(function):
            raise UsageError(f"then() got {function!r}, expected a function that takes the future")
        following: Future[_Other] = Future()

        def run(future: Future[_Result]) -> None:
            try:
                result = function(future)
            except BaseException as error:
                following.set_exception(error)
            else:
                following.set_result(result)

        self.add_done_callback(run)
        return following

    # Threads that set results call the following methods.

    def resolve(self, result: Any, error: BaseException | None) -> bool:
        """Set the result or exception, and run the callbacks in this thread. Return False if the future was done."""
        is_first = self.set_outcome(result, error)
        if is_first:
            self.run_callbacks()
        return is_first

    def set_outcome(self, result: Any, error: BaseException | None) -> bool:
        """Set the result or exception, without running callbacks. Return False if the future is already done."""
        with self._lock:
            if self._is_done:
                return False
            self._result, self._error = result, error
            self._is_done = True
            waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.release()
        return True

    @property
    def has_callbacks(self) -> bool:
        return bool(self._callbacks)

    def run_callbacks(self) -> None:
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            try:
                callback(self)
            except Exception:
                _logger.exception("a callback of a future failed")

    def wait_until(self, deadline: float | None) -> bool:
        waiter = self.add_waiter()
        if waiter is not None:
            waiter.acquire(timeout=-1 if deadline is None else left_until(deadline))
        return self._is_done

    def add_waiter(self) -> threading.Lock | None:
        """Return a lock that stays locked until the future is done. Return None if the future is already done."""
        waiter = threading.Lock()
        waiter.acquire()
        with self._lock:
            if self._is_done:
                return None
            self._waiters.append(waiter)
        return waiter

    def wake_one(self) -> bool:
        """Wake one thread that waits for this future, although it is not done. Return whether a thread was waiting."""
        with self._lock:
            if not self._waiters:
                return False
            self._waiters.pop().release()
            return True


class TimedFuture(Future[_Result]):
    """The future of a call within this process. At its deadline, it fails with DeadlineError."""

    def __init__(self, description: str, timeout_s: float) -> None:
        super().__init__()
        self.deadline = time.monotonic() + timeout_s
        """The deadline in seconds of ``time.monotonic``."""
        self._description, self._timeout_s = description, timeout_s

    def expire(self) -> bool:
        """Set a DeadlineError as the outcome, without running callbacks. Return False if the future was done."""
        late = DeadlineError(f"{self._description} has returned no result within {self._timeout_s:g} s")
        return self.set_outcome(None, late)

    @override
    def wait_until(self, deadline: float | None) -> bool:
        super().wait_until(self.deadline if deadline is None else min(deadline, self.deadline))
        if time.monotonic() >= self.deadline and self.expire():
            self.run_callbacks()
        return self._is_done


def seconds_of(timeout: Timeout) -> float:
    """Return a timeout in seconds. The number 0 means no limit, as in torch.distributed.rpc."""
    has_limit = isinstance(timeout, timedelta) or timeout not in (0, math.inf)
    return timedelta_of(timeout).total_seconds() if has_limit else math.inf


def left_until(deadline: float) -> float:
    """Return the seconds until `deadline`, or the longest timeout that a lock supports if that is shorter."""
    return min(max(deadline - time.monotonic(), 0.0), threading.TIMEOUT_MAX)


def collect_all(futures: Iterable[Future[_Result]]) -> Future[list[Future[_Result]]]:
    """Return a future that is set when all `futures` are done."""
    pending = list(futures)
    collected: Future[list[Future[_Result]]] = Future()
    lock, num_left = threading.Lock(), len(pending)

    def count(_: Future[_Result]) -> None:
        nonlocal num_left
        with lock:
            num_left -= 1
        if not num_left:
            collected.resolve(pending, None)

    for future in pending:
        future.add_done_callback(count)
    if not pending:
        collected.set_result(pending)
    return collected


def wait_all(futures: Iterable[Future[_Result]]) -> list[_Result]:
    """Wait for all futures and return their results in order, or raise the first exception."""
    pending = list(futures)
    failure: BaseException | None = None
    for future in pending:
        try:
            future.wait()
        except Exception as error:
            failure = failure or error
    if failure is not None:
        raise failure
    return [future.value() for future in pending]
