"""The pushes and buckets that one server has sent to its successors: in flight, withheld, and resent.

Comments refer to the rules of section "Replication" in docs/explanation/protocol.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from msgspec import Struct

from paceline.protocol.buckets import Buckets, to_bytes
from paceline.protocol.chains import Filled
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
from paceline.protocol.replication.place import Place

_REPORT_BUCKETS: Final = 64


class Fills:
    """The buckets that one server copies to filling successors in one view.

    `numbers` yields a number for each sent bucket, by which the receiver confirms the bucket.
    """

    def __init__(self, numbers: Iterator[int]) -> None:
        self._numbers = numbers
        self._wanted: dict[int, Buckets] = {}  # target → the buckets that the target needs
        self._sent: dict[int, Buckets] = {}
        self._confirmed: dict[int, Buckets] = {}
        self._reported: dict[int, Buckets] = {}
        self._states: dict[int, tuple[int, int]] = {}  # number → (target, bucket) of a bucket in flight

    @property
    def targets(self) -> tuple[int, ...]:
        return tuple(self._wanted)

    def wanted(self, target: int) -> Buckets:
        return self._wanted.get(target, 0)

    def unsent(self, target: int) -> Buckets:
        """Return the buckets that `target` still needs. Pushes to these buckets are not forwarded to `target`."""
        return self._wanted.get(target, 0) & ~self._sent.get(target, 0)

    def change(self, wanted: Mapping[int, Buckets], *, follows: bool) -> None:
        """Set the fills of a new view. Confirmations stay valid if the view `follows` the last view without a gap."""
        confirmed = self._confirmed if follows else {}
        self._wanted = dict(wanted)
        self._confirmed = {target: confirmed.get(target, 0) & buckets for target, buckets in wanted.items()}
        self._sent = dict(self._confirmed)
        self._reported, self._states = {}, {}  # forget buckets in flight, because targets reject buckets of older views

    def is_sending(self, target: int) -> bool:
        return any(state[0] == target for state in self._states.values())

    def send(self, target: int, left: Buckets) -> tuple[int, int]:
        """Record the first bucket of `left` as sent; return its number and the bucket."""
        bucket = (left & -left).bit_length() - 1
        self._sent[target] |= 1 << bucket
        number = next(self._numbers)
        self._states[number] = (target, bucket)
        return number, bucket

    def forget_unconfirmed(self, target: int) -> None:
        self._states = {number: state for number, state in self._states.items() if state[0] != target}
        if target in self._wanted:
            self._sent[target] = self._confirmed[target]

    def confirm(self, target: int, number: int) -> bool:
        """Record that `target` has confirmed the bucket with this number; return whether the confirmation is new."""
        state = self._states.pop(number, None)
        if state is None or state[0] != target:
            return False
        self._confirmed[target] |= 1 << state[1]
        return True

    def to_report(self, target: int) -> Buckets:
        """Return the confirmed buckets if a report to the scheduler is due, else 0.

        A report is due when all wanted buckets, or many since the last report, are confirmed.
        """
        confirmed = self._confirmed[target]
        news = confirmed & ~self._reported.get(target, 0)
        if not news or (confirmed != self._wanted[target] and news.bit_count() < _REPORT_BUCKETS):
            return 0
        self._reported[target] = confirmed
        return confirmed

    def reports(self, target: int, version: int) -> list[Instruction]:
        filled = self.to_report(target)
        return [Filled(version, target, to_bytes(filled))] if filled else []

    def validate(self) -> None:
        for target, wanted in self._wanted.items():
            assert not self._sent[target] & ~wanted
            assert not self._confirmed[target] & ~self._sent[target]


class PendingPush(Struct, eq=False):
    """A push that at least one successor of this server has not acknowledged."""

    token: object
    incarnation: int
    sequence: int
    buckets: int
    is_own: bool
    """Whether this server accepted the push as the primary, from a client or as its own sum."""
    is_left: bool = False
    """Whether this server accepted the push in an older view."""
    end: type[Acknowledge] | type[RefusePush] | type[Forget] = Acknowledge
    """The final instruction for the token, when all successors have the push."""
    waiting: dict[int, tuple[int, int]] = {}  # target without an acknowledgement → (number of the forward, its buckets)

    @property
    def is_sum(self) -> bool:
        return self.is_own and self.incarnation == AGGREGATE


def in_order(pushes: Iterable[PendingPush]) -> list[PendingPush]:
    """Return the pushes in order of arrival, but each sender's pushes in order of their numbers.

    A repeated push may have arrived after later pushes of its sender.
    """
    by_sender: dict[int, list[PendingPush]] = {}
    senders = []
    for push in pushes:
        senders.append(push.incarnation)
        by_sender.setdefault(push.incarnation, []).append(push)
    for own in by_sender.values():
        own.sort(key=lambda push: -push.sequence)
    return [by_sender[sender].pop() for sender in senders]


class PendingPushes:
    """The pushes of one server that wait for acknowledgements of other servers.

    `numbers` yields the numbers by which acknowledgements refer to forwarded pushes.
    """

    def __init__(self, numbers: Iterator[int]) -> None:
        self._numbers = numbers
        self._pushes: dict[PendingPush, None] = {}
        self._by_push: dict[tuple[int, int], list[PendingPush]] = {}  # incarnation, sequence → pending parts
        self._by_number: dict[int, PendingPush] = {}

    def __iter__(self) -> Iterator[PendingPush]:
        return iter(self._pushes)

    def __len__(self) -> int:
        return len(self._pushes)

    def of(self, incarnation: int, sequence: int) -> tuple[PendingPush, ...]:
        """Return the pending parts of one push (each with other buckets of the push), in order of arrival."""
        return tuple(self._by_push.get((incarnation, sequence), ()))

    def in_parts(self) -> list[tuple[PendingPush, ...]]:
        return [tuple(parts) for parts in self._by_push.values() if len(parts) > 1]

    def left(self) -> Buckets:
        """Return the buckets of pending pushes that were accepted in older views."""
        buckets = 0
        for push in self._pushes:
            if push.is_left:
                buckets |= push.buckets
        return buckets

    def add(self, push: PendingPush) -> None:
        self._pushes[push] = None
        self._by_push.setdefault((push.incarnation, push.sequence), []).append(push)

    def remove(self, push: PendingPush) -> None:
        self.forget_forwards(push)
        if push in self._pushes:
            del self._pushes[push]
            key = push.incarnation, push.sequence
            self._by_push[key].remove(push)
            if not self._by_push[key]:
                del self._by_push[key]

    def forward(self, push: PendingPush, target: int, buckets: Buckets) -> Forward:
        number = next(self._numbers)
        push.waiting[target] = number, buckets
        self._by_number[number] = push
        return Forward(push.token, target, number, buckets)

    def acknowledged(self, target: int, number: int) -> PendingPush | None:
        """Record an acknowledgement; return the push if this was its last missing acknowledgement."""
        push = self._by_number.get(number)
        if push is None or push.waiting.get(target, (0, 0))[0] != number:
            return None
        del self._by_number[number], push.waiting[target]
        return None if push.waiting else push

    def remove_buckets(self, push: PendingPush, taken: Buckets) -> None:
        """Remove the buckets `taken` from a push, because a repeat of the push now waits for these buckets."""
        push.buckets &= ~taken
        for target, (number, buckets) in list(push.waiting.items()):
            if buckets & ~taken:
                push.waiting[target] = number, buckets & ~taken
            else:
                del self._by_number[number], push.waiting[target]

    def forget_forwards(self, push: PendingPush) -> None:
        for number, _ in push.waiting.values():
            self._by_number.pop(number, None)
        push.waiting = {}

    def validate(self) -> None:
        for push in self._pushes:
            assert push.waiting, "a pending push without a forward"
            assert all(self._by_number[number] is push for number, _ in push.waiting.values())
            assert push.buckets, "a pending push without buckets"
            assert push in self._by_push[push.incarnation, push.sequence]
        assert len(self._pushes) == sum(map(len, self._by_push.values()))
        assert len(self._by_number) == sum(len(push.waiting) for push in self._pushes)


class ChainProgress:
    """The pushes of one server that cannot be acknowledged yet."""

    def __init__(self, fills: Fills, numbers: Iterator[int]) -> None:
        self._fills = fills
        self._place = Place()
        self._pending = PendingPushes(numbers)
        # Pushes that all servers of the chain have. They are acknowledged when the chain has enough replicas.
        self._withheld: dict[PendingPush, None] = {}
        self._overtaken = 0  # buckets in which an upstream server may lack pending pushes of older views

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    @property
    def waiting(self) -> set[object]:
        """The tokens of pushes that wait for successors or for enough replicas."""
        return {push.token for push in self._pending} | {push.token for push in self._withheld}

    def forwarded(self, incarnation: int, sequence: int) -> list[tuple[object, Buckets]]:
        """Return the parts of one push that a successor may lack, as (token, buckets), the latest part first."""
        return [(push.token, push.buckets) for push in reversed(self._pending.of(incarnation, sequence))]

    @property
    def inherited(self) -> int | None:
        """The lowest number (iteration plus one) of a former primary's sums that a successor may lack, if any."""
        primary = self._place.primary
        sums = (push for push in self._pending if push.incarnation == AGGREGATE and not push.is_own)
        return min((push.sequence for push in sums if push.buckets & primary), default=None)

    def left(self) -> Buckets:
        return self._pending.left()

    def ahead_of_primary(self) -> int:
        """Return the buckets with pushes that this server still sends to the primary, which may lack these pushes."""
        return self._pending.left() & self._overtaken if self._overtaken else 0

    def give_up(self, token: object) -> None:
        """Forget a push whose acknowledgement is withheld: its request has timed out or was dropped.

        The push itself stays applied.
        """
        self._withheld = {push: None for push in self._withheld if push.token is not token}

    def take(self, push: PendingPush, fresh: Buckets) -> list[Instruction]:
        # Rule 2: the new part is applied, and the whole push is forwarded, because successors have their own duplicate
        # filters. The push is forwarded before it is applied, so that successors work at the same time.
        instructions: list[Instruction] = []
        if fresh != push.buckets:
            known = self._pending.of(push.incarnation, push.sequence)
            instructions += self._replace([former for former in known if former.is_left], push)
        instructions += self._forward(push)
        applied = [Apply(push.token, fresh)] if fresh else []
        if not push.waiting and not push.is_own:
            # The acknowledgement to the predecessor may also precede Apply, because this server handles no other
            # message in between.
            return [*instructions, Acknowledge(push.token), *applied]
        instructions += applied
        if not push.waiting:
            return [*instructions, *self._end(push)]
        self._pending.add(push)
        return instructions

    def _replace(self, known: list[PendingPush], push: PendingPush) -> list[Instruction]:
        """Move buckets of a repeated push from its pending parts `known`, which are from older views, to the repeat.

        Then the repeat does not wait for these parts. Otherwise servers could wait for each other in a circle, because
        a part may also wait for other buckets. Buckets that this server sends to the primary stay in their part,
        because the primary may receive part and repeat in any order.
        """
        taken = push.buckets & ~self._overtaken
        instructions: list[Instruction] = []
        for former in known:
            if not former.buckets & taken:
                continue
            self._pending.remove_buckets(former, taken)
            if former.is_own and not push.is_own and not former.is_sum:
                # another server now forwards the push and cannot answer the client, so the client must retry
                former.end = RefusePush
            elif not former.buckets and not former.is_sum:
                former.end = Forget
            if not former.waiting:
                instructions += self._end(former)
        return instructions

    def acknowledged(self, target: int, number: int) -> list[Instruction]:
        # Rule 4: a push is acknowledged when all successors have acknowledged it.
        push = self._pending.acknowledged(target, number)
        return [] if push is None else self._end(push)

    def _end(self, push: PendingPush) -> list[Instruction]:
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
                # Rule 8: a server that has moved upstream of this server may lack the push. So the primary receives the
                # push and forwards it down the chain; otherwise a successor with the push would be ahead of the
                # primary.
                wanted = wanted & ~self._overtaken | place.leaders.get(target, 0) & self._overtaken
            buckets = push.buckets & wanted
            if buckets:
                yield self._pending.forward(push, target, buckets)

    def send_again(self, target: int) -> list[Instruction]:
        """Forward again all pushes in flight to `target`, because the earlier messages may be lost."""
        return self._forward_again([push for push in self._pending if target in push.waiting])

    def _forward_again(self, pushes: Iterable[PendingPush]) -> list[Instruction]:
        """Forward pushes with new numbers, in order; complete the pushes that wait for no successor any longer."""
        instructions: list[Instruction] = []
        for push in in_order(pushes):
            self._pending.forget_forwards(push)
            instructions += self._forward(push)
            if not push.waiting:
                instructions += self._end(push)
        return instructions

    def change(self, place: Place, *, follows: bool) -> None:
        """Set the place in a newer view. Call :meth:`after_change` next. `follows`: this server has missed no view."""
        before, pending = self._place, 0
        for push in self._pending:
            pending |= push.buckets
        for other, buckets in place.upstream.items():
            self._overtaken |= buckets & ~before.upstream.get(other, 0) if follows else buckets
        self._overtaken &= pending & place.members & ~place.primary
        self._place = place

    def after_change(self) -> list[Instruction]:
        """Return the instructions for all pushes after a view change; withheld pushes come first."""
        instructions = self._withheld_after_change()
        # Rule 7: after a view change every server of a chain forwards again the pushes that its successors may lack,
        # because the client and the predecessor that sent them may be dead. The predecessor gets no acknowledgement of
        # the old view and forwards the push again too. If this server no longer leads all buckets of a client's push,
        # the push is refused, and the client resends it to the new primary.
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
                push.end = RefusePush  # the new primary has the push, and acknowledges it when the client retries
            elif push.buckets & self._place.short:
                continue
            del self._withheld[push]
            instructions.append(push.end(push.token))
        return instructions

    def _merge(self, parts: Iterable[PendingPush]) -> list[Instruction]:
        """Remove duplicate buckets from the parts of one push; parts that will be acknowledged keep all buckets."""
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
        self._pending.validate()
        for push in self._withheld:
            assert push.buckets & self._place.short, "an answer is withheld without a shortage"
            assert push.is_own, "an answer to a server is withheld"
