"""The result of a call that is under way, to be waited for or to go on from."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, Generic, Protocol, TypeVar, cast

from typing_extensions import override

from paceline.errors import DeadlineError, UsageError

_Result = TypeVar("_Result")
_Other = TypeVar("_Other")
Timeout = timedelta | float
"""A duration; as a number, in seconds, where 0 is without end, as in torch.distributed.rpc."""
_logger = logging.getLogger("paceline.rpc")
_local = threading.local()


class BlockedThreads(Protocol):
    """Who is told when a thread waits for a future, and then no more."""

    def begin(self) -> None:
        """This thread waits from now on. Raises UsageError if it may not."""

    def end(self) -> None:
        """It waits no more."""


def wait_by(waiting: BlockedThreads) -> None:
    """Have `waiting` told of what this thread waits for."""
    _local.waiting = waiting


class Future(Generic[_Result]):
    """A result, or the exception in its place, that is set once. For several threads at once."""

    def __init__(self) -> None:
        self._is_done = False
        self._result: Any = None
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._waiters: list[threading.Lock] = []
        self._callbacks: list[Callable[[Future[_Result]], object]] = []

    def done(self) -> bool:
        """Return whether the result or the exception is there."""
        return self._is_done

    def wait(self, timeout: Timeout | None = None) -> _Result:
        """Wait for the result and return it, or raise the exception. Raises DeadlineError after `timeout`."""
        timeout_s = None if timeout is None else seconds_of(timeout)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        if not self._is_done and not self._wait_told(deadline):
            raise DeadlineError(f"a future was not set within {timeout_s:g} s")
        return self.value()

    def _wait_told(self, deadline: float | None) -> bool:
        waiting: BlockedThreads | None = getattr(_local, "waiting", None)
        if waiting is None:
            return self.wait_until(deadline)
        waiting.begin()
        try:
            return self.wait_until(deadline)
        finally:
            waiting.end()

    def value(self) -> _Result:
        """Return the result, or raise the exception, of a future that is done."""
        if self._error is not None:
            raise self._error
        if not self._is_done:
            raise UsageError("the future is not done yet; wait() for it")
        return cast(_Result, self._result)

    def exception(self) -> BaseException | None:
        """Return the exception of a future that is done, if it has one."""
        return self._error

    def set_result(self, result: _Result) -> None:
        """Give the result, and run the callbacks in this thread. Raises UsageError if it has one."""
        if not self.resolve(result, None):
            raise UsageError("the future has its result already")

    def set_exception(self, error: BaseException) -> None:
        """Give an exception in place of the result, as :meth:`set_result`."""
        if not self.resolve(None, error):
            raise UsageError("the future has its result already")

    def add_done_callback(self, callback: Callable[[Future[_Result]], object]) -> None:
        """Call `callback` with this future once it is done: now, or in the thread that brings the result."""
        with self._lock:
            if not self._is_done:
                self._callbacks.append(callback)
                return
        callback(self)

    def then(self, function: Callable[[Future[_Result]], _Other]) -> Future[_Other]:
        """Return a future for what `function` returns when it is called with this one, done."""
        if not callable(function):
            raise UsageError(f"then() got {function!r}, a function that takes the future was expected")
        following: Future[_Other] = Future()

        def go_on(future: Future[_Result]) -> None:
            try:
                result = function(future)
            except BaseException as error:
                following.set_exception(error)
            else:
                following.set_result(result)

        self.add_done_callback(go_on)
        return following

    # for those who bring results

    def resolve(self, result: Any, error: BaseException | None) -> bool:
        """Give the result, or the exception, and run the callbacks in this thread; return False if it has one."""
        is_first = self.settle(result, error)
        if is_first:
            self.run_callbacks()
        return is_first

    def settle(self, result: Any, error: BaseException | None) -> bool:
        """Give the result without running the callbacks; return False if it has one already."""
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
        """Whether somebody goes on from this future."""
        return bool(self._callbacks)

    def run_callbacks(self) -> None:
        """Run what waits for this future, which is done."""
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            try:
                callback(self)
            except Exception:
                _logger.exception("a callback of a future failed")

    def wait_until(self, deadline: float | None) -> bool:
        """Wait until the future is done or the time has come (by ``time.monotonic``); return whether it is done."""
        waiter = self.add_waiter()
        if waiter is not None:
            waiter.acquire(timeout=-1 if deadline is None else left_until(deadline))
        return self._is_done

    def add_waiter(self) -> threading.Lock | None:
        """Return a held lock that is released once the future is done; ``None``: it is."""
        waiter = threading.Lock()
        waiter.acquire()
        with self._lock:
            if self._is_done:
                return None
            self._waiters.append(waiter)
        return waiter

    def wake_one(self) -> bool:
        """Wake one thread that waits, although the result is not there; return whether one waits."""
        with self._lock:
            if not self._waiters:
                return False
            self._waiters.pop().release()
            return True


class TimedFuture(Future[_Result]):
    """The result of a call of this process to itself: it is a DeadlineError once its time is up."""

    def __init__(self, what: str, timeout_s: float) -> None:
        """`what` was called, and may take so many seconds from now."""
        super().__init__()
        self.deadline = time.monotonic() + timeout_s
        """When its time is up, by ``time.monotonic``."""
        self._what, self._timeout_s = what, timeout_s

    def expire(self) -> bool:
        """Set the DeadlineError without running the callbacks; return False if there is a result already."""
        late = DeadlineError(f"{self._what} has no result here within {self._timeout_s:g} s")
        return self.settle(None, late)

    @override
    def wait_until(self, deadline: float | None) -> bool:
        super().wait_until(self.deadline if deadline is None else min(deadline, self.deadline))
        if time.monotonic() >= self.deadline and self.expire():
            self.run_callbacks()
        return self._is_done


def seconds_of(timeout: Timeout) -> float:
    """Return a time-out in seconds. Raises UsageError if it is none."""
    if isinstance(timeout, timedelta):
        return timeout.total_seconds()
    if isinstance(timeout, (int, float)) and not isinstance(timeout, bool) and timeout >= 0:
        return float(timeout) or math.inf
    raise UsageError(
        f"timeout is {timeout!r}, a duration was expected: timedelta(seconds=5), or seconds, where 0 is without end"
    )


def left_until(deadline: float) -> float:
    """Return the seconds until a time of ``time.monotonic``, as long as a lock can wait."""
    return min(max(deadline - time.monotonic(), 0.0), threading.TIMEOUT_MAX)


def collect_all(futures: Iterable[Future[_Result]]) -> Future[list[Future[_Result]]]:
    """Return a future of all of these, which is set once each of them has its result or its exception."""
    given = list(futures)
    collected: Future[list[Future[_Result]]] = Future()
    lock, num_left = threading.Lock(), len(given)

    def count(_: Future[_Result]) -> None:
        nonlocal num_left
        with lock:
            num_left -= 1
        if not num_left:
            collected.resolve(given, None)

    for future in given:
        future.add_done_callback(count)
    if not given:
        collected.set_result(given)
    return collected


def wait_all(futures: Iterable[Future[_Result]]) -> list[_Result]:
    """Wait for all and return their results in order; raise the first exception among them, once all are done."""
    given = list(futures)
    failure: BaseException | None = None
    for future in given:
        try:
            future.wait()
        except Exception as error:
            failure = failure or error
    if failure is not None:
        raise failure
    return [future.value() for future in given]
