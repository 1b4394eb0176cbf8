"""Pushes that the servers behind one do not all have yet, and the states that a push goes through at a server."""

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
        Transition(OUTSIDE, "PushReceived", "refused", "RefusePush", when="another map or not its primary"),
        Transition(OUTSIDE, "Forwarded", "forgotten", "Forget", when="another map or not from its chain"),
        Transition(OUTSIDE, "PushReceived", "acknowledged", "Acknowledge", when="nobody behind"),
        Transition(OUTSIDE, "Forwarded", "acknowledged", "Acknowledge", when="nobody behind"),
        Transition(OUTSIDE, "PushReceived", "pending", "Forward"),
        Transition(OUTSIDE, "Forwarded", "pending", "Forward"),
        Transition(OUTSIDE, "PushReceived", "withheld", "Withhold", when="nobody behind, too few replicas"),
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
            for event in ("Acknowledged", "Change", "LinkUp", "PushReceived", "Forwarded")
        ),
        *(
            Transition(state, event, "withheld", "Withhold", when="too few replicas")
            for state, events in _WITHHOLDING.items()
            for event in events
        ),
        Transition("withheld", "Change", "acknowledged", "Acknowledge", when="replicas enough"),
        Transition("withheld", "Change", "refused", "RefusePush", when="led elsewhere"),
        Transition("withheld", "give_up", OUTSIDE),
    ),
)


class PendingPush(Struct, eq=False):
    """A push that the servers behind this one do not all have yet."""

    token: object
    incarnation: int
    sequence: int
    buckets: int
    is_ours: bool
    """Whether this server took it as the primary, from a client or as its own sum."""
    is_left: bool = False
    """Whether it came by an older map."""
    end: type[Acknowledge] | type[RefusePush] | type[Forget] = Acknowledge
    """What becomes of the token when all servers behind have the push."""
    waiting: dict[int, tuple[int, int]] = {}  # target → number, buckets

    @property
    def is_sum(self) -> bool:
        """Whether this server is the one that has summed it."""
        return self.is_ours and self.incarnation == AGGREGATE


def in_order(pushes: Iterable[PendingPush]) -> list[PendingPush]:
    """Return these pushes as they came, but those of one sender by their numbers: a repeat is no later for it."""
    by_sender: dict[int, list[PendingPush]] = {}
    senders = []
    for push in pushes:
        senders.append(push.incarnation)
        by_sender.setdefault(push.incarnation, []).append(push)
    for own in by_sender.values():
        own.sort(key=lambda push: -push.sequence)
    return [by_sender[sender].pop() for sender in senders]


class PendingPushes:
    """The pushes of one server that wait for servers behind it, each for those to which it was forwarded.

    `numbers` gives the numbers by which forwards are acknowledged.
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
        """Return what is pending of one push, in the order in which it came."""
        return tuple(self._by_push.get((incarnation, sequence), ()))

    def in_parts(self) -> list[tuple[PendingPush, ...]]:
        """Return what is pending of each push of which there is more than one part."""
        return [tuple(parts) for parts in self._by_push.values() if len(parts) > 1]

    def left(self) -> Buckets:
        """Return the buckets of those that came by an older map."""
        buckets = 0
        for push in self._pushes:
            if push.is_left:
                buckets |= push.buckets
        return buckets

    def add(self, push: PendingPush) -> None:
        """Let a push wait."""
        self._pushes[push] = None
        self._by_push.setdefault((push.incarnation, push.sequence), []).append(push)

    def remove(self, push: PendingPush) -> None:
        """Forget a push, if it waits."""
        self.forget_forwards(push)
        if push in self._pushes:
            del self._pushes[push]
            key = push.incarnation, push.sequence
            self._by_push[key].remove(push)
            if not self._by_push[key]:
                del self._by_push[key]

    def forward(self, push: PendingPush, target: int, buckets: Buckets) -> Forward:
        """Have a push wait for a server; return what is sent to it."""
        number = next(self._numbers)
        push.waiting[target] = number, buckets
        self._by_number[number] = push
        return Forward(push.token, target, number, buckets)

    def acknowledged(self, target: int, number: int) -> PendingPush | None:
        """Take an answer; return the push if it waits for nobody any more."""
        push = self._by_number.get(number)
        if push is None or push.waiting.get(target, (0, 0))[0] != number:
            return None
        del self._by_number[number], push.waiting[target]
        return None if push.waiting else push

    def give_away(self, push: PendingPush, taken: Buckets) -> None:
        """Let a push wait in these buckets no more: they are on their way once more, under another number."""
        push.buckets &= ~taken
        for target, (number, buckets) in list(push.waiting.items()):
            if buckets & ~taken:
                push.waiting[target] = number, buckets & ~taken
            else:
                del self._by_number[number], push.waiting[target]

    def forget_forwards(self, push: PendingPush) -> None:
        """Let a push wait for nobody, though it stays here."""
        for number, _ in push.waiting.values():
            self._by_number.pop(number, None)
        push.waiting = {}

    def validate(self) -> None:
        """Assert the invariants."""
        for push in self._pushes:
            assert push.waiting, "a push waits for nobody"
            assert all(self._by_number[number] is push for number, _ in push.waiting.values())
            assert push.buckets, "a push to no bucket is kept"
            assert push in self._by_push[push.incarnation, push.sequence]
        assert len(self._pushes) == sum(map(len, self._by_push.values()))
        assert len(self._by_number) == sum(len(push.waiting) for push in self._pushes)
