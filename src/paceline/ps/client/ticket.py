"""A push or pull under way, and the requests to servers that it consists of."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from paceline.errors import PacelineError
from paceline.ps.client.connection import Pending, ServerConnection
from paceline.ps.messages import DROPPED

if TYPE_CHECKING:
    from paceline.ps.client.client import Client

Parts = list[tuple[ServerConnection, Pending]]


class Ticket:
    """A push or pull under way. Arrays given to it must not be changed, nor `out` read, before it is done."""

    __slots__ = ("_client", "_finish", "_finished", "_parts", "_result")

    def __init__(self, client: Client, parts: Parts, finish: Callable[[], Any] | None = None) -> None:
        self._client = client
        self._parts = parts
        self._finish = finish
        self._finished = False
        self._result: Any = None

    def wait(self) -> None:
        """Wait until it is done: a push is acknowledged by every server, a pull's values are here.

        Raises what a server reported, DeadlineError, or ConnectionLostError.
        """
        if not self._finished:
            self._wait()

    def _wait(self) -> None:
        with self._client.lock:
            if self._finished:  # by another thread
                return
            try:
                for connection, pending in self._parts:
                    connection.wait(pending)
            except PacelineError:
                for connection, pending in self._parts:
                    connection.forget(pending)
                raise
            if self._finish is not None:
                self._result = self._finish()
            self._finished = True

    def done(self) -> bool:
        """Return whether :meth:`wait` would return at once."""
        if self._finished:
            return True
        with self._client.lock:
            are_done = [connection.poll(pending) for connection, pending in self._parts]
            return all(are_done)

    def result(self) -> Any:
        """Wait; return the values (float32 [n, dim] or [n]) of a pull, None of a push."""
        self.wait()
        return self._result

    @property
    def dropped(self) -> bool:
        """Whether a server has dropped the gradient because it was too stale (policy drop:R). Waits."""
        self.wait()
        return any(pending.flags & DROPPED for _, pending in self._parts)
