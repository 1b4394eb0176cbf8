"""A client's requests to one server: in flight, blocked or retained.

A request is in flight until its answer. When the server rejects a request because of an old view, or has left the
newest view, the session *awaits a view*: its data requests are blocked until :meth:`ClientCore.change` replaces them.

Under sequential consistency the primary answers a push before the replicas have it. So if a replica exists, the client
*retains* the push until its iteration is stable: the whole chain has the sum. At a view change, requests to the new
primaries *replace* unanswered requests; a replaced request is done when all its replacements are done.
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import Final, Protocol

from paceline.protocol.buckets import Buckets
from paceline.protocol.transitions import OUTSIDE, StateTable, Transition

REQUEST: Final = StateTable(
    "a request of a client",
    ("waiting", "blocked", "replaced", "retained"),
    (
        Transition(OUTSIDE, "start", "waiting"),
        Transition(OUTSIDE, "start", "blocked", when="its server waits for the next view"),
        Transition("waiting", "connected", "waiting", "Transmit"),
        Transition("waiting", "refused", "blocked"),
        Transition("waiting", "answered", OUTSIDE),
        Transition("waiting", "answered", "retained", when="until its iteration is stable"),
        Transition("waiting", "failed", OUTSIDE),
        Transition("waiting", "change", "replaced", "Transmit"),
        Transition("waiting", "change", OUTSIDE, when="no server has its buckets"),
        Transition("blocked", "change", "replaced", "Transmit"),
        Transition("blocked", "change", OUTSIDE, when="no server has its buckets"),
        Transition("replaced", "answered", OUTSIDE),
        Transition("replaced", "failed", OUTSIDE),
        Transition("replaced", "change", OUTSIDE, when="no server has its buckets"),
        Transition("retained", "stabilize", OUTSIDE),
        Transition("retained", "change", "retained", "Transmit", when="another server leads a part"),
        Transition("retained", "change", OUTSIDE, "Transmit", when="another server leads"),
        Transition("retained", "change", OUTSIDE, "Discard", when="no server could lead next"),
    ),
)
"""The states of a push or a pull. A replacement is another request with a state of its own."""


class RequestKind(Enum):
    """The kind of a request."""

    PUSH = "push"
    PULL = "pull"
    PUSH_PULL = "push_pull"
    TICK = "tick"
    """The end of the worker's iteration. At a view change, a Resync replaces a tick."""
    CALL = "call"
    """A control message to one server, independent of the view."""


PUSHES: Final = (RequestKind.PUSH, RequestKind.PUSH_PULL)
READS: Final = (RequestKind.PULL, RequestKind.PUSH_PULL)
_WITH_BODY: Final = (RequestKind.PULL, RequestKind.PUSH_PULL, RequestKind.CALL)


class Payload(Protocol):
    """The payload of a request, opaque except for its buckets, which are needed only at view changes."""

    @property
    def buckets(self) -> Buckets:
        """The buckets of the payload."""


class Request:
    """One request to one server, sent as one frame. A user's push or pull has a request for each server.

    :meth:`ServerSession.request` creates it. `sequence` is the number of the push; a pull has the number of the last
    push before the pull.
    """

    __slots__ = (
        "clock", "ends_iteration", "error", "flags", "has_body", "held", "is_done", "is_reported", "kind", "number",
        "parents", "payload", "replacements", "sequence", "server",
    )  # fmt: skip

    def __init__(
        self,
        server: int,
        number: int,
        kind: RequestKind,
        clock: int,
        sequence: int,
        payload: Payload | None = None,
        ends_iteration: bool = False,
    ) -> None:
        self.server = server
        self.number = number
        self.kind = kind
        self.clock = clock
        self.sequence = sequence
        self.payload = payload
        self.ends_iteration = ends_iteration
        self.has_body = kind in _WITH_BODY
        """Whether the answer to this request may have a body."""
        self.is_done = False
        self.is_reported = False
        """Whether the caller has received the error of this request, or is waiting for the request."""
        self.error: Exception | None = None
        self.flags = 0
        self.replacements: list[Request] | None = None
        """The requests that replaced this request at a view change; None if it was not replaced."""
        self.parents: list[Request] | None = None
        self.held: Buckets | None = None
        """For a retained push: the buckets of the push that the server still leads; None if it leads all."""

    @property
    def held_buckets(self) -> Buckets:
        assert self.payload is not None
        return self.payload.buckets if self.held is None else self.payload.buckets & self.held

    def complete_if_replaced(self, failures: list[Request]) -> None:
        """Complete this request if its replacements are done. If it has an unreported error, add it to `failures`."""
        assert self.replacements is not None
        if self.is_done:
            return
        for replacement in self.replacements:
            if not replacement.is_done:
                return
            self.flags |= replacement.flags
            self.error = self.error or replacement.error
        self.is_done = True
        if self.error is not None and self.parents is None and not self.is_reported:
            failures.append(self)
        self.complete_parents(failures)

    def complete_parents(self, failures: list[Request]) -> None:
        """Complete the requests that this request replaced, if all their other replacements are done."""
        for parent in self.parents or ():
            parent.complete_if_replaced(failures)


class ServerSession:
    """The requests to one server, in order. The hot path is :meth:`start` and :meth:`answered`, both O(1)."""

    def __init__(self, server: int, failures: list[Request]) -> None:
        self.server = server
        self.leads: Buckets = 0
        self.in_flight: dict[int, Request] = {}
        """The unanswered requests by number, including blocked requests."""
        self.num_bodies = 0
        """The number of unanswered requests whose answers may have a body."""
        self.is_connected = False
        self.awaits_view = False
        """Whether data requests are blocked."""
        self.retains = False
        """Whether answered pushes are retained until their iteration is stable."""
        self.retained: deque[Request] = deque()
        self.stable_clock = 0
        """Iterations below this clock are stable at this server."""
        self.sends_clock = False
        """Whether the worker's clock was sent to the server in this view; the clock is resent after a reconnection."""
        self._blocked: set[int] = set()
        self._orphans: set[int] = set()  # abandoned requests whose answers will still come
        self._failures = failures
        self._last_number = 0

    def request(
        self, kind: RequestKind, clock: int, sequence: int, payload: Payload | None = None, ends_iteration: bool = False
    ) -> Request:
        self._last_number = (self._last_number + 1) & 0xFFFFFFFF
        return Request(self.server, self._last_number, kind, clock, sequence, payload, ends_iteration)

    def start(self, request: Request) -> bool:
        """Put a request in flight; return False if the request is blocked and must not be transmitted.

        Without a connection the request waits for :meth:`ClientCore.connected`.
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
        if request.has_body:
            self.num_bodies -= 1
        if request.parents is not None:
            request.complete_parents(self._failures)
        if self.retains and request.kind in PUSHES and request.clock >= self.stable_clock:
            self.retained.append(request)
            return True
        return False

    def stabilize(self, number: int, clock: int) -> list[Request]:
        """Record the stable clock in the answer to request `number`: iterations below `clock` are stable.

        Return the released pushes. Call this before :meth:`answered`.
        """
        request = self.in_flight.get(number)
        # The clock is valid only for the buckets that the server led in the view of the request. An abandoned request
        # is not in flight and belongs to an earlier view. A call may belong to an earlier view too.
        if not self.retains or request is None or request.kind is RequestKind.CALL or clock <= self.stable_clock:
            return []
        self.stable_clock = clock
        released: list[Request] = []
        while self.retained and self.retained[0].clock < clock:
            released.append(self.retained.popleft())
        return released

    def refused(self, request: Request) -> None:
        """Block a request that the server rejected, because the client's view is old, until the newer view arrives."""
        self._blocked.add(request.number)
        self.awaits_view = True

    def failed(self, request: Request, error: Exception) -> None:
        request.error = error
        if not request.is_reported and request.parents is None:
            self._failures.append(request)
        self._finish(request)

    def withdraw(self, request: Request) -> None:
        """Drop a request that could not be sent; the caller receives the error."""
        self._finish(request)

    def orphan_answered(self, number: int) -> bool:
        """Record an answer to an abandoned request; return False if no such answer was expected."""
        if number not in self._orphans:
            return False
        self._orphans.remove(number)
        self.num_bodies -= 1
        return True

    def disconnected(self) -> None:
        """Record that the connection is broken: no more answers will come."""
        self.is_connected = False
        self.num_bodies -= len(self._orphans)
        self._orphans.clear()

    def departed(self) -> list[Request]:
        """Record that the server has left the newest view; return the calls, which must fail."""
        self.awaits_view = True
        return [request for request in self.in_flight.values() if request.kind is RequestKind.CALL]

    def unanswered(self) -> list[Request]:
        """Return the requests to resend after a reconnection, in order."""
        return [request for number, request in self.in_flight.items() if number not in self._blocked]

    def give_up_data(self) -> list[Request]:
        """Abandon all requests except calls, and complete ticks; return the requests to replace, in order."""
        given_up = []
        for number, request in list(self.in_flight.items()):
            if request.kind is RequestKind.CALL:
                continue
            del self.in_flight[number]
            if request.has_body:
                self.num_bodies -= 1
            if number not in self._blocked and self.is_connected:
                self._orphans.add(number)
                self.num_bodies += 1
            if request.kind is RequestKind.TICK:
                request.is_done = True
            else:
                given_up.append(request)
        self._blocked.clear()
        self.awaits_view = False
        self.stable_clock = 0  # the former value applies to the buckets of the former view
        return given_up

    def _finish(self, request: Request) -> None:
        request.is_done = True
        if self.in_flight.pop(request.number, None) is not None and request.has_body:
            self.num_bodies -= 1
        if request.parents is not None:
            request.complete_parents(self._failures)
