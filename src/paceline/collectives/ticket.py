"""Tickets: asynchronous collectives, sends and receives in progress."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from paceline.environment import Timeout, timedelta_of
from paceline.errors import DeadlineError, UsageError
from paceline.observe import recording

if TYPE_CHECKING:
    from paceline.collectives.arrays import ArrayMemory
    from paceline.collectives.p2p.pending import Pending

_log = logging.getLogger(__name__)


class CollectiveTicket:
    """An asynchronous call, which returns its result later. Do not use the call's arrays before the call is done.

    >>> ticket = group.all_reduce_async(gradient)       # doctest: +SKIP
    >>> other_work()                                    # doctest: +SKIP
    >>> total = ticket.result()                         # doctest: +SKIP
    """

    __slots__ = ("_callbacks", "_error", "_finished", "_lock", "_result", "_worker")

    def __init__(self, worker: threading.Thread | None = None) -> None:
        """`worker` is the thread that runs the group's calls. This thread must not wait for the ticket."""
        self._worker = worker
        self._finished = threading.Event()
        self._lock = threading.Lock()
        self._result: Any = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[CollectiveTicket], None]] = []

    def wait(self, timeout: Timeout | None = None) -> None:
        """Wait until the call is done. If the call failed, raise its error.

        Raises DeadlineError after ``timeout``, but the call continues. Raises UsageError in a callback of the group's
        tickets, because the group's thread runs the callback and can run the call only afterwards.
        """
        if not self._finished.is_set() and threading.current_thread() is self._worker:
            raise no_waiting_in_callbacks()
        timeout_s = None if timeout is None else timedelta_of(timeout).total_seconds()
        with recording.waiting():
            is_done = self._finished.wait(timeout_s)
        if not is_done:
            raise DeadlineError(f"the call is not done after {timeout_s:g} s; wait again, or longer")
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        """Return whether the call is done or has failed."""
        return self._finished.is_set()

    def result(self) -> Any:
        """Wait until the call is done, and return its result."""
        self.wait()
        return self._result

    def exception(self) -> BaseException | None:
        """Return the error of a failed call. Return None if the call is still running or has succeeded."""
        return self._error

    def add_done_callback(self, callback: Callable[[CollectiveTicket], None]) -> None:
        """Call ``callback(ticket)`` in the group's thread when the call ends. If the call has ended, call it now.

        The callback may start asynchronous calls of the group, but must not wait for these calls.
        """
        with self._lock:
            if not self._finished.is_set():
                self._callbacks.append(callback)
                return
        callback(self)

    def _finish(self, result: Any, error: BaseException | None = None) -> None:
        with self._lock:
            self._result, self._error = result, error
            self._finished.set()
        for callback in self._callbacks:
            try:
                callback(self)
            except Exception:
                _log.exception("a callback of a collective failed")
        self._callbacks.clear()


class MessageTicket(CollectiveTicket):
    """The ticket of a send or receive. The ticket's result is the sender's rank."""

    __slots__ = ("_is_copied_back", "_memory", "_pending", "_timeout")

    def __init__(self, pending: Pending, timeout: timedelta, memory: ArrayMemory) -> None:
        super().__init__()
        self._pending = pending
        self._timeout = timeout
        self._memory = memory
        self._is_copied_back = False

    @override
    def wait(self, timeout: Timeout | None = None) -> None:
        """Wait until the send or receive is done.

        Without ``timeout``, raise RankLostError after the group's timeout.
        """
        if timeout is None:
            self._pending.wait(self._timeout.total_seconds())
        elif not self._pending.wait_for(timedelta_of(timeout).total_seconds()):
            raise DeadlineError(f"the message is not done after {timedelta_of(timeout)}; wait again, or longer")
        self._copy_back()
        if self._pending.error is not None:
            raise self._pending.error

    def _copy_back(self) -> None:
        with self._lock:
            if not self._is_copied_back and self._pending.error is None:
                self._memory.copy_back()
                self._is_copied_back = True

    @override
    def done(self) -> bool:
        if self._pending.finished:
            self._copy_back()
            return True
        return False

    def result(self) -> int:
        """Wait until the send or receive is done, and return the sender's rank."""
        self.wait()
        return self._pending.source

    @override
    def exception(self) -> BaseException | None:
        return self._pending.error

    def add_done_callback(self, callback: Callable[[CollectiveTicket], None]) -> None:
        """Call ``callback(ticket)`` in a new thread when the send or receive is done or has failed."""

        def wait() -> None:
            try:
                self.wait()
            except Exception:
                _log.debug("a message failed", exc_info=True)
            callback(self)

        threading.Thread(target=wait, name="paceline-callback", daemon=True).start()


def no_waiting_in_callbacks() -> UsageError:
    """Return the error for a callback that waits for a call of its group.

    Only the callback's thread runs such calls.
    """
    return UsageError(
        "a callback of a group's ticket waits for another call of the group, which its own thread runs later; "
        "make the call asynchronous without waiting, or wait in another thread"
    )
