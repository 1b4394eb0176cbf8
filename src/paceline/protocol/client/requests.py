"""One request of a client to one server, from its creation until it can no longer be resent.

A pull is done when it is answered. Under sequential consistency a push is answered when the primary has it, before the
replicas have it. So if a replica exists, the client *retains* the push until its iteration is stable. At a view change
unanswered requests are *replaced* by new requests to the new primaries; a replaced request is done when all its
replacements are done.
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
"""The states of a push or a pull. Its replacement is another request."""


class RequestKind(Enum):
    """The kind of a request."""

    PUSH = "push"
    PULL = "pull"
    PUSH_PULL = "push_pull"
    TICK = "tick"
    """The end of the worker's iteration. At a view change a Resync replaces it."""
    CALL = "call"
    """A control message to one server, independent of the view."""


PUSHES: Final = (RequestKind.PUSH, RequestKind.PUSH_PULL)
READS: Final = (RequestKind.PULL, RequestKind.PUSH_PULL)
_WITH_BODY: Final = (RequestKind.PULL, RequestKind.PUSH_PULL, RequestKind.CALL)


class Payload(Protocol):
    """The payload of a request, opaque except for its buckets, which are needed only at view changes."""

    @property
    def buckets(self) -> Buckets:
        """The buckets."""


class Request:
    """One frame; a user's push or pull has one for each server. :meth:`ServerSession.request` makes it.

    `sequence` is the number of the push; a pull has the number of the last push before it.
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
        """Whether the caller received its error, or waits for the request and will receive it."""
        self.error: Exception | None = None
        self.flags = 0
        """The flags of all its answers."""
        self.replacements: list[Request] | None = None
        """Its replacements since a view change."""
        self.parents: list[Request] | None = None
        """The requests that it replaces."""
        self.held: Buckets | None = None
        """For a retained push: the buckets that its server still has; None: all."""

    @property
    def held_buckets(self) -> Buckets:
        """The buckets of a retained push that its server still has."""
        assert self.payload is not None
        return self.payload.buckets if self.held is None else self.payload.buckets & self.held

    def complete_if_replaced(self, failures: list[Request]) -> None:
        """Complete this request if all its replacements are done; add an unreported error to `failures`."""
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
        """Complete the replaced requests whose last replacement this is."""
        for parent in self.parents or ():
            parent.complete_if_replaced(failures)
