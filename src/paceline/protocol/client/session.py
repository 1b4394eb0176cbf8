"""A client's requests to one server: what is in flight, blocked or retained, and what goes out again.

A request stays in flight until it is answered, so after a cut it is sent again. When the server refuses one as of an
old view, or is in the newest view no more, the session *awaits a view*: its data requests are blocked until
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
        """The buckets that the server leads by the current view."""
        self.in_flight: dict[int, Request] = {}
        """By number: what is not answered, the blocked requests included."""
        self.num_bodies = 0
        """How many answers under way may have a body."""
        self.is_connected = False
        self.awaits_view = False
        """Whether data requests are blocked."""
        self.has_departed = False
        """Whether the server is in the newest view no more."""
        self.retains = False
        """Whether answered pushes are retained until their iteration is stable."""
        self.retained: deque[Request] = deque()
        """Pushes that are answered and not stable, in order."""
        self.stable_clock = 0
        """Iterations below it are stable at this server."""
        self.says_clock = False
        """Whether the server was told of the worker's clock by this view: it is told again after a cut."""
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
        """Take a request in flight; return False if it is blocked: then nothing is transmitted.

        While there is no connection it waits for :meth:`ClientCore.connected`.
        """
        self.in_flight[request.number] = request
        if request.has_body:
            self.num_bodies += 1
        if self.awaits_view and request.kind is not RequestKind.CALL:
            self._blocked.add(request.number)
            return False
        return True

    def answered(self, request: Request) -> bool:
        """Take the answer to a request; return whether it is retained: then its payload has to stay."""
        request.is_done = True
        del self.in_flight[request.number]
        self._due.heard(request.number)
        if request.has_body:
            self.num_bodies -= 1
        if request.parents is not None:
            request.complete_parents(self._failures)
        if self.retains and request.kind in PUSHES and request.clock >= self.stable_clock:
            self.retained.append(request)
            return True
        return False

    def stabilize(self, clock: int) -> list[Request]:
        """Take note that iterations below `clock` are stable at this server; return the pushes that this releases."""
        released: list[Request] = []
        if clock > self.stable_clock:
            self.stable_clock = clock
            while self.retained and self.retained[0].clock < clock:
                released.append(self.retained.popleft())
        return released

    def refused(self, request: Request) -> None:
        """Take note that the server has a newer view: block the request until that is here."""
        self.heard(request)
        self._blocked.add(request.number)
        self.awaits_view = True

    def failed(self, request: Request, error: Exception) -> None:
        """Take note that a request failed, or that nothing of it could be sent."""
        request.error = error
        if not request.is_reported and request.parents is None:
            self._failures.append(request)
        self.heard(request)
        self._finish(request)

    def withdraw(self, request: Request) -> None:
        """Forget a request that could not be sent; its caller knows why."""
        self._finish(request)

    def repeat_from(self, request: Request) -> list[Request]:
        """Return what goes out again over the same connection, in order: a request, and all behind it.

        The server has taken none of them, and has said so of the first. It answers the others as often as they go out.
        """
        behind = dropwhile(lambda each: each is not request, self.unanswered())
        repeated = [each for each in behind if each.kind is not RequestKind.CALL]
        for each in repeated[1:]:
            self._due.sent_again(each.number)
        return repeated

    def heard(self, request: Request) -> None:
        """Take note of an answer to a request that is in flight and stays so."""
        self._due.heard(request.number)

    def orphan_answered(self, number: int) -> bool:
        """Take an answer that no request waits for any more; return False if none was due either."""
        if not self._due.orphan_heard(number):
            return False
        self.num_bodies -= 1
        return True

    def disconnected(self) -> None:
        """Take note that the connection is no more."""
        self.is_connected = False
        self.num_bodies -= self._due.disconnected()

    def departed(self) -> list[Request]:
        """Take note that the server is in the newest view no more; return the calls, which are to fail."""
        self.awaits_view = self.has_departed = True
        return [request for request in self.in_flight.values() if request.kind is RequestKind.CALL]

    def unanswered(self) -> list[Request]:
        """What goes out again when the connection was made anew, in order."""
        return [request for number, request in self.in_flight.items() if number not in self._blocked]

    def give_up_data(self) -> list[Request]:
        """Give up all requests but calls, for the next view; return those to replace, in order. Ticks are done."""
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
        self.stable_clock = 0  # it was so for the buckets that the server led
        return given_up

    def _finish(self, request: Request) -> None:
        request.is_done = True
        if self.in_flight.pop(request.number, None) is not None and request.has_body:
            self.num_bodies -= 1
        if request.parents is not None:
            request.complete_parents(self._failures)
