"""What of pushes is on its way down one server's chains: forwarded, withheld, and sent on again after a change.

A part of :class:`~paceline.protocol.replication.core.Replication`, which has the rules that the numbers are of.
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
    """The pushes of one server that others, or its map, keep from being acknowledged.

    `fills` are those of the same server; `numbers` gives the numbers by which forwards are acknowledged.
    """

    def __init__(self, fills: Fills, numbers: Iterator[int]) -> None:
        self._fills = fills
        self._place = Place()
        self._pending = PendingPushes(numbers)
        self._withheld: dict[PendingPush, None] = {}  # pushes that the chain has, and that it is too short for
        self._overtaken = 0  # buckets in which a server ahead may lack what is pending here from older maps

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

    def left(self) -> Buckets:
        """Return the buckets of pushes that came by an older map."""
        return self._pending.left()

    def ahead_of_primary(self) -> int:
        """Return the buckets of which this server has pushes that the primary may lack: they are being handed up."""
        return self._pending.left() & self._overtaken if self._overtaken else 0

    def give_up(self, token: object) -> None:
        """Withhold the answer to this push no longer: its sender was told that its time is over."""
        self._withheld = {push: None for push in self._withheld if push.token is not token}

    # Pushes.

    def take(self, push: PendingPush, fresh: Buckets) -> list[Instruction]:
        """Take a push, which is new here to the buckets `fresh`; return what to do."""
        # Rule 2: what is new here is applied, and all of it goes on: the servers behind ask their own filters.
        # It goes on first, so that they work at the same time.
        instructions: list[Instruction] = []
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
                former.end = RefusePush  # its client has no part in what was handed up, and asks again
            elif not former.buckets and not former.is_sum:
                former.end = Forget
            if not former.waiting:
                instructions += self._end(former)
        return instructions

    def acknowledged(self, target: int, number: int) -> list[Instruction]:
        """Take the answer of a server behind; return what to do."""
        # Rule 4: acknowledged is what all servers behind have acknowledged.
        push = self._pending.acknowledged(target, number)
        return [] if push is None else self._end(push)

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

    def send_again(self, target: int) -> list[Instruction]:
        """Return what to do where all that is on its way to a server may be lost."""
        return self._forward_again([push for push in self._pending if target in push.waiting])

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

    def change(self, place: Place, *, follows: bool) -> None:
        """Take the place by a newer map; `follows`: no map was missed. Then comes :meth:`after_change`."""
        before, pending = self._place, 0
        for push in self._pending:
            pending |= push.buckets
        for other, buckets in place.ahead.items():
            self._overtaken |= buckets & ~before.ahead.get(other, 0) if follows else buckets
        self._overtaken &= pending & place.members & ~place.primary
        self._place = place

    def after_change(self) -> list[Instruction]:
        """Return what becomes of the pushes after a change of the map: first of those that were withheld."""
        instructions = self._withheld_after_change()
        # Rule 7: after a change all that the servers behind may lack goes to them again, from every server of a chain:
        # the one that it came from may be dead, and its sender too. But who is behind has changed: the server that it
        # came from learns nothing by it and sends it again, and if this server does not lead all of it any more, its
        # sender repeats it to who leads now.
        for push in self._pending:
            push.is_left = True
            if not push.is_ours:
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
                push.end = RefusePush  # who leads its buckets now knows it, and acknowledges it to who sends it again
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

    def validate(self) -> None:
        """Assert the invariants."""
        self._pending.validate()
        for push in self._withheld:
            assert push.buckets & self._place.short, "an answer is withheld for nothing"
            assert push.is_ours, "an answer to a server is withheld"
