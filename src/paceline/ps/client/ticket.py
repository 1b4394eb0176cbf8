"""A push or pull in progress, with its requests to the servers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from paceline.errors import PacelineError
from paceline.protocol.client import Request
from paceline.ps.messages import DROPPED

if TYPE_CHECKING:
    from paceline.ps.client.servers import Servers


class Ticket:
    """A push or pull in progress. Until it is done, do not change the arrays that you passed, nor read `out`."""

    __slots__ = ("_finish", "_finished", "_requests", "_result", "_servers")

    def __init__(self, servers: Servers, requests: list[Request], finish: Callable[[], Any] | None = None) -> None:
        self._servers = servers
        self._requests = requests
        self._finish = finish
        self._finished = False
        self._result: Any = None

    def __repr__(self) -> str:
        kind = "push" if self._finish is None else "pull"
        count = sum(not request.is_done for request in self._requests)
        failed = next((request.error for request in self._requests if request.error is not None), None)
        if failed is not None:
            state = f"failed: {failed}"
        elif self._finished or not count:
            state = "done"
        else:
            state = f"waits for {count} of {len(self._requests)} servers"
        return f"<Ticket of a {kind}: {state}>"

    def wait(self) -> None:
        """Wait until every server has acknowledged the push, or sent the values of the pull.

        Raises the error of a server, DeadlineError, or ConnectionLostError.
        """
        if not self._finished:
            self._wait()

    def _wait(self) -> None:
        with self._servers.lock:
            if self._finished:  # by another thread
                return
            try:
                for request in self._requests:
                    self._servers.wait(request)
            except PacelineError:
                for request in self._requests:
                    self._servers.core.report(request)
                raise
            if self._finish is not None:
                self._result = self._finish()
            self._finished = True

    def done(self) -> bool:
        """Return whether :meth:`wait` would return immediately."""
        if self._finished:
            return True
        with self._servers.lock:
            are_done = [self._servers.poll(request) for request in self._requests]
            return all(are_done)

    def result(self) -> Any:
        """Wait; return the values (float32 [n, dim] or [n]) of a pull, None of a push."""
        self.wait()
        return self._result

    @property
    def dropped(self) -> bool:
        """Whether a server has dropped the gradient because it was too stale (policy drop:R). Waits if necessary."""
        self.wait()
        return any(request.flags & DROPPED for request in self._requests)
