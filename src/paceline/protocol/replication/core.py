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
from itertools import count

from paceline.protocol.buckets import Buckets
from paceline.protocol.chains import ChainGroup
from paceline.protocol.delivery import Delivery
from paceline.protocol.replication.events import (
    AGGREGATE,
    Acknowledge,
    Acknowledged,
    Apply,
    Change,
    Confirmed,
    Drop,
    Event,
    FilterState,
    Forget,
    Forward,
    Forwarded,
    Hold,
    Instruction,
    Lead,
    LinkDown,
    Links,
    LinkUp,
    Load,
    Push,
    Ready,
    Refuse,
    Report,
    StateReceived,
    Withhold,
)
from paceline.protocol.replication.fills import Fills
from paceline.protocol.replication.pending import PendingPush, PendingPushes, in_order
from paceline.protocol.replication.place import Place


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
        self._place = Place()
        self._up: set[int] = set()  # the servers behind to which there are connections
        self._filter = Delivery(0)
        numbers = count(1)
        self._pending = PendingPushes(numbers)
        self._fills = Fills(numbers)
        self._withheld: dict[PendingPush, None] = {}  # pushes that the chain has, and that it is too short for
        self._overtaken = 0  # buckets in which a server ahead may lack what is pending here from older maps

    @property
    def version(self) -> int:
        """The version of the map; 0 before the first."""
        return self._version

    @property
    def primary(self) -> int:
        """The buckets of which this server is the primary."""
        return self._place.primary

    @property
    def held(self) -> int:
        """The buckets whose data are here whole."""
        return self._filter.buckets

    @property
    def filling(self) -> frozenset[int]:
        """The servers that this one has to fill: see :meth:`next_fill`."""
        return frozenset(filter(self._fills.unsent, self._fills.targets))

    @property
    def is_in_chain(self) -> bool:
        """Whether this server is a member of any chain, or is being filled."""
        return bool(self._filter.buckets | self._place.filling)

    @property
    def has_successors(self) -> bool:
        """Whether anything has to be forwarded: if not, and the version is right, :meth:`admit` is all there is."""
        return bool(self._place.behind)

    @property
    def short(self) -> int:
        """The buckets of this primary whose chains have too few replicas for an acknowledgement."""
        return self._place.short

    def shortage(self, buckets: int) -> tuple[int, int] | None:
        """Return one of `buckets` whose chain is too short, and how many replicas it has; None if there is none."""
        return self._place.shortage(buckets)

    def checkable(self, target: int) -> int:
        """Return the buckets of which `target` has what this server has, behind all that was sent to it so far."""
        if target not in self._up:
            return 0
        return self._place.behind.get(target, 0) & ~self._fills.wanted(target) & ~self._ahead_of_primary()

    def is_comparable(self, source: int, version: int, bucket: int) -> bool:
        """Return whether this server has of a bucket what `source` had when it sent this by the map of `version`.

        It may have more where it was ahead of that one: then it is still handing it up.
        """
        from_it = self._place.before.get(source, 0) & self._filter.buckets & ~self._place.filling
        if version != self._version or not from_it >> bucket & 1:
            return False
        return not any(push.is_left and push.buckets >> bucket & 1 for push in self._pending)

    def _ahead_of_primary(self) -> int:
        """Return the buckets of which this server has pushes that the primary may lack: they are being handed up."""
        return self._pending.left() & self._overtaken if self._overtaken else 0

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
        return [(push.token, push.buckets) for push in reversed(self._pending.of(incarnation, sequence))]

    @property
    def inherited(self) -> int | None:
        """The first sum that came from a primary before this one, and that the servers behind do not all have yet.

        None if there is none in the buckets that this server leads now. It is the number of the push: the iteration
        plus one.
        """
        mine = self._place.primary
        sums = (push for push in self._pending if push.incarnation == AGGREGATE and not push.is_ours)
        return min((push.sequence for push in sums if push.buckets & mine), default=None)

    @property
    def num_complete(self) -> int:
        """How many iterations are complete in that bucket, of those that this server leads, that is furthest on."""
        applied = self._filter.export(self._place.primary)
        return max((last for incarnation, last, _ in applied if incarnation == AGGREGATE), default=0)

    def admit(self, incarnation: int, sequence: int) -> int:
        """Do what a Push of this version does where nothing is forwarded: return the buckets for which it is new.

        The push counts as one to all buckets of this primary, those included in which it has no key.
        """
        return self._filter.admit(incarnation, sequence, self._place.primary)

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
                # Rule 4: acknowledged is what all servers behind have acknowledged.
                push = self._pending.acknowledged(target, number)
                return [] if push is None else self._end(push)
            case Change(version, groups):
                return self._change(version, groups) if version > self._version else []
            case StateReceived():
                return self._state_received(event)
            case Confirmed(target, number):
                return self._report(target) if self._fills.confirm(target, number) else []
            case LinkUp(target):
                # Rule 6: what was on its way on the link before is lost: it is sent again.
                self._up.add(target)
                self._fills.lose(target)
                again = self._forward_again([push for push in self._pending if target in push.waiting])
                return [*again, *self._ready([target])]
            case LinkDown(target):
                self._up.discard(target)
                return []

    # Pushes.

    def _push(self, event: Push) -> list[Instruction]:
        # Rule 1: a message is of this server's version or it is not taken.
        if event.version != self._version or event.buckets & ~self._place.primary:
            return [Refuse(event.token)]
        return self._take(PendingPush(event.token, event.incarnation, event.sequence, event.buckets, is_ours=True))

    def _forwarded(self, event: Forwarded) -> list[Instruction]:
        place = self._place
        sound = (place.before.get(event.source, 0) | place.after.get(event.source, 0)) & self._filter.buckets
        if event.version != self._version or event.buckets & ~sound:
            return [Forget(event.token)]
        return self._take(PendingPush(event.token, event.incarnation, event.sequence, event.buckets, is_ours=False))

    def _take(self, push: PendingPush) -> list[Instruction]:
        # Rule 2: what is new here is applied, and all of it goes on: the servers behind ask their own filters.
        # It goes on first, so that they work at the same time.
        instructions: list[Instruction] = []
        fresh = self._filter.admit(push.incarnation, push.sequence, push.buckets)
        if fresh != push.buckets:
            known = self._pending.of(push.incarnation, push.sequence)
            instructions += self._replace([former for former in known if former.is_left], push)
        instructions += self._forward(push)
        applied = [Apply(push.token, fresh)] if fresh else []
        if not push.waiting and not push.is_ours:
            # So does the answer to the server before: nothing is taken here before the push is applied.
            return [*instructions, Acknowledge(push.token), *applied]
        instructions += applied
        if not push.waiting:
            return [*instructions, *self._end(push)]
        self._pending.add(push)
        return instructions

    def _replace(self, known: list[PendingPush], push: PendingPush) -> list[Instruction]:
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
            self._pending.give_away(former, taken)
            if former.is_ours and not push.is_ours and not former.is_sum:
                former.end = Refuse  # its client has no part in what was handed up, and asks again
            elif not former.buckets and not former.is_sum:
                former.end = Forget
            if not former.waiting:
                instructions += self._end(former)
        return instructions

    def _end(self, push: PendingPush) -> list[Instruction]:
        """Forget a push, with what is to be told to its sender."""
        self._pending.remove(push)
        # Rule 10: a chain with too few replicas acknowledges nothing to a client.
        if push.is_ours and push.end is Acknowledge and not push.is_sum and push.buckets & self._place.short:
            self._withheld[push] = None
            return [Withhold(push.token)]
        return [push.end(push.token)]

    def _forward(self, push: PendingPush) -> Iterator[Forward]:
        place = self._place
        for target in {**place.behind, **place.leaders} if push.is_left else place.behind:
            # Rule 3: of what a server is being filled with it gets a push only once it has the bucket.
            wanted = place.behind.get(target, 0) & ~self._fills.unsent(target)
            if push.is_left:
                # Rule 8: where a server has got ahead of this one, the primary gets what may not have come to that one,
                # and hands it down the chain: a server behind that has it would be ahead of the primary, unknowingly.
                wanted = wanted & ~self._overtaken | place.leaders.get(target, 0) & self._overtaken
            buckets = push.buckets & wanted
            if buckets:
                yield self._pending.forward(push, target, buckets)

    def _forward_again(self, pushes: Iterable[PendingPush]) -> list[Instruction]:
        """Forward pushes under new numbers, in their order; acknowledge those that nobody is left to wait for."""
        instructions: list[Instruction] = []
        for push in in_order(pushes):
            self._pending.forget_forwards(push)
            instructions += self._forward(push)
            if not push.waiting:
                instructions += self._end(push)
        return instructions

    # Maps.

    def _change(self, version: int, groups: tuple[ChainGroup, ...]) -> list[Instruction]:
        before, place = self._place, Place.of(self._me, groups, self._min_replicas)
        members = place.members
        instructions: list[Instruction] = []
        follows = version == self._version + 1  # a map that was missed may have taken a bucket and given it again
        self._version = version
        whole = self._filter.buckets
        kept = whole & members | whole & place.filling & before.filling
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
        for other, buckets in place.ahead.items():
            self._overtaken |= buckets & ~before.ahead.get(other, 0) if follows else buckets
        self._overtaken &= pending & members & ~place.primary
        self._place = place
        self._fills.change(place.fills, follows=follows)
        instructions.append(Links(frozenset({*place.behind, *place.leaders})))
        instructions += self._withheld_after_change()
        # Lead comes behind what is forwarded again: whoever is told to lead may push at once.
        instructions += self._pending_after_change()
        instructions += self._ready(place.leaders)
        instructions.append(Lead(place.primary, place.primary & ~before.primary, frozenset(place.after)))
        instructions += [report for target in place.fills for report in self._report(target)]
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
            elif push.incarnation != AGGREGATE and push.buckets & ~self._place.primary:
                push.end = Refuse
        instructions: list[Instruction] = []
        for parts in self._pending.in_parts():
            instructions += self._merge(parts)
        return instructions + self._forward_again(list(self._pending))

    def _withheld_after_change(self) -> list[Instruction]:
        instructions: list[Instruction] = []
        for push in list(self._withheld):
            if push.buckets & ~self._place.primary:
                push.end = Refuse  # who leads its buckets now knows it, and acknowledges it to who sends it again
            elif push.buckets & self._place.short:
                continue
            del self._withheld[push]
            instructions.append(push.end(push.token))
        return instructions

    def _merge(self, parts: Iterable[PendingPush]) -> list[Instruction]:
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
        return [Ready(each, self._version) for each in targets if each in self._place.leaders and each in self._up]

    # Filling.

    def next_fill(self, target: int) -> tuple[int, int, FilterState] | None:
        """Return the next bucket to send whole to `target`: number, bucket and filter; None if there is none (now).

        They go one at a time, so that nobody waits long behind them.
        It counts as sent: send it before anything else that goes to this server from now on. Ask again after a Change,
        a LinkUp, a Confirmed and an Acknowledged.
        """
        # Rule 9: nobody is filled with what the primary may lack: it would have it ahead of the primary.
        left = self._fills.unsent(target) & ~self._ahead_of_primary()
        if not left or target not in self._up or self._fills.is_sending(target):
            return None
        number, bucket = self._fills.send(target, left)
        return number, bucket, self._filter.export(1 << bucket)

    def _report(self, target: int) -> list[Instruction]:
        filled = self._fills.to_report(target)
        return [Report(self._version, target, filled)] if filled else []

    def _state_received(self, event: StateReceived) -> list[Instruction]:
        one = 1 << event.bucket
        if event.version != self._version or not self._place.before.get(event.source, 0) & self._place.filling & one:
            return [Forget(event.token)]
        if self._filter.buckets & one:
            self._filter.release(one)
        self._filter.adopt(one, event.state)
        return [Load(event.token, event.bucket)]

    def validate(self) -> None:
        """Assert the invariants."""
        held = self._filter.buckets
        assert not self._place.primary & ~held, "a primary without data"
        self._fills.validate()
        self._pending.validate()
        for push in self._withheld:
            assert push.buckets & self._place.short, "an answer is withheld for nothing"
            assert push.is_ours, "an answer to a server is withheld"
