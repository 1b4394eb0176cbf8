"""One server's part in chain replication: its place in every chain, forwarded pushes and acknowledgements.

Each payload is represented by a *token*. The runtime stores the payload until an instruction acknowledges, refuses or
forgets the token.

Guarantees: a push is acknowledged when every member of its buckets' chains has the push. Each member applies the push
once, even if it arrives several times. A server that has left a chain cannot contribute to an acknowledgement, because
the version of every message is checked. While a chain has fewer than `min_replicas` replicas, its primary *withholds*
the acknowledgement. Comments refer to the rules of section "Replication" in docs/explanation/protocol.md.

Source: van Renesse and Schneider 2004 "Chain Replication for Supporting High Throughput and Availability"; views and
versions as in PacificA (Lin et al. 2008); OSDI'14 "Scaling Distributed Machine Learning with the Parameter Server",
section 4.3.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count

from paceline.protocol.chains import ChainGroup
from paceline.protocol.delivery import Delivery
from paceline.protocol.replication.events import (
    AGGREGATE,
    Acknowledged,
    Change,
    Confirmed,
    CreateBuckets,
    Drop,
    Event,
    FilterState,
    Forget,
    Forwarded,
    Instruction,
    Lead,
    LinkDown,
    Links,
    LinkUp,
    Load,
    Ready,
    StateReceived,
)
from paceline.protocol.replication.in_flight import ChainProgress, Fills, PendingPush
from paceline.protocol.replication.place import Place


class Replication:
    """The replication state of the server with incarnation `me`.

    While a chain has fewer than `min_replicas` replicas, its primary acknowledges no pushes of workers. The sums of
    iterations are not affected (:class:`~paceline.protocol.iterations.Iterations`).

    Preconditions: for each bucket, the pushes of one incarnation arrive in ascending order, apart from repeats. Links
    preserve order.
    """

    def __init__(self, me: int, min_replicas: int = 0) -> None:
        self._me = me
        self._min_replicas = min_replicas
        self.version = 0
        """The version of the view; 0 before the first view."""
        self.place = Place()
        self._up: set[int] = set()  # the connected servers
        self.delivery = Delivery(0)
        numbers = count(1)
        self._fills = Fills(numbers)
        self.pushes = ChainProgress(self._fills, numbers)

    @property
    def primary(self) -> int:
        return self.place.primary

    @property
    def held(self) -> int:
        return self.delivery.buckets

    @property
    def filling(self) -> frozenset[int]:
        """The servers that receive buckets from this server: see :meth:`next_fill`."""
        return frozenset(filter(self._fills.unsent, self._fills.targets))

    @property
    def is_in_chain(self) -> bool:
        """Whether this server is a member of any chain, or other servers are copying buckets to it."""
        return bool(self.delivery.buckets | self.place.filling)

    @property
    def has_successors(self) -> bool:
        """Whether pushes must be forwarded. If not, a push of the current version only needs :attr:`delivery`."""
        return bool(self.place.successors)

    def checkable(self, target: int) -> int:
        """Return the buckets that will be equal here and on `target` when `target` has all messages sent so far."""
        if target not in self._up:
            return 0
        return self.place.successors.get(target, 0) & ~self._fills.wanted(target) & ~self.pushes.ahead_of_primary()

    def is_comparable(self, source: int, version: int, bucket: int) -> bool:
        """Return whether this server's copy of a bucket must equal the copy of `source`, which sent its digest.

        `version` is the view version of the message with the digest.

        While this server sends pushes upstream to `source` (rule 8), this server is ahead of `source`.
        """
        from_it = self.place.predecessors.get(source, 0) & self.delivery.buckets & ~self.place.filling
        if version != self.version or not from_it >> bucket & 1:
            return False
        return not self.pushes.left() >> bucket & 1

    def applied_to(self, bucket: int) -> tuple[tuple[int, int], ...]:
        """Return the last push of each incarnation that was applied to a bucket."""
        return tuple((incarnation, last) for incarnation, last, _ in self.delivery.export(1 << bucket))

    @property
    def num_complete(self) -> int:
        """The number of complete iterations in the most advanced bucket that this server leads."""
        applied = self.delivery.export(self.place.primary)
        return max((last for incarnation, last, _ in applied if incarnation == AGGREGATE), default=0)

    def push(self, token: object, incarnation: int, sequence: int, buckets: int) -> list[Instruction]:
        """Accept a client's push, or this server's own sum of an iteration.

        This server must be the primary of all `buckets` (the buckets of the push's keys).
        """
        fresh = self.delivery.admit(incarnation, sequence, buckets)
        return self.pushes.take(PendingPush(token, incarnation, sequence, buckets, is_own=True), fresh)

    def handle(self, event: Event) -> list[Instruction]:
        match event:
            case Forwarded(token, source, incarnation, sequence, version, buckets):
                # Rule 1: a message of another view version is rejected.
                place = self.place
                sound = (place.predecessors.get(source, 0) | place.followers.get(source, 0)) & self.delivery.buckets
                if event.version != self.version or event.buckets & ~sound:
                    return [Forget(token)]
                fresh = self.delivery.admit(incarnation, sequence, buckets)
                return self.pushes.take(PendingPush(token, incarnation, sequence, buckets, is_own=False), fresh)
            case Acknowledged(target, number):
                return self.pushes.acknowledged(target, number)
            case Change(version, groups):
                return self._change(version, groups) if version > self.version else []
            case StateReceived():
                return self._state_received(event)
            case Confirmed(target, number):
                return self._fills.reports(target, self.version) if self._fills.confirm(target, number) else []
            case LinkUp(target):
                # Rule 6: messages in flight on the former link may be lost, so they are sent again.
                self._up.add(target)
                self._fills.forget_unconfirmed(target)
                return [*self.pushes.send_again(target), *self._ready([target])]
            case LinkDown(target):
                self._up.discard(target)
                return []

    def _change(self, version: int, groups: tuple[ChainGroup, ...]) -> list[Instruction]:
        before, place = self.place, Place.of(self._me, groups, self._min_replicas)
        members = place.members
        instructions: list[Instruction] = []
        follows = version == self.version + 1  # a missed view may have moved a bucket away and back
        self.version = version
        held = self.delivery.buckets
        retained = held & members | held & place.filling & before.filling
        if held & ~retained:
            self.delivery.release(held & ~retained)
            instructions.append(Drop(held & ~retained))
        if members & ~retained:
            # Rule 5: members have a bucket without a fill only in the first view, in which all buckets are empty.
            self.delivery.adopt(members & ~retained, ())
            instructions.append(CreateBuckets(members & ~retained))
        self.pushes.change(place, follows=follows)
        self.place = place
        self._fills.change(place.fills, follows=follows)
        instructions.append(Links(frozenset({*place.successors, *place.leaders})))
        # Lead comes after the pushes that are forwarded again, because after Lead a new primary may push immediately.
        instructions += self.pushes.after_change()
        instructions += self._ready(place.leaders)
        instructions.append(Lead(place.primary, place.primary & ~before.primary, frozenset(place.followers)))
        instructions += [report for target in place.fills for report in self._fills.reports(target, self.version)]
        return instructions

    def _ready(self, targets: Iterable[int]) -> list[Ready]:
        return [
            Ready(target, self.version) for target in targets if target in self.place.leaders and target in self._up
        ]

    def next_fill(self, target: int) -> tuple[int, int, FilterState] | None:
        """Return the next complete bucket for `target`: number, bucket and filter; None if no bucket can be sent.

        Buckets are sent one at a time, so that fills delay other messages little. The returned bucket counts as sent,
        so send it before any further message to `target`. Call this again after Change, LinkUp, Confirmed and
        Acknowledged.
        """
        # Rule 9: a bucket with pushes that the primary may lack is not sent, because its receiver would be ahead of the
        # primary.
        left = self._fills.unsent(target) & ~self.pushes.ahead_of_primary()
        if not left or target not in self._up or self._fills.is_sending(target):
            return None
        number, bucket = self._fills.send(target, left)
        return number, bucket, self.delivery.export(1 << bucket)

    def _state_received(self, event: StateReceived) -> list[Instruction]:
        one = 1 << event.bucket
        if event.version != self.version or not self.place.predecessors.get(event.source, 0) & self.place.filling & one:
            return [Forget(event.token)]
        if self.delivery.buckets & one:
            self.delivery.release(one)
        self.delivery.adopt(one, event.state)
        return [Load(event.token, event.bucket)]

    def validate(self) -> None:
        held = self.delivery.buckets
        assert not self.place.primary & ~held, "a primary without its bucket"
        self._fills.validate()
        self.pushes.validate()
