"""Pending pushes, which successors have not acknowledged, and the states of a push at a server."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from msgspec import Struct

from paceline.protocol.buckets import Buckets
from paceline.protocol.replication.events import AGGREGATE, Acknowledge, Forget, Forward, RefusePush
from paceline.protocol.transitions import OUTSIDE, StateTable, Transition

_ENDS: Final = {"acknowledged": "Acknowledge", "refused": "RefusePush", "forgotten": "Forget"}
_WITHHOLDING: Final = {
    "pending": ("Acknowledged", "LinkUp", "Change"),
    "left": ("Acknowledged", "Change", "LinkUp", "PushReceived"),
}
PUSH: Final = StateTable(
    "a push at one server",
    ("pending", "left", "withheld", *_ENDS),
    (
        Transition(OUTSIDE, "PushReceived", "refused", "RefusePush", when="another view or not its primary"),
        Transition(OUTSIDE, "Forwarded", "forgotten", "Forget", when="another view or not from its chain"),
        Transition(OUTSIDE, "PushReceived", "acknowledged", "Acknowledge", when="no successor"),
        Transition(OUTSIDE, "Forwarded", "acknowledged", "Acknowledge", when="no successor"),
        Transition(OUTSIDE, "PushReceived", "pending", "Forward"),
        Transition(OUTSIDE, "Forwarded", "pending", "Forward"),
        Transition(OUTSIDE, "PushReceived", "withheld", "Withhold", when="no successor, too few replicas"),
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
            for event in ("Acknowledged", "Change", "LinkUp", "PushReceived", "Forwarded")
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


class PendingPush(Struct, eq=False):
    """A push that this server's successors have not all acknowledged."""

    token: object
    incarnation: int
    sequence: int
    buckets: int
    is_own: bool
    """Whether this server accepted it as the primary, from a client or as its own sum."""
    is_left: bool = False
    """Whether it came in an older view."""
    end: type[Acknowledge] | type[RefusePush] | type[Forget] = Acknowledge
    """The final instruction for the token, when all successors have the push."""
    waiting: dict[int, tuple[int, int]] = {}  # target → number, buckets

    @property
    def is_sum(self) -> bool:
        """Whether this server has computed it as the sum of an iteration."""
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
    """The pushes of one server that wait for acknowledgements of the servers to which they were forwarded.

    `numbers` yields numbers that identify forwards in acknowledgements.
    """

    def __init__(self, numbers: Iterator[int]) -> None:
        self._numbers = numbers
        self._pushes: dict[PendingPush, None] = {}
        self._by_push: dict[tuple[int, int], list[PendingPush]] = {}  # incarnation, sequence → in parts
        self._by_number: dict[int, PendingPush] = {}

    def __iter__(self) -> Iterator[PendingPush]:
        return iter(self._pushes)

    def __len__(self) -> int:
        return len(self._pushes)

    def of(self, incarnation: int, sequence: int) -> tuple[PendingPush, ...]:
        """Return the pending parts of one push, in order of arrival."""
        return tuple(self._by_push.get((incarnation, sequence), ()))

    def in_parts(self) -> list[tuple[PendingPush, ...]]:
        """Return the pending parts of each push with more than one part."""
        return [tuple(parts) for parts in self._by_push.values() if len(parts) > 1]

    def left(self) -> Buckets:
        """Return the buckets of pushes from older views."""
        buckets = 0
        for push in self._pushes:
            if push.is_left:
                buckets |= push.buckets
        return buckets

    def add(self, push: PendingPush) -> None:
        """Add a pending push."""
        self._pushes[push] = None
        self._by_push.setdefault((push.incarnation, push.sequence), []).append(push)

    def remove(self, push: PendingPush) -> None:
        """Remove a push if it is pending."""
        self.forget_forwards(push)
        if push in self._pushes:
            del self._pushes[push]
            key = push.incarnation, push.sequence
            self._by_push[key].remove(push)
            if not self._by_push[key]:
                del self._by_push[key]

    def forward(self, push: PendingPush, target: int, buckets: Buckets) -> Forward:
        """Forward a push to a server, and wait for its acknowledgement."""
        number = next(self._numbers)
        push.waiting[target] = number, buckets
        self._by_number[number] = push
        return Forward(push.token, target, number, buckets)

    def acknowledged(self, target: int, number: int) -> PendingPush | None:
        """Record an acknowledgement; return the push if it was the last one."""
        push = self._by_number.get(number)
        if push is None or push.waiting.get(target, (0, 0))[0] != number:
            return None
        del self._by_number[number], push.waiting[target]
        return None if push.waiting else push

    def give_away(self, push: PendingPush, taken: Buckets) -> None:
        """Remove these buckets from a push, because they were forwarded again under another number."""
        push.buckets &= ~taken
        for target, (number, buckets) in list(push.waiting.items()):
            if buckets & ~taken:
                push.waiting[target] = number, buckets & ~taken
            else:
                del self._by_number[number], push.waiting[target]

    def forget_forwards(self, push: PendingPush) -> None:
        """Drop the forwards of a push, but not the push."""
        for number, _ in push.waiting.values():
            self._by_number.pop(number, None)
        push.waiting = {}

    def validate(self) -> None:
        """Assert the invariants."""
        for push in self._pushes:
            assert push.waiting, "a pending push without a forward"
            assert all(self._by_number[number] is push for number, _ in push.waiting.values())
            assert push.buckets, "a pending push without buckets"
            assert push in self._by_push[push.incarnation, push.sequence]
        assert len(self._pushes) == sum(map(len, self._by_push.values()))
        assert len(self._by_number) == sum(len(push.waiting) for push in self._pushes)
