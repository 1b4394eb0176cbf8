"""A client's requests to one server: in flight, blocked or retained.

A request stays in flight until it is answered, so it is resent after a reconnection. When the server rejects a request
because of an old view, or has left the newest view, the session *awaits a view*: its data requests are blocked until
:meth:`ClientCore.change` replaces them.
"""

from __future__ import annotations

from collections import deque
from itertools import dropwhile

from paceline.protocol.buckets import Buckets
from paceline.protocol.client.due_answers import DueAnswers
from paceline.protocol.client.requests import PUSHES, Payload, Request, RequestKind


class ServerSession:
    """The requests to one server, in order. The hot path is :meth:`start` and :meth:`answered`, both O(1)."""

    def __init__(self, server: int, failures: list[Request]) -> None:
        self.server = server
        self.leads: Buckets = 0
        """The buckets that the server leads in the current view."""
        self.in_flight: dict[int, Request] = {}
        """The unanswered requests by number, including blocked ones."""
        self.num_bodies = 0
        """The number of due answers that may have a body."""
        self.is_connected = False
        self.awaits_view = False
        """Whether data requests are blocked."""
        self.has_departed = False
        """Whether the server has left the newest view."""
        self.retains = False
        """Whether answered pushes are retained until their iteration is stable."""
        self.retained: deque[Request] = deque()
        """Answered pushes that are not stable, in order."""
        self.stable_clock = 0
        """Iterations below it are stable at this server."""
        self.sends_clock = False
        """Whether the server was sent the worker's clock in this view; it is resent after a reconnection."""
        self._blocked: set[int] = set()
        self._due = DueAnswers()
        self._failures = failures
        self._last_number = 0

    def request(
        self, kind: RequestKind, clock: int, sequence: int, payload: Payload | None = None, ends_iteration: bool = False
    ) -> Request:
        """Return a new request, not started."""
        self._last_number = (self._last_number + 1) & 0xFFFFFFFF
        return Request(self.server, self._last_number, kind, clock, sequence, payload, ends_iteration)

    def start(self, request: Request) -> bool:
        """Put a request in flight; return False if it is blocked, so that it must not be transmitted.

        Without a connection it waits for :meth:`ClientCore.connected`.
        """
        self.in_flight[request.number] = request
        if request.has_body:
            self.num_bodies += 1
        if self.awaits_view and request.kind is not RequestKind.CALL:
            self._blocked.add(request.number)
            return False
        return True

    def answered(self, request: Request) -> bool:
        """Record the answer to a request; return whether the request and its payload are retained."""
        request.is_done = True
        del self.in_flight[request.number]
        self._due.received(request.number)
        if request.has_body:
            self.num_bodies -= 1
        if request.parents is not None:
            request.complete_parents(self._failures)
        if self.retains and request.kind in PUSHES and request.clock >= self.stable_clock:
            self.retained.append(request)
            return True
        return False

    def stabilize(self, clock: int) -> list[Request]:
        """Record that iterations below `clock` are stable at this server; return the released pushes."""
        released: list[Request] = []
        if clock > self.stable_clock:
            self.stable_clock = clock
            while self.retained and self.retained[0].clock < clock:
                released.append(self.retained.popleft())
        return released

    def refused(self, request: Request) -> None:
        """Record a rejection because of an old view: block the request until the newer view arrives."""
        self.received(request)
        self._blocked.add(request.number)
        self.awaits_view = True

    def failed(self, request: Request, error: Exception) -> None:
        """Record that a request failed or could not be sent."""
        request.error = error
        if not request.is_reported and request.parents is None:
            self._failures.append(request)
        self.received(request)
        self._finish(request)

    def withdraw(self, request: Request) -> None:
        """Drop a request that could not be sent; its caller has the error."""
        self._finish(request)

    def repeat_from(self, request: Request) -> list[Request]:
        """Return the requests to resend on the same connection, in order: `request` and all later ones.

        The server accepted no such request and has answered the first. It answers each later one as often as it is
        sent.
        """
        later = dropwhile(lambda unanswered: unanswered is not request, self.unanswered())
        repeated = [unanswered for unanswered in later if unanswered.kind is not RequestKind.CALL]
        for unanswered in repeated[1:]:
            self._due.sent_again(unanswered.number)
        return repeated

    def received(self, request: Request) -> None:
        """Record an answer to a request that stays in flight."""
        self._due.received(request.number)

    def orphan_answered(self, number: int) -> bool:
        """Record an answer to an abandoned request; return False if none was due."""
        if not self._due.orphan_received(number):
            return False
        self.num_bodies -= 1
        return True

    def disconnected(self) -> None:
        """Record that the connection is closed."""
        self.is_connected = False
        self.num_bodies -= self._due.disconnected()

    def departed(self) -> list[Request]:
        """Record that the server has left the newest view; return the calls, which must fail."""
        self.awaits_view = self.has_departed = True
        return [request for request in self.in_flight.values() if request.kind is RequestKind.CALL]

    def unanswered(self) -> list[Request]:
        """Return the requests to resend after a reconnection, in order."""
        return [request for number, request in self.in_flight.items() if number not in self._blocked]

    def give_up_data(self) -> list[Request]:
        """Abandon all requests except calls; return the requests to replace, in order. Ticks count as done."""
        given_up = []
        for number, request in list(self.in_flight.items()):
            if request.kind is RequestKind.CALL:
                continue
            del self.in_flight[number]
            if request.has_body:
                self.num_bodies -= 1
            self.num_bodies += self._due.given_up(number, is_due=number not in self._blocked and self.is_connected)
            if request.kind is RequestKind.TICK:
                request.is_done = True
            else:
                given_up.append(request)
        self._blocked.clear()
        self.awaits_view = False
        self.stable_clock = 0  # that applied to the buckets of the former view
        return given_up

    def _finish(self, request: Request) -> None:
        request.is_done = True
        if self.in_flight.pop(request.number, None) is not None and request.has_body:
            self.num_bodies -= 1
        if request.parents is not None:
            request.complete_parents(self._failures)
