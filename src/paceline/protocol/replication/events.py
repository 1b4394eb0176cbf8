"""The events and instructions of :class:`~paceline.protocol.replication.Replication`."""

from __future__ import annotations

from typing import Final, TypeAlias

from msgspec import Struct

from paceline.protocol.chains import ChainGroup, Filled
from paceline.protocol.transitions import OUTSIDE, StateTable, Transition

FilterState: TypeAlias = tuple[tuple[int, int, int], ...]
"""The result of :meth:`Delivery.export`: (incarnation, sequence, buckets)."""

AGGREGATE = 0
"""The incarnation of sums that a primary pushes; the sequence of a sum is its iteration plus one."""

CALLS = 1 << 62
"""Offset added to a client's incarnation for writes and erasures, because calls and pushes are numbered separately."""


class Change(Struct, frozen=True):
    """The scheduler has published the chains of a view."""

    version: int
    groups: tuple[ChainGroup, ...]


class Forwarded(Struct, frozen=True):
    """The server `source` has forwarded a push."""

    token: object
    source: int
    incarnation: int
    sequence: int
    version: int
    buckets: int


class Acknowledged(Struct, frozen=True):
    """The server `target` and all its successors have the push that was forwarded as `number`."""

    target: int
    number: int


class LinkUp(Struct, frozen=True):
    """A new connection to `target`; messages on the former connection may be lost."""

    target: int


class LinkDown(Struct, frozen=True):
    """The connection to `target` broke."""

    target: int


class Confirmed(Struct, frozen=True):
    """The server `target` has the bucket that was sent as `number`."""

    target: int
    number: int


class StateReceived(Struct, frozen=True):
    """The predecessor has sent a complete bucket with its filter."""

    token: object
    source: int
    version: int
    bucket: int
    state: FilterState


class Apply(Struct, frozen=True):
    """Apply the part of the push in `buckets`; the other parts are already applied."""

    token: object
    buckets: int


class Forward(Struct, frozen=True):
    """Send the part of the push in `buckets` to `target`, as number `number`."""

    token: object
    target: int
    number: int
    buckets: int


class Acknowledge(Struct, frozen=True):
    """Acknowledge the push to its sender: this server and all its successors have the push.

    The runtime drops the token. Only an Apply that follows directly may still use the token, because the last server of
    a chain acknowledges a push before it applies the push.
    """

    token: object


class Withhold(Struct, frozen=True):
    """Do not answer the push yet, because the chain is too short. The answer follows a Change or a timeout."""

    token: object


class RefusePush(Struct, frozen=True):
    """Reject the push: its view is old, and the client retries in the new view. The runtime drops the token."""

    token: object


class Forget(Struct, frozen=True):
    """Drop the token without an answer."""

    token: object


class Load(Struct, frozen=True):
    """Replace the bucket by the received bucket, and confirm it to the sender. The runtime drops the token."""

    token: object
    bucket: int


class Drop(Struct, frozen=True):
    """Delete the data of `buckets`, which other servers have or will send again."""

    buckets: int


class CreateBuckets(Struct, frozen=True):
    """Create these empty buckets, because this is the first view."""

    buckets: int


class Lead(Struct, frozen=True):
    """This server is now the primary of exactly `buckets`; `gained` are the buckets that it did not lead before."""

    buckets: int
    gained: int
    followers: frozenset[int] = frozenset()
    """The replicas in the chains of `buckets`. A takeover of iterations waits for a Ready from each of these servers.
    """


class Links(Struct, frozen=True):
    """Keep connections to exactly these servers."""

    targets: frozenset[int]


class Ready(Struct, frozen=True):
    """Notify the primary `target` that this server has sent all pushes that `target` may lack in view `version`."""

    target: int
    version: int


Event: TypeAlias = Change | Forwarded | Acknowledged | LinkUp | LinkDown | Confirmed | StateReceived
Instruction: TypeAlias = (
    Apply | Forward | Acknowledge | Withhold | RefusePush | Forget | Load | Drop | CreateBuckets | Lead | Links
    | Filled | Ready
)  # fmt: skip
_ENDS: Final = {"acknowledged": "Acknowledge", "refused": "RefusePush", "forgotten": "Forget"}
_WITHHOLDING: Final = {
    "pending": ("Acknowledged", "LinkUp", "Change"),
    "left": ("Acknowledged", "Change", "LinkUp", "push"),
}
PUSH: Final = StateTable(
    "a push at one server",
    ("pending", "left", "withheld", *_ENDS),
    (
        Transition(OUTSIDE, "Forwarded", "forgotten", "Forget", when="another view or not from its chain"),
        Transition(OUTSIDE, "push", "acknowledged", "Acknowledge", when="no successor"),
        Transition(OUTSIDE, "Forwarded", "acknowledged", "Acknowledge", when="no successor"),
        Transition(OUTSIDE, "push", "pending", "Forward"),
        Transition(OUTSIDE, "Forwarded", "pending", "Forward"),
        Transition(OUTSIDE, "push", "withheld", "Withhold", when="no successor, too few replicas"),
        Transition("pending", "LinkUp", "pending", "Forward"),
        Transition("pending", "Change", "left", "Forward"),
        Transition("left", "Change", "left", "Forward"),
        Transition("left", "LinkUp", "left", "Forward"),
        Transition("pending", "Acknowledged", "acknowledged", "Acknowledge", when="the last successor"),
        Transition("pending", "LinkUp", "acknowledged", "Acknowledge", when="its bucket is filled again"),
        *(Transition("pending", "Change", end, _ENDS[end], when="no successor remains") for end in _ENDS),
        *(
            Transition("left", event, end, _ENDS[end])
            for end in _ENDS
            for event in ("Acknowledged", "Change", "LinkUp", "push", "Forwarded")
        ),
        *(
            Transition(state, event, "withheld", "Withhold", when="too few replicas")
            for state, events in _WITHHOLDING.items()
            for event in events
        ),
        Transition("withheld", "Change", "acknowledged", "Acknowledge", when="enough replicas"),
        Transition("withheld", "Change", "refused", "RefusePush", when="another server leads"),
        Transition("withheld", "give_up", OUTSIDE),
    ),
)
