"""An asynchronous collective, send or receive under way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from paceline.errors import DeadlineError

if TYPE_CHECKING:
    from paceline.collectives.arrays import Memory


class Ticket:
    """What an asynchronous call returns. Its arrays must not be touched before it is done.

    >>> ticket = group.all_reduce_async(gradient)       # doctest: +SKIP
    >>> other_work()                                    # doctest: +SKIP
    >>> total = ticket.result()                         # doctest: +SKIP
    """

    __slots__ = ("_callbacks", "_error", "_finished", "_lock", "_result")

    def __init__(self) -> None:
        self._finished = threading.Event()
        self._lock = threading.Lock()
        self._result: Any = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[Ticket], None]] = []

    def wait(self, timeout: timedelta | None = None) -> None:
        """Wait until it is done. Raises what the call raises; DeadlineError if ``timeout`` passes, and it goes on."""
        if not self._finished.wait(None if timeout is None else timeout.total_seconds()):
            assert timeout is not None
            raise DeadlineError(
                f"the call is not done after {timeout.total_seconds():g} s; wait for it again, or longer"
            )
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        """Return whether it is done, or has failed."""
        return self._finished.is_set()

    def result(self) -> Any:
        """Wait, and return what the call returns."""
        self.wait()
        return self._result

    def exception(self) -> BaseException | None:
        """Return the error of a call that has failed; ``None`` as long as it is not done."""
        return self._error

    def add_done_callback(self, callback: Callable[[Ticket], None]) -> None:
        """Call ``callback(ticket)`` when it is done: in the group's thread, or here and now if it already is."""
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
            callback(self)
        self._callbacks.clear()


class MessageTicket(Ticket):
    """A send or receive."""

    __slots__ = ("_memory", "_pending", "_timeout")

    def __init__(self, pending: Any, timeout: timedelta, memory: Memory) -> None:
        super().__init__()
        self._pending = pending
        self._timeout = timeout
        self._memory = memory

    def wait(self, timeout: timedelta | None = None) -> None:
        """See :meth:`Ticket.wait`."""
        if not self._finished.is_set():
            try:
                result = self._pending.wait((timeout or self._timeout).total_seconds())
                self._memory.give_back()
                self._finish(result)
            except BaseException as error:
                self._finish(None, error)
        super().wait()

    def done(self) -> bool:
        """See :meth:`Ticket.done`."""
        return self._finished.is_set() or bool(self._pending.done())
