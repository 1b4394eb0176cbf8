"""One server's part in replication: its place in every bucket's chain, what it forwards, what it may acknowledge.

A server holds one :class:`Replication`. Its runtime feeds it the scheduler's maps, the pushes of clients, those that
the servers before it in a chain forward, and what becomes of its links; it does as the instructions bid. Payloads never
come here: a *token* stands for each, and the runtime keeps what belongs to it until it is told to acknowledge, refuse
or forget it.

What is promised: a push is acknowledged when every member of its buckets' chains has it; each applies it once, however
often and along whatever way it comes; a server that is no member of a chain any more takes part in nothing that can be
acknowledged, since the version of every message is compared with its map. With `min_replicas` a primary *withholds* its
acknowledgement while a chain is shorter: the push is applied and on every server of the chain, and the client hears of
it when the chain is long enough again.

Source: van Renesse and Schneider 2004 "Chain Replication for Supporting High Throughput and Availability"; the map and
its versions as in PacificA (Lin et al. 2008); OSDI'14 "Scaling Distributed Machine Learning with the Parameter Server",
section 4.3.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from paceline.protocol.buckets import Buckets, buckets_in, count
from paceline.protocol.chains import ChainGroup, in_chain
from paceline.protocol.delivery import Delivery
from paceline.protocol.transitions import OUTSIDE, StateTable, Transition

FilterState: TypeAlias = tuple[tuple[int, int, int], ...]
"""What :meth:`Delivery.export` gives: (incarnation, sequence, buckets)."""

AGGREGATE = 0
"""The incarnation in whose name a primary pushes the sum of an iteration; its sequence is the iteration plus one."""

_REPORT_BUCKETS = 64


@dataclass(frozen=True, slots=True)
class Change:
    """The scheduler has published a map of chains."""

    version: int
    groups: tuple[ChainGroup, ...]


@dataclass(frozen=True, slots=True)
class Push:
    """A client's push (or this server's own sum of an iteration) came. Its keys lie in `buckets`."""

    token: object
    incarnation: int
    sequence: int
    version: int
    buckets: int


@dataclass(frozen=True, slots=True)
class Forwarded:
    """The server before this one in a chain has sent on a push, as its number `number`."""

    token: object
    source: int
    incarnation: int
    sequence: int
    version: int
    buckets: int


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class Apply:
    """Apply that part of the push that falls into `buckets`; the rest was applied before."""

    token: object
    buckets: int


@dataclass(frozen=True, slots=True)
class Forward:
    """Send that part of the push that falls into `buckets` to `target`, as number `number`."""

    token: object
    target: int
    number: int
    buckets: int


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """Answer whoever sent the push: this server and all behind it have it. The token is done with."""

    token: object


@dataclass(frozen=True, slots=True)
class Withhold:
    """This server and all behind have this, but too few of them: the answer waits for a Change, or for `give_up`."""

    token: object


@dataclass(frozen=True, slots=True)
class Refuse:
    """Tell the client that its map is old: it takes the new one and sends the push again. The token is done with."""

    token: object


@dataclass(frozen=True, slots=True)
class Forget:
    """Nobody awaits an answer to this any more. The token is done with."""

    token: object


@dataclass(frozen=True, slots=True)
class Retry:
    """This came before the map that it was sent under; it is here now: feed it again."""

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
class Report:
    """Tell the scheduler that `target` now has all of these buckets that it was to be filled with, as of this version.

    The server before it says so, and not itself: from now on nothing is acknowledged here that `target` has not got.
    """

    version: int
    target: int
    buckets: int


@dataclass(frozen=True, slots=True)
class Ready:
    """Tell `target`, which leads buckets that are here too, behind all that was forwarded to it: that was all of it.

    As of this version nothing is here any more that it may lack.
    """

    target: int
    version: int


Event: TypeAlias = Change | Push | Forwarded | Acknowledged | LinkUp | LinkDown | Confirmed | StateReceived
Instruction: TypeAlias = (
    Apply
    | Forward
    | Acknowledge
    | Withhold
    | Refuse
    | Forget
    | Retry
    | Load
    | Drop
    | Hold
    | Lead
    | Links
    | Report
    | Ready
)

_ENDS: Final = {"acknowledged": "Acknowledge", "refused": "Refuse", "forgotten": "Forget"}
_WITHHOLDING: Final = {
    "pending": ("Acknowledged", "LinkUp", "Change"),
    "left": ("Acknowledged", "Change", "LinkUp", "Push"),
}
PUSH: Final = StateTable(
    "a push at one server",
    ("early", "pending", "left", "withheld", *_ENDS),
    (
        Transition(OUTSIDE, "Push", "early", when="newer map"),
        Transition(OUTSIDE, "Forwarded", "early", when="newer map"),
        Transition("early", "Change", OUTSIDE, "Retry"),
        Transition(OUTSIDE, "Push", "refused", "Refuse", when="older map or not its primary"),
        Transition(OUTSIDE, "Forwarded", "forgotten", "Forget", when="older map or not from its chain"),
        Transition(OUTSIDE, "Push", "acknowledged", "Acknowledge", when="nobody behind"),
        Transition(OUTSIDE, "Forwarded", "acknowledged", "Acknowledge", when="nobody behind"),
        Transition(OUTSIDE, "Push", "pending", "Forward"),
        Transition(OUTSIDE, "Forwarded", "pending", "Forward"),
        Transition(OUTSIDE, "Push", "withheld", "Withhold", when="nobody behind, too few replicas"),
        Transition("pending", "LinkUp", "pending", "Forward"),
        Transition("pending", "Change", "left", "Forward"),
        Transition("left", "Change", "left", "Forward"),
        Transition("left", "LinkUp", "left", "Forward"),
        Transition("pending", "Acknowledged", "acknowledged", "Acknowledge", when="the last one behind"),
        Transition("pending", "LinkUp", "acknowledged", "Acknowledge", when="its bucket goes anew"),
        *(Transition("pending", "Change", end, _ENDS[end], when="nobody behind now") for end in _ENDS),
        *(
            Transition("left", event, end, _ENDS[end])
            for end in _ENDS
            for event in ("Acknowledged", "Change", "LinkUp", "Push", "Forwarded")
        ),
        *(
            Transition(state, event, "withheld", "Withhold", when="too few replicas")
            for state, events in _WITHHOLDING.items()
            for event in events
        ),
        Transition("withheld", "Change", "acknowledged", "Acknowledge", when="replicas enough"),
        Transition("withheld", "Change", "refused", "Refuse", when="led elsewhere"),
        Transition("withheld", "give_up", OUTSIDE),
    ),
)


@dataclass(eq=False, slots=True)
class _Pending:
    """A push that the servers behind this one do not all have yet."""

    token: object
    incarnation: int
    sequence: int
    buckets: int
    is_ours: bool
    """Whether this server took it as the primary, from a client or as its own sum."""
    is_left: bool = False
    """Whether it came by an older map."""
    end: type[Acknowledge] | type[Refuse] | type[Forget] = Acknowledge
    """What becomes of the token when all servers behind have the push."""
    waiting: dict[int, tuple[int, int]] = field(default_factory=dict)  # target → number, buckets

    @property
    def is_sum(self) -> bool:
        """Whether this server is the one that has summed it."""
        return self.is_ours and self.incarnation == AGGREGATE


def _in_order(pushes: Iterable[_Pending]) -> list[_Pending]:
    """These pushes as they came, but those of one sender by their numbers: what came again is no later for it."""
    by_sender: dict[int, list[_Pending]] = {}
    senders = []
    for push in pushes:
        senders.append(push.incarnation)
        by_sender.setdefault(push.incarnation, []).append(push)
    for own in by_sender.values():
        own.sort(key=lambda push: -push.sequence)
    return [by_sender[sender].pop() for sender in senders]


class Replication:
    """The chains as the server of incarnation `me` sees them.

    While a chain has fewer than `min_replicas` members besides its primary, that one withholds its acknowledgements of
    pushes to the bucket; sums of iterations (:class:`~paceline.protocol.iterations.Iterations`) excepted.

    Pushes of one incarnation must come in rising order of their numbers for each bucket, repeats aside; links must keep
    the order of what is sent on them.
    """

    def __init__(self, me: int, min_replicas: int = 0) -> None:
        self._me = me
        self._min_replicas = min_replicas
        self._version = 0
        self._primary = 0
        self._short = 0  # buckets of this primary whose chains have too few replicas for an acknowledgement
        self._shortages: dict[int, int] = {}  # number of replicas → those of them that have so many
        self._withheld: dict[_Pending, None] = {}  # pushes that the chain has, and that it is too short for
        self._filling = 0  # this server is being filled with these
        self._before: dict[int, int] = {}  # source → buckets in whose chains it is before this server
        self._behind: dict[int, int] = {}  # target → buckets in whose chains it is behind this server
        self._ahead: dict[int, int] = {}  # server → buckets in whose chains it is anywhere ahead of this server
        self._leaders: dict[int, int] = {}  # server → buckets that it leads and of which this server is a member
        self._after: dict[int, int] = {}  # server → buckets that this server leads and of which that one is a member
        self._overtaken = 0  # buckets in which a server ahead may lack what is pending here from older maps
        self._fills: dict[int, int] = {}  # target → of these, those that it is being filled with
        self._sent: dict[int, int] = {}  # target → of those, the ones that were sent to it
        self._confirmed: dict[int, int] = {}  # target → of those, the ones that it has confirmed
        self._reported: dict[int, int] = {}
        self._states: dict[int, tuple[int, int]] = {}  # number → target, bucket that is on its way
        self._up: set[int] = set()
        self._filter = Delivery(0)
        self._pending: dict[_Pending, None] = {}
        self._by_push: dict[tuple[int, int], list[_Pending]] = {}  # incarnation, sequence → pending, in parts
        self._by_number: dict[int, _Pending] = {}  # forwards under way
        self._number = 0
        self._early: list[object] = []

    @property
    def version(self) -> int:
        """The version of the map; 0 before the first."""
        return self._version

    @property
    def primary(self) -> int:
        """The buckets of which this server is the primary."""
        return self._primary

    @property
    def held(self) -> int:
        """The buckets whose data are here whole."""
        return self._filter.buckets

    @property
    def filling(self) -> frozenset[int]:
        """The servers that this one has to fill: see :meth:`next_fill`."""
        return frozenset(target for target, buckets in self._fills.items() if buckets & ~self._sent[target])

    @property
    def is_in_chain(self) -> bool:
        """Whether this server is a member of any chain, or is being filled."""
        return bool(self._filter.buckets | self._filling)

    @property
    def has_successors(self) -> bool:
        """Whether anything has to be forwarded: if not, and the version is right, :meth:`admit` is all there is."""
        return bool(self._behind)

    @property
    def short(self) -> int:
        """The buckets of this primary whose chains have too few replicas for an acknowledgement."""
        return self._short

    def shortage(self, buckets: int) -> tuple[int, int] | None:
        """Return one of `buckets` whose chain is too short, and how many replicas it has; None if there is none."""
        for num_replicas, short in sorted(self._shortages.items()):
            if short & buckets:
                return next(buckets_in(short & buckets)), num_replicas
        return None

    def checkable(self, target: int) -> int:
        """Return the buckets of which `target` has what this server has, behind all that was sent to it so far."""
        if target not in self._up:
            return 0
        return self._behind.get(target, 0) & ~self._fills.get(target, 0) & ~self._ahead_of_primary()

    def is_comparable(self, source: int, version: int, bucket: int) -> bool:
        """Return whether this server has of a bucket what `source` had when it sent this by the map of `version`.

        It may have more where it was ahead of that one: then it is still handing it up.
        """
        from_it = self._before.get(source, 0) & self._filter.buckets & ~self._filling
        if version != self._version or not from_it >> bucket & 1:
            return False
        return not any(push.is_left and push.buckets >> bucket & 1 for push in self._pending)

    def _ahead_of_primary(self) -> int:
        """Return the buckets of which this server has pushes that the primary may lack: they are being handed up."""
        if not self._overtaken:
            return 0
        buckets = 0
        for push in self._pending:
            if push.is_left:
                buckets |= push.buckets
        return buckets & self._overtaken

    def applied_to(self, bucket: int) -> tuple[tuple[int, int], ...]:
        """Return the last push of each incarnation that counts as applied to a bucket."""
        return tuple((incarnation, last) for incarnation, last, _ in self._filter.export(1 << bucket))

    def give_up(self, token: object) -> None:
        """Withhold the answer to this push no longer: its sender was told that its time is over."""
        self._withheld = {push: None for push in self._withheld if push.token is not token}

    @property
    def num_pending(self) -> int:
        """How many pushes wait for the servers behind."""
        return len(self._pending)

    @property
    def waiting(self) -> set[object]:
        """The tokens of pushes that wait: for the servers behind, or for replicas enough."""
        return {push.token for push in self._pending} | {push.token for push in self._withheld}

    def forwarded(self, incarnation: int, sequence: int) -> list[tuple[object, Buckets]]:
        """Return the tokens of a push that servers behind do not all have, each with its buckets, the last first."""
        return [(push.token, push.buckets) for push in reversed(self._by_push.get((incarnation, sequence), ()))]

    @property
    def inherited(self) -> int | None:
        """The first sum that came from a primary before this one, and that the servers behind do not all have yet.

        None if there is none in the buckets that this server leads now. It is the number of the push: the iteration
        plus one.
        """
        mine = self._primary
        sums = (push for push in self._pending if push.incarnation == AGGREGATE and not push.is_ours)
        return min((push.sequence for push in sums if push.buckets & mine), default=None)

    @property
    def num_complete(self) -> int:
        """How many iterations are complete in that bucket, of those that this server leads, that is furthest on."""
        return max(
            (last for incarnation, last, _ in self._filter.export(self._primary) if incarnation == AGGREGATE), default=0
        )

    def admit(self, incarnation: int, sequence: int) -> int:
        """Do what a Push of this version does where nothing is forwarded: return the buckets for which it is new.

        The push counts as one to all buckets of this primary, those included in which it has no key.
        """
        return self._filter.admit(incarnation, sequence, self._primary)

    def missing(self, incarnation: int, sequence: int, buckets: int) -> int:
        """Return for which of `buckets` (all held) such a push would be new."""
        return self._filter.missing(incarnation, sequence, buckets)

    def handle(self, event: Event) -> list[Instruction]:
        """Take one event; return what to do, in order."""
        match event:
            case Push():
                return self._push(event)
            case Forwarded():
                return self._forwarded(event)
            case Acknowledged(target, number):
                return self._acknowledged(target, number)
            case Change(version, groups):
                return self._change(version, groups) if version > self._version else []
            case StateReceived():
                return self._state_received(event)
            case Confirmed(target, number):
                return self._state_confirmed(target, number)
            case LinkUp(target):
                # Rule 6: what was on its way on the link before is lost: it is sent again.
                self._up.add(target)
                self._lose_states(target)
                again = self._forward_again([push for push in self._pending if target in push.waiting])
                return [*again, *self._ready([target])]
            case LinkDown(target):
                self._up.discard(target)
                return []

    # Pushes.

    def _push(self, event: Push) -> list[Instruction]:
        # Rule 1: a message is of this server's version or it is not taken.
        if event.version > self._version:
            self._early.append(event.token)
            return []
        if event.version < self._version or event.buckets & ~self._primary:
            return [Refuse(event.token)]
        return self._take(_Pending(event.token, event.incarnation, event.sequence, event.buckets, is_ours=True))

    def _forwarded(self, event: Forwarded) -> list[Instruction]:
        if event.version > self._version:
            self._early.append(event.token)
            return []
        sound = (self._before.get(event.source, 0) | self._after.get(event.source, 0)) & self._filter.buckets
        if event.version < self._version or event.buckets & ~sound:
            return [Forget(event.token)]
        return self._take(_Pending(event.token, event.incarnation, event.sequence, event.buckets, is_ours=False))

    def _take(self, push: _Pending) -> list[Instruction]:
        # Rule 2: what is new here is applied, and all of it goes on: the servers behind ask their own filters.
        # It goes on first, so that they work at the same time.
        instructions: list[Instruction] = []
        fresh = self._filter.admit(push.incarnation, push.sequence, push.buckets)
        known = self._by_push.get((push.incarnation, push.sequence))
        if known is not None and fresh != push.buckets:
            instructions += self._replace([former for former in known if former.is_left], push)
        instructions += self._forward(push)
        if fresh:
            instructions.append(Apply(push.token, fresh))
        if not push.waiting:
            return [*instructions, *self._end(push)]
        self._pending[push] = None
        self._by_push.setdefault((push.incarnation, push.sequence), []).append(push)
        return instructions

    def _replace(self, known: list[_Pending], push: _Pending) -> list[Instruction]:
        """Let a push that came again take over the buckets from what is under way of it since an older map.

        It is sent on once more: to wait for the former one instead would be to wait for other buckets too, and servers
        could come to wait for one another in a circle. What is to be handed up stays: the server ahead that sent it
        again hands it up too, but nobody knows in which order the two come.
        """
        taken = push.buckets & ~self._overtaken
        instructions: list[Instruction] = []
        for former in known:
            if not former.buckets & taken:
                continue
            former.buckets &= ~taken
            for target, (number, buckets) in list(former.waiting.items()):
                if buckets & ~taken:
                    former.waiting[target] = number, buckets & ~taken
                else:  # what it waits for is on its way once more, and is answered under that number
                    del self._by_number[number], former.waiting[target]
            if former.is_ours and not push.is_ours and not former.is_sum:
                former.end = Refuse  # its client has no part in what was handed up, and asks again
            elif not former.buckets and not former.is_sum:
                former.end = Forget
            if not former.waiting:
                instructions += self._end(former)
        return instructions

    def _end(self, push: _Pending) -> list[Instruction]:
        """Forget a push, with what is to be told to its sender."""
        self._forget_numbers(push)
        if push in self._pending:
            del self._pending[push]
            key = push.incarnation, push.sequence
            self._by_push[key].remove(push)
            if not self._by_push[key]:
                del self._by_push[key]
        # Rule 10: a chain with too few replicas acknowledges nothing to a client.
        if push.is_ours and push.end is Acknowledge and not push.is_sum and push.buckets & self._short:
            self._withheld[push] = None
            return [Withhold(push.token)]
        return [push.end(push.token)]

    def _forward(self, push: _Pending) -> Iterator[Forward]:
        for target in {**self._behind, **self._leaders}:
            # Rule 3: of what a server is being filled with it gets a push only once it has the bucket.
            wanted = self._behind.get(target, 0) & ~self._fills.get(target, 0) | self._sent.get(target, 0)
            if push.is_left:
                # Rule 8: where a server has got ahead of this one, the primary gets what may not have come to that one,
                # and hands it down the chain: a server behind that has it would be ahead of the primary, unknowingly.
                wanted = wanted & ~self._overtaken | self._leaders.get(target, 0) & self._overtaken
            buckets = push.buckets & wanted
            if buckets:
                self._number += 1
                push.waiting[target] = self._number, buckets
                self._by_number[self._number] = push
                yield Forward(push.token, target, self._number, buckets)

    def _acknowledged(self, target: int, number: int) -> list[Instruction]:
        push = self._by_number.get(number)
        if push is None or push.waiting.get(target, (0, 0))[0] != number:
            return []
        del self._by_number[number], push.waiting[target]
        if push.waiting:
            return []
        # Rule 4: acknowledged is what all servers behind have acknowledged.
        return self._end(push)

    def _forward_again(self, pushes: Iterable[_Pending]) -> list[Instruction]:
        """Forward pushes under new numbers, in their order; acknowledge those that nobody is left to wait for."""
        instructions: list[Instruction] = []
        for push in _in_order(pushes):
            self._forget_numbers(push)
            instructions += self._forward(push)
            if not push.waiting:
                instructions += self._end(push)
        return instructions

    def _forget_numbers(self, push: _Pending) -> None:
        for number, _ in push.waiting.values():
            self._by_number.pop(number, None)
        push.waiting = {}

    # Maps.

    def _change(self, version: int, groups: tuple[ChainGroup, ...]) -> list[Instruction]:
        me = self._me
        members = filling = primary = 0
        shortages: dict[int, int] = {}
        before: dict[int, int] = {}
        behind: dict[int, int] = {}
        fills: dict[int, int] = {}
        ahead: dict[int, int] = {}
        leaders: dict[int, int] = {}
        after: dict[int, int] = {}
        for group in groups:
            chain = in_chain(group.members, group.filling)
            if me not in chain:
                continue
            place, buckets = chain.index(me), group.buckets
            if group.filling == me:
                filling |= buckets
            else:
                members |= buckets
            for other in group.members[:place]:
                ahead[other] = ahead.get(other, 0) | buckets
            if place == 0:
                primary |= buckets
                if len(group.members) <= self._min_replicas:
                    num_replicas = len(group.members) - 1
                    shortages[num_replicas] = shortages.get(num_replicas, 0) | buckets
                for other in group.members[1:]:
                    after[other] = after.get(other, 0) | buckets
            else:
                if group.filling != me:
                    leaders[chain[0]] = leaders.get(chain[0], 0) | buckets
                before[chain[place - 1]] = before.get(chain[place - 1], 0) | buckets
            if place + 1 < len(chain):
                target = chain[place + 1]
                behind[target] = behind.get(target, 0) | buckets
                if target == group.filling:
                    fills[target] = fills.get(target, 0) | buckets
        instructions: list[Instruction] = []
        follows = version == self._version + 1  # a map that was missed may have taken a bucket and given it again
        self._version = version
        whole = self._filter.buckets
        kept = whole & members | whole & filling & self._filling
        if whole & ~kept:
            self._filter.release(whole & ~kept)
            instructions.append(Drop(whole & ~kept))
        if members & ~kept:
            # Rule 5: only the first map makes members of servers that have nothing: there is nothing to have yet.
            self._filter.adopt(members & ~kept, ())
            instructions.append(Hold(members & ~kept))
        pending = 0
        for push in self._pending:
            pending |= push.buckets
        for other, buckets in ahead.items():
            self._overtaken |= buckets & ~self._ahead.get(other, 0) if follows else buckets
        self._overtaken &= pending & members & ~primary
        self._ahead, self._leaders, self._after = ahead, leaders, after
        confirmed = self._confirmed if follows else {}
        self._filling, self._before, self._behind, self._fills = filling, before, behind, fills
        self._confirmed = {target: confirmed.get(target, 0) & buckets for target, buckets in fills.items()}
        self._sent = dict(self._confirmed)
        self._reported, self._states = {}, {}  # what is on its way is of an older version: it is not taken
        instructions.append(Links(frozenset({*behind, *leaders})))
        gained, self._primary = primary & ~self._primary, primary
        self._short, self._shortages = sum(shortages.values()), shortages
        instructions += self._withheld_after_change()
        # Lead comes behind what is forwarded again: whoever is told to lead may push at once.
        instructions += self._pending_after_change()
        instructions += self._ready(leaders)
        instructions.append(Lead(primary, gained, frozenset(after)))
        instructions += [report for target in fills for report in self._report(target)]
        early, self._early = self._early, []
        instructions += [Retry(token) for token in early]
        return instructions

    def _pending_after_change(self) -> list[Instruction]:
        # Rule 7: after a change all that the servers behind may lack goes to them again, from every server of a chain:
        # the one that it came from may be dead, and its sender too. But who is behind has changed: the server that it
        # came from learns nothing by it and sends it again, and if this server does not lead all of it any more, its
        # sender repeats it to who leads now.
        for push in self._pending:
            push.is_left = True
            if not push.is_ours:
                push.end = Forget
            elif push.incarnation != AGGREGATE and push.buckets & ~self._primary:
                push.end = Refuse
        instructions: list[Instruction] = []
        for parts in list(self._by_push.values()):
            if len(parts) > 1:
                instructions += self._merge(list(parts))
        return instructions + self._forward_again(list(self._pending))

    def _withheld_after_change(self) -> list[Instruction]:
        instructions: list[Instruction] = []
        for push in list(self._withheld):
            if push.buckets & ~self._primary:
                push.end = Refuse  # who leads its buckets now knows it, and acknowledges it to who sends it again
            elif push.buckets & self._short:
                continue
            del self._withheld[push]
            instructions.append(push.end(push.token))
        return instructions

    def _merge(self, parts: list[_Pending]) -> list[Instruction]:
        """Keep of one push each bucket once, if its sender does not wait for it."""
        instructions: list[Instruction] = []
        kept = 0
        for push in sorted(parts, key=lambda push: push.end is not Acknowledge):
            if push.end is not Acknowledge:
                push.buckets &= ~kept
                if not push.buckets:
                    instructions += self._end(push)
            kept |= push.buckets
        return instructions

    def _ready(self, targets: Iterable[int]) -> list[Ready]:
        return [Ready(each, self._version) for each in targets if each in self._leaders and each in self._up]

    # Filling.

    def next_fill(self, target: int) -> tuple[int, int, FilterState] | None:
        """Return the next bucket to send whole to `target`: number, bucket and filter; None if there is none (now).

        It counts as sent: send it before anything else that goes to this server from now on. Ask again after a Change,
        a LinkUp, a Confirmed and an Acknowledged.
        """
        # Rule 9: nobody is filled with what the primary may lack: it would have it ahead of the primary.
        left = self._fills.get(target, 0) & ~self._sent.get(target, 0) & ~self._ahead_of_primary()
        if not left or target not in self._up:
            return None
        bucket = (left & -left).bit_length() - 1
        self._sent[target] |= 1 << bucket
        self._number += 1
        self._states[self._number] = (target, bucket)
        return self._number, bucket, self._filter.export(1 << bucket)

    def _lose_states(self, target: int) -> None:
        """Have those buckets sent again to `target` that it has not confirmed."""
        self._states = {number: state for number, state in self._states.items() if state[0] != target}
        if target in self._fills:
            self._sent[target] = self._confirmed[target]

    def _state_confirmed(self, target: int, number: int) -> list[Instruction]:
        state = self._states.pop(number, None)
        if state is None or state[0] != target:
            return []
        self._confirmed[target] |= 1 << state[1]
        return self._report(target)

    def _report(self, target: int) -> list[Instruction]:
        confirmed = self._confirmed[target]
        news = confirmed & ~self._reported.get(target, 0)
        if not news or (confirmed != self._fills[target] and count(news) < _REPORT_BUCKETS):
            return []
        self._reported[target] = confirmed
        return [Report(self._version, target, confirmed)]

    def _state_received(self, event: StateReceived) -> list[Instruction]:
        if event.version > self._version:
            self._early.append(event.token)
            return []
        one = 1 << event.bucket
        if event.version < self._version or not self._before.get(event.source, 0) & self._filling & one:
            return [Forget(event.token)]
        if self._filter.buckets & one:
            self._filter.release(one)
        self._filter.adopt(one, event.state)
        return [Load(event.token, event.bucket)]

    def validate(self) -> None:
        """Assert the invariants."""
        held = self._filter.buckets
        assert not self._primary & ~held, "a primary without data"
        for target, fills in self._fills.items():
            assert not self._sent[target] & ~fills
            assert not self._confirmed[target] & ~self._sent[target]
        assert not self._short & ~self._primary
        for push in self._withheld:
            assert push.buckets & self._short, "an answer is withheld for nothing"
            assert push.is_ours, "an answer to a server is withheld"
        for push in self._pending:
            assert push.waiting, "a push waits for nobody"
            assert all(self._by_number[number] is push for number, _ in push.waiting.values())
            assert push.buckets, "a push to no bucket is kept"
            assert push in self._by_push[push.incarnation, push.sequence]
        assert len(self._pending) == sum(map(len, self._by_push.values()))
        assert len(self._by_number) == sum(len(push.waiting) for push in self._pending)
