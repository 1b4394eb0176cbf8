"""What the chains of a server are told, and what they say is to be done."""

from __future__ import annotations

from typing import TypeAlias

from msgspec import Struct

from paceline.protocol.chains import ChainGroup

FilterState: TypeAlias = tuple[tuple[int, int, int], ...]
"""What :meth:`Delivery.export` gives: (incarnation, sequence, buckets)."""

AGGREGATE = 0
"""The incarnation in whose name a primary pushes the sum of an iteration; its sequence is the iteration plus one."""

CALLS = 1 << 62
"""Added to a client's incarnation to name the sender of its writes and erasures.

They are numbered apart from the client's pushes, since pushes and calls may be sent again in another order.
"""


class Change(Struct, frozen=True):
    """The scheduler has published a map of chains."""

    version: int
    groups: tuple[ChainGroup, ...]


class PushReceived(Struct, frozen=True):
    """A client's push (or this server's own sum of an iteration) came. Its keys lie in `buckets`."""

    token: object
    incarnation: int
    sequence: int
    version: int
    buckets: int


class Forwarded(Struct, frozen=True):
    """The server before this one in a chain has sent on a push, as its number `number`."""

    token: object
    source: int
    incarnation: int
    sequence: int
    version: int
    buckets: int


class Acknowledged(Struct, frozen=True):
    """The server `target` and all behind it have the push that was forwarded to it as `number`."""

    target: int
    number: int


class LinkUp(Struct, frozen=True):
    """There is a connection to `target` (again); what was sent on the one before may be lost."""

    target: int


class LinkDown(Struct, frozen=True):
    """The connection to `target` broke."""

    target: int


class Confirmed(Struct, frozen=True):
    """The server `target` has the bucket that was sent to it whole as `number`."""

    target: int
    number: int


class StateReceived(Struct, frozen=True):
    """The server before this one has sent a bucket whole, with the filter that belongs to it."""

    token: object
    source: int
    version: int
    bucket: int
    state: FilterState


class Apply(Struct, frozen=True):
    """Apply that part of the push that falls into `buckets`; the rest was applied before."""

    token: object
    buckets: int


class Forward(Struct, frozen=True):
    """Send that part of the push that falls into `buckets` to `target`, as number `number`."""

    token: object
    target: int
    number: int
    buckets: int


class Acknowledge(Struct, frozen=True):
    """Answer whoever sent the push: this server and all behind it have it.

    The token is done with, but for an Apply right behind: the last server of a chain answers first.
    """

    token: object


class Withhold(Struct, frozen=True):
    """This server and all behind have this, but too few of them: the answer waits for a Change, or for `give_up`."""

    token: object


class RefusePush(Struct, frozen=True):
    """Tell the client that its map is old: it takes the new one and sends the push again. The token is done with."""

    token: object


class Forget(Struct, frozen=True):
    """Nobody awaits an answer to this any more. The token is done with."""

    token: object


class Load(Struct, frozen=True):
    """Replace the bucket by the state received, and confirm it to the sender. The token is done with."""

    token: object
    bucket: int


class Drop(Struct, frozen=True):
    """Forget all data of these buckets: they are others' now, or come anew."""

    buckets: int


class Hold(Struct, frozen=True):
    """These buckets are here from their beginning: their data are the initial values."""

    buckets: int


class Lead(Struct, frozen=True):
    """This server is now the primary of `buckets` and no others; `gained` are those that it was not before."""

    buckets: int
    gained: int
    behind: frozenset[int] = frozenset()
    """The other members of these buckets' chains. Each says Ready: a takeover (of iterations) waits for that."""


class Links(Struct, frozen=True):
    """Have a connection to each of these servers, and to no other."""

    targets: frozenset[int]


class ReportFilled(Struct, frozen=True):
    """Tell the scheduler that `target` now has all of these buckets that it was to be filled with, as of this version.

    The server before it says so, and not itself: from now on nothing is acknowledged here that `target` has not got.
    """

    version: int
    target: int
    buckets: int


class Ready(Struct, frozen=True):
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
