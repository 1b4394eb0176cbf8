"""What the chains of a server are told, and what they say is to be done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from paceline.protocol.chains import ChainGroup

FilterState: TypeAlias = tuple[tuple[int, int, int], ...]
"""What :meth:`Delivery.export` gives: (incarnation, sequence, buckets)."""

AGGREGATE = 0
"""The incarnation in whose name a primary pushes the sum of an iteration; its sequence is the iteration plus one."""

CALLS = 1 << 62
"""Added to a client's incarnation to name the sender of its writes and erasures.

They are numbered apart from the client's pushes, since pushes and calls may be sent again in another order.
"""


@dataclass(frozen=True, slots=True)
class Change:
    """The scheduler has published a map of chains."""

    version: int
    groups: tuple[ChainGroup, ...]


@dataclass(slots=True)
class PushReceived:  # what every push makes is not frozen: that takes four times as long to make
    """A client's push (or this server's own sum of an iteration) came. Its keys lie in `buckets`."""

    token: object
    incarnation: int
    sequence: int
    version: int
    buckets: int


@dataclass(slots=True)
class Forwarded:
    """The server before this one in a chain has sent on a push, as its number `number`."""

    token: object
    source: int
    incarnation: int
    sequence: int
    version: int
    buckets: int


@dataclass(slots=True)
class Acknowledged:
    """The server `target` and all behind it have the push that was forwarded to it as `number`."""

    target: int
    number: int


@dataclass(frozen=True, slots=True)
class LinkUp:
    """There is a connection to `target` (again); what was sent on the one before may be lost."""

    target: int


@dataclass(frozen=True, slots=True)
class LinkDown:
    """The connection to `target` broke."""

    target: int


@dataclass(frozen=True, slots=True)
class Confirmed:
    """The server `target` has the bucket that was sent to it whole as `number`."""

    target: int
    number: int


@dataclass(frozen=True, slots=True)
class StateReceived:
    """The server before this one has sent a bucket whole, with the filter that belongs to it."""

    token: object
    source: int
    version: int
    bucket: int
    state: FilterState


@dataclass(slots=True)
class Apply:
    """Apply that part of the push that falls into `buckets`; the rest was applied before."""

    token: object
    buckets: int


@dataclass(slots=True)
class Forward:
    """Send that part of the push that falls into `buckets` to `target`, as number `number`."""

    token: object
    target: int
    number: int
    buckets: int


@dataclass(slots=True)
class Acknowledge:
    """Answer whoever sent the push: this server and all behind it have it.

    The token is done with, but for an Apply right behind: the last server of a chain answers first.
    """

    token: object


@dataclass(frozen=True, slots=True)
class Withhold:
    """This server and all behind have this, but too few of them: the answer waits for a Change, or for `give_up`."""

    token: object


@dataclass(frozen=True, slots=True)
class RefusePush:
    """Tell the client that its map is old: it takes the new one and sends the push again. The token is done with."""

    token: object


@dataclass(frozen=True, slots=True)
class Forget:
    """Nobody awaits an answer to this any more. The token is done with."""

    token: object


@dataclass(frozen=True, slots=True)
class Load:
    """Replace the bucket by the state received, and confirm it to the sender. The token is done with."""

    token: object
    bucket: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Forget all data of these buckets: they are others' now, or come anew."""

    buckets: int


@dataclass(frozen=True, slots=True)
class Hold:
    """These buckets are here from their beginning: their data are the initial values."""

    buckets: int


@dataclass(frozen=True, slots=True)
class Lead:
    """This server is now the primary of `buckets` and no others; `gained` are those that it was not before."""

    buckets: int
    gained: int
    behind: frozenset[int] = frozenset()
    """The other members of these buckets' chains. Each says Ready: a takeover (of iterations) waits for that."""


@dataclass(frozen=True, slots=True)
class Links:
    """Have a connection to each of these servers, and to no other."""

    targets: frozenset[int]


@dataclass(frozen=True, slots=True)
class ReportFilled:
    """Tell the scheduler that `target` now has all of these buckets that it was to be filled with, as of this version.

    The server before it says so, and not itself: from now on nothing is acknowledged here that `target` has not got.
    """

    version: int
    target: int
    buckets: int


@dataclass(frozen=True, slots=True)
class Ready:
    """Tell `target`, which leads buckets that are here too, that it has everything.

    Sent behind the last push that was forwarded to it: as of view `version` this server has no push that it lacks.
    """

    target: int
    version: int


Event: TypeAlias = Change | PushReceived | Forwarded | Acknowledged | LinkUp | LinkDown | Confirmed | StateReceived
Instruction: TypeAlias = (
    Apply
    | Forward
    | Acknowledge
    | Withhold
    | RefusePush
    | Forget
    | Load
    | Drop
    | Hold
    | Lead
    | Links
    | ReportFilled
    | Ready
)
