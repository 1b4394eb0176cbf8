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

from collections.abc import Iterable
from itertools import count

from paceline.protocol.chains import ChainGroup
from paceline.protocol.delivery import Delivery
from paceline.protocol.replication.chain_progress import ChainProgress
from paceline.protocol.replication.events import (
    AGGREGATE,
    Acknowledged,
    Change,
    Confirmed,
    Drop,
    Event,
    FilterState,
    Forget,
    Forwarded,
    Hold,
    Instruction,
    Lead,
    LinkDown,
    Links,
    LinkUp,
    Load,
    PushReceived,
    Ready,
    RefusePush,
    StateReceived,
)
from paceline.protocol.replication.fills import Fills
from paceline.protocol.replication.pending import PendingPush
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
        self.version = 0
        """The version of the view; 0 before the first."""
        self.place = Place()
        """Where this server is in the chains, by the map."""
        self._up: set[int] = set()  # the servers behind to which there are connections
        self.delivery = Delivery(0)
        """The duplicate filter of the buckets that are here whole."""
        numbers = count(1)
        self._fills = Fills(numbers)
        self.pushes = ChainProgress(self._fills, numbers)
        """What is on its way down the chains."""

    @property
    def primary(self) -> int:
        """The buckets of which this server is the primary."""
        return self.place.primary

    @property
    def held(self) -> int:
        """The buckets whose data are here whole."""
        return self.delivery.buckets

    @property
    def filling(self) -> frozenset[int]:
        """The servers that this one has to fill: see :meth:`next_fill`."""
        return frozenset(filter(self._fills.unsent, self._fills.targets))

    @property
    def is_in_chain(self) -> bool:
        """Whether this server is a member of any chain, or is being filled."""
        return bool(self.delivery.buckets | self.place.filling)

    @property
    def has_successors(self) -> bool:
        """Whether anything has to be forwarded: if not, a push of the right version only passes :attr:`delivery`."""
        return bool(self.place.behind)

    def checkable(self, target: int) -> int:
        """Return the buckets of which `target` has what this server has, behind all that was sent to it so far."""
        if target not in self._up:
            return 0
        return self.place.behind.get(target, 0) & ~self._fills.wanted(target) & ~self.pushes.ahead_of_primary()

    def is_comparable(self, source: int, version: int, bucket: int) -> bool:
        """Return whether this server has of a bucket what `source` had when it sent this by the map of `version`.

        It may have more where it was ahead of that one: then it is still handing it up.
        """
        from_it = self.place.before.get(source, 0) & self.delivery.buckets & ~self.place.filling
        if version != self.version or not from_it >> bucket & 1:
            return False
        return not self.pushes.left() >> bucket & 1

    def applied_to(self, bucket: int) -> tuple[tuple[int, int], ...]:
        """Return the last push of each incarnation that counts as applied to a bucket."""
        return tuple((incarnation, last) for incarnation, last, _ in self.delivery.export(1 << bucket))

    @property
    def num_pending(self) -> int:
        """How many pushes wait for the servers behind."""
        return self.pushes.num_pending

    @property
    def num_complete(self) -> int:
        """How many iterations are complete in that bucket, of those that this server leads, that is furthest on."""
        applied = self.delivery.export(self.place.primary)
        return max((last for incarnation, last, _ in applied if incarnation == AGGREGATE), default=0)

    def push(self, token: object, incarnation: int, sequence: int, buckets: int) -> list[Instruction]:
        """Accept a push of this version to `buckets`, all led here."""
        fresh = self.delivery.admit(incarnation, sequence, buckets)
        return self.pushes.take(PendingPush(token, incarnation, sequence, buckets, is_ours=True), fresh)

    def handle(self, event: Event) -> list[Instruction]:
        """Take one event; return what to do, in order."""
        match event:
            case PushReceived(token, incarnation, sequence, version, buckets):
                # Rule 1: a message is of this server's version or it is not taken.
                if event.version != self.version or event.buckets & ~self.place.primary:
                    return [RefusePush(token)]
                return self.push(token, incarnation, sequence, buckets)
            case Forwarded(token, source, incarnation, sequence, version, buckets):
                place = self.place
                sound = (place.before.get(source, 0) | place.after.get(source, 0)) & self.delivery.buckets
                if event.version != self.version or event.buckets & ~sound:
                    return [Forget(token)]
                fresh = self.delivery.admit(incarnation, sequence, buckets)
                return self.pushes.take(PendingPush(token, incarnation, sequence, buckets, is_ours=False), fresh)
            case Acknowledged(target, number):
                return self.pushes.acknowledged(target, number)
            case Change(version, groups):
                return self._change(version, groups) if version > self.version else []
            case StateReceived():
                return self._state_received(event)
            case Confirmed(target, number):
                return self._fills.reports(target, self.version) if self._fills.confirm(target, number) else []
            case LinkUp(target):
                # Rule 6: what was on its way on the link before is lost: it is sent again.
                self._up.add(target)
                self._fills.lose(target)
                return [*self.pushes.send_again(target), *self._ready([target])]
            case LinkDown(target):
                self._up.discard(target)
                return []

    # Maps.

    def _change(self, version: int, groups: tuple[ChainGroup, ...]) -> list[Instruction]:
        before, place = self.place, Place.of(self._me, groups, self._min_replicas)
        members = place.members
        instructions: list[Instruction] = []
        follows = version == self.version + 1  # a map that was missed may have taken a bucket and given it again
        self.version = version
        whole = self.delivery.buckets
        kept = whole & members | whole & place.filling & before.filling
        if whole & ~kept:
            self.delivery.release(whole & ~kept)
            instructions.append(Drop(whole & ~kept))
        if members & ~kept:
            # Rule 5: only the first map makes members of servers that have nothing: there is nothing to have yet.
            self.delivery.adopt(members & ~kept, ())
            instructions.append(Hold(members & ~kept))
        self.pushes.change(place, follows=follows)
        self.place = place
        self._fills.change(place.fills, follows=follows)
        instructions.append(Links(frozenset({*place.behind, *place.leaders})))
        # Lead comes behind what is forwarded again: whoever is told to lead may push at once.
        instructions += self.pushes.after_change()
        instructions += self._ready(place.leaders)
        instructions.append(Lead(place.primary, place.primary & ~before.primary, frozenset(place.after)))
        instructions += [report for target in place.fills for report in self._fills.reports(target, self.version)]
        return instructions

    def _ready(self, targets: Iterable[int]) -> list[Ready]:
        return [Ready(each, self.version) for each in targets if each in self.place.leaders and each in self._up]

    # Filling.

    def next_fill(self, target: int) -> tuple[int, int, FilterState] | None:
        """Return the next bucket to send whole to `target`: number, bucket and filter; None if there is none (now).

        They go one at a time, so that nobody waits long behind them.
        It counts as sent: send it before anything else that goes to this server from now on. Ask again after a Change,
        a LinkUp, a Confirmed and an Acknowledged.
        """
        # Rule 9: nobody is filled with what the primary may lack: it would have it ahead of the primary.
        left = self._fills.unsent(target) & ~self.pushes.ahead_of_primary()
        if not left or target not in self._up or self._fills.is_sending(target):
            return None
        number, bucket = self._fills.send(target, left)
        return number, bucket, self.delivery.export(1 << bucket)

    def _state_received(self, event: StateReceived) -> list[Instruction]:
        one = 1 << event.bucket
        if event.version != self.version or not self.place.before.get(event.source, 0) & self.place.filling & one:
            return [Forget(event.token)]
        if self.delivery.buckets & one:
            self.delivery.release(one)
        self.delivery.adopt(one, event.state)
        return [Load(event.token, event.bucket)]

    def validate(self) -> None:
        """Assert the invariants."""
        held = self.delivery.buckets
        assert not self.place.primary & ~held, "a primary without data"
        self._fills.validate()
        self.pushes.validate()
