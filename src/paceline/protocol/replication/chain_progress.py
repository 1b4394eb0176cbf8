"""The pushes in flight in one server's chains: forwarded, withheld, and forwarded again after a view change.

A part of :class:`~paceline.protocol.replication.core.Replication`, which has the other numbered rules.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from paceline.protocol.buckets import Buckets
from paceline.protocol.replication.events import (
    AGGREGATE,
    Acknowledge,
    Apply,
    Forget,
    Forward,
    Instruction,
    RefusePush,
    Withhold,
)
from paceline.protocol.replication.fills import Fills
from paceline.protocol.replication.pending import PendingPush, PendingPushes, in_order
from paceline.protocol.replication.place import Place


class ChainProgress:
    """The pushes of one server that cannot be acknowledged yet.

    `fills` are the server's fills; `numbers` yields numbers that identify forwards in acknowledgements.
    """

    def __init__(self, fills: Fills, numbers: Iterator[int]) -> None:
        self._fills = fills
        self._place = Place()
        self._pending = PendingPushes(numbers)
        self._withheld: dict[PendingPush, None] = {}  # pushes that the whole chain has, but it is too short
        self._overtaken = 0  # buckets in which an upstream server may lack pending pushes of older views

    @property
    def num_pending(self) -> int:
        """The number of pushes that wait for successors."""
        return len(self._pending)

    @property
    def waiting(self) -> set[object]:
        """The tokens of pushes that wait for successors or for enough replicas."""
        return {push.token for push in self._pending} | {push.token for push in self._withheld}

    def forwarded(self, incarnation: int, sequence: int) -> list[tuple[object, Buckets]]:
        """Return the tokens of a push that a successor may lack, with their buckets, the newest first."""
        return [(push.token, push.buckets) for push in reversed(self._pending.of(incarnation, sequence))]

    @property
    def inherited(self) -> int | None:
        """The number (iteration plus one) of a former primary's first sum that a successor may lack.

        None without such a sum in the buckets that this server leads.
        """
        primary = self._place.primary
        sums = (push for push in self._pending if push.incarnation == AGGREGATE and not push.is_own)
        return min((push.sequence for push in sums if push.buckets & primary), default=None)

    def left(self) -> Buckets:
        """Return the buckets of pushes from older views."""
        return self._pending.left()

    def ahead_of_primary(self) -> int:
        """Return the buckets with pushes that the primary may lack: they are being handed up."""
        return self._pending.left() & self._overtaken if self._overtaken else 0

    def give_up(self, token: object) -> None:
        """Drop a withheld push: its sender has received a timeout."""
        self._withheld = {push: None for push in self._withheld if push.token is not token}

    # Pushes.

    def take(self, push: PendingPush, fresh: Buckets) -> list[Instruction]:
        """Accept a push that is new in the buckets `fresh`; return the instructions."""
        # Rule 2: the new part is applied, and the whole push is forwarded: successors have their own filters.
        # It is forwarded first, so that they work at the same time.
        instructions: list[Instruction] = []
        if fresh != push.buckets:
            known = self._pending.of(push.incarnation, push.sequence)
            instructions += self._replace([former for former in known if former.is_left], push)
        instructions += self._forward(push)
        applied = [Apply(push.token, fresh)] if fresh else []
        if not push.waiting and not push.is_own:
            # So is the acknowledgement to the predecessor: this server applies the push before its next message.
            return [*instructions, Acknowledge(push.token), *applied]
        instructions += applied
        if not push.waiting:
            return [*instructions, *self._end(push)]
        self._pending.add(push)
        return instructions

    def _replace(self, known: list[PendingPush], push: PendingPush) -> list[Instruction]:
        """Move the buckets of a repeated push from its pending parts of older views to the new push.

        The new push is forwarded again. If it waited for the former parts instead, it would wait for other buckets too,
        and servers could wait for each other in a circle. Parts that are handed up stay: the upstream server that
        repeated the push hands it up too, but the order of the two is unknown.
        """
        taken = push.buckets & ~self._overtaken
        instructions: list[Instruction] = []
        for former in known:
            if not former.buckets & taken:
                continue
            self._pending.give_away(former, taken)
            if former.is_own and not push.is_own and not former.is_sum:
                former.end = RefusePush  # the push was handed up without its client, which must retry
            elif not former.buckets and not former.is_sum:
                former.end = Forget
            if not former.waiting:
                instructions += self._end(former)
        return instructions

    def acknowledged(self, target: int, number: int) -> list[Instruction]:
        """Record an acknowledgement of a successor; return the instructions."""
        # Rule 4: a push is acknowledged when all successors have acknowledged it.
        push = self._pending.acknowledged(target, number)
        return [] if push is None else self._end(push)

    def _end(self, push: PendingPush) -> list[Instruction]:
        """Remove a push; return the answer to its sender."""
        self._pending.remove(push)
        # Rule 10: a chain with too few replicas acknowledges no client's push.
        if push.is_own and push.end is Acknowledge and not push.is_sum and push.buckets & self._place.short:
            self._withheld[push] = None
            return [Withhold(push.token)]
        return [push.end(push.token)]

    def _forward(self, push: PendingPush) -> Iterator[Forward]:
        place = self._place
        for target in {**place.successors, **place.leaders} if push.is_left else place.successors:
            # Rule 3: a server that is being filled receives pushes to a bucket only after the bucket.
            wanted = place.successors.get(target, 0) & ~self._fills.unsent(target)
            if push.is_left:
                # Rule 8: if a server has moved upstream of this one, it may lack the push. So the primary receives it
                # and forwards it down the chain; otherwise a successor with the push would be ahead of the primary.
                wanted = wanted & ~self._overtaken | place.leaders.get(target, 0) & self._overtaken
            buckets = push.buckets & wanted
            if buckets:
                yield self._pending.forward(push, target, buckets)

    def send_again(self, target: int) -> list[Instruction]:
        """Forward again all pushes in flight to a server, because they may be lost."""
        return self._forward_again([push for push in self._pending if target in push.waiting])

    def _forward_again(self, pushes: Iterable[PendingPush]) -> list[Instruction]:
        """Forward pushes under new numbers, in order; end the pushes that need no acknowledgement any longer."""
        instructions: list[Instruction] = []
        for push in in_order(pushes):
            self._pending.forget_forwards(push)
            instructions += self._forward(push)
            if not push.waiting:
                instructions += self._end(push)
        return instructions

    # Views.

    def change(self, place: Place, *, follows: bool) -> None:
        """Set the place in a newer view, which `follows` if no view was missed. Call :meth:`after_change` next."""
        before, pending = self._place, 0
        for push in self._pending:
            pending |= push.buckets
        for other, buckets in place.upstream.items():
            self._overtaken |= buckets & ~before.upstream.get(other, 0) if follows else buckets
        self._overtaken &= pending & place.members & ~place.primary
        self._place = place

    def after_change(self) -> list[Instruction]:
        """Return the instructions for all pushes after a view change, first for withheld ones."""
        instructions = self._withheld_after_change()
        # Rule 7: after a view change every server of a chain forwards again the pushes that its successors may lack,
        # because their predecessor and their client may be dead. The successors have changed, so the predecessor gets
        # no acknowledgement and forwards the push again. If this server no longer leads all buckets of the push, the
        # client resends it to the new primary.
        for push in self._pending:
            push.is_left = True
            if not push.is_own:
                push.end = Forget
            elif push.incarnation != AGGREGATE and push.buckets & ~self._place.primary:
                push.end = RefusePush
        for parts in self._pending.in_parts():
            instructions += self._merge(parts)
        return instructions + self._forward_again(list(self._pending))

    def _withheld_after_change(self) -> list[Instruction]:
        instructions: list[Instruction] = []
        for push in list(self._withheld):
            if push.buckets & ~self._place.primary:
                push.end = RefusePush  # the new primary has it, and acknowledges it when the client retries
            elif push.buckets & self._place.short:
                continue
            del self._withheld[push]
            instructions.append(push.end(push.token))
        return instructions

    def _merge(self, parts: Iterable[PendingPush]) -> list[Instruction]:
        """Remove duplicate buckets from the parts of one push, except from parts that await an acknowledgement."""
        instructions: list[Instruction] = []
        covered = 0
        for push in sorted(parts, key=lambda push: push.end is not Acknowledge):
            if push.end is not Acknowledge:
                push.buckets &= ~covered
                if not push.buckets:
                    instructions += self._end(push)
            covered |= push.buckets
        return instructions

    def validate(self) -> None:
        """Assert the invariants."""
        self._pending.validate()
        for push in self._withheld:
            assert push.buckets & self._place.short, "an answer is withheld without a shortage"
            assert push.is_own, "an answer to a server is withheld"
