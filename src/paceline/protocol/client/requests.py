"""One request of a client to one server, from the moment it is made until nothing can need it any more.

A pull is done when it is answered. A push under sequential consistency is answered when the primary has it, before the
servers behind it have: while any server could take over from the primary, the client *retains* the push until its
iteration is stable. At a view change the requests that are not answered are *replaced*: others are made in their place,
for the servers that lead their buckets now, and a replaced request is done when all of those are.
"""

from __future__ import annotations

from enum import Enum
from typing import Final, Protocol

from paceline.protocol.buckets import Buckets
from paceline.protocol.transitions import OUTSIDE, StateTable, Transition

REQUEST: Final = StateTable(
    "a request of a client",
    ("waiting", "blocked", "replaced", "retained"),
    (
        Transition(OUTSIDE, "start", "waiting"),
        Transition(OUTSIDE, "start", "blocked", when="its server awaits the next view"),
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
"""What becomes of a push or a pull. What is made in the place of a replaced one is another request."""


class RequestKind(Enum):
    """What a request asks for."""

    PUSH = "push"
    PULL = "pull"
    PUSH_PULL = "push_pull"
    TICK = "tick"
    """The end of the worker's iteration. A view change makes it needless: the clock is said apart (Resync)."""
    CALL = "call"
    """A control message to one server, whatever the view."""


PUSHES: Final = (RequestKind.PUSH, RequestKind.PUSH_PULL)
READS: Final = (RequestKind.PULL, RequestKind.PUSH_PULL)
_WITH_BODY: Final = (RequestKind.PULL, RequestKind.PUSH_PULL, RequestKind.CALL)


class Payload(Protocol):
    """What a request carries, opaque but for the buckets that it is about. They are needed only at view changes."""

    @property
    def buckets(self) -> Buckets:
        """The buckets."""


class Request:
    """One frame's worth; a user's push or pull is one of these for each server. :meth:`Session.request` makes it.

    `sequence` is the number of the push, or, of a pull, of the last push before it.
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
        """Whether the push also ends the iteration."""
        self.has_body = kind in _WITH_BODY
        """Whether its answer may have a body."""
        self.is_done = False
        self.is_reported = False
        """Whether somebody was told of its failure, or waits and will be."""
        self.error: Exception | None = None
        self.flags = 0
        """Those of all its answers."""
        self.replacements: list[Request] | None = None
        """What a view change has made in its place."""
        self.parents: list[Request] | None = None
        """The requests in whose place it was made."""
        self.held: Buckets | None = None
        """Of a retained push: what its server still has of it; None: all."""

    @property
    def held_buckets(self) -> Buckets:
        """The buckets of a retained push that its server has."""
        assert self.payload is not None
        return self.payload.buckets if self.held is None else self.payload.buckets & self.held

    def complete_if_replaced(self, failures: list[Request]) -> None:
        """Be done once all that was made in its place is; an error that nobody waits for goes to `failures`."""
        assert self.replacements is not None
        if self.is_done:
            return
        for each in self.replacements:
            if not each.is_done:
                return
            self.flags |= each.flags
            self.error = self.error or each.error
        self.is_done = True
        if self.error is not None and self.parents is None and not self.is_reported:
            failures.append(self)
        self.complete_parents(failures)

    def complete_parents(self, failures: list[Request]) -> None:
        """Let those be done that waited only for this one."""
        for parent in self.parents or ():
            parent.complete_if_replaced(failures)
