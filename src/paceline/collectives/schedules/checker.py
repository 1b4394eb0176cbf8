"""Proves that the schedules of all ranks do together what their collective promises, without a process or a number.

A block's content is a symbol: which block it is, and the set of ranks that contributed. Combining adds the sets, and
a rank that is in both has been counted twice. A schedule never looks at data, so one symbolic run of one size shows
all runs of that size.

The run also shows that nobody can be stuck: here a round ends only when the round at the other end of each of its
messages has begun, as if sends waited for their receives. What ends under that rule ends with any buffering, and
since messages are matched in order, with the same data.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias

from paceline.collectives.schedules._contents import Contents
from paceline.collectives.schedules.base import (
    Action,
    Copy,
    Receive,
    Schedule,
    ScheduleError,
    Send,
    Spans,
    count_blocks,
)

_Place: TypeAlias = tuple[int, int]
"""A rank, and the number of one of its rounds."""


def check(collective: str, schedules: Sequence[Schedule], *, root: int = 0) -> None:
    """Assert that ``schedules`` (one per rank) are a right ``collective``.

    Shown are: peers and blocks exist, nobody sends to itself, the actions of a round write different blocks; each
    message is received, in the size that was sent; nothing is read that was never written; no contribution is
    counted twice or ends in another block's place; the input of an all-to-all is kept; nobody waits for ever, even
    if a send completes only once the round of its receive has begun; and each rank ends with what it is promised.

    Raises:
        ScheduleError: something of that is not so; the message names the rank, the round and the block.
        UsageError: there is no such collective.
    """
    contents = Contents(collective, len(schedules), [schedule.num_blocks for schedule in schedules], root)
    for rank, schedule in enumerate(schedules):
        for number, actions in enumerate(schedule.rounds):
            _check_round(collective, (rank, number), actions, len(schedules), schedule.num_blocks)
    _run(schedules, contents, _partners(schedules))
    contents.check_end()


def _check_round(collective: str, place: _Place, actions: Sequence[Action], size: int, num_blocks: int) -> None:
    """What one round can be told by itself."""
    rank = place[0]
    written = (1 << size) - 1 if collective == "all_to_all" else 0
    for action in actions:
        if isinstance(action, Copy):
            if count_blocks(action.source) != count_blocks(action.target):
                raise ScheduleError(f"{_at(place)}: {action} has spans of different length.")
        elif not 0 <= action.peer < size or action.peer == rank:
            raise ScheduleError(f"{_at(place)}: {action} has no peer among the other ranks of {size}.")
        for spans in (action.source, action.target) if isinstance(action, Copy) else (action.spans,):
            for start, stop in spans:
                if not 0 <= start < stop <= num_blocks:
                    raise ScheduleError(f"{_at(place)}: {action} has span {start}:{stop} of {num_blocks} blocks.")
        if not isinstance(action, Send):
            target = action.target if isinstance(action, Copy) else action.spans
            written = _write(place, target, written)


def _write(place: _Place, spans: Spans, written: int) -> int:
    for start, stop in spans:
        mask = (1 << stop) - (1 << start)
        if written & mask:
            block = ((written & mask) & -(written & mask)).bit_length() - 1
            raise ScheduleError(f"{_at(place)} writes block {block} twice, or it is an input that must be kept.")
        written |= mask
    return written


def _partners(schedules: Sequence[Schedule]) -> dict[_Place, list[_Place]]:
    """For each round the rounds at the other ends of its messages."""
    sends: dict[tuple[int, int], list[tuple[_Place, int]]] = defaultdict(list)
    receives: dict[tuple[int, int], list[tuple[_Place, int]]] = defaultdict(list)
    for rank, schedule in enumerate(schedules):
        for number, actions in enumerate(schedule.rounds):
            for action in actions:
                if isinstance(action, Send):
                    sends[rank, action.peer].append(((rank, number), count_blocks(action.spans)))
                elif isinstance(action, Receive):
                    receives[action.peer, rank].append(((rank, number), count_blocks(action.spans)))
    partners: dict[_Place, list[_Place]] = defaultdict(list)
    for channel in sorted({*sends, *receives}):
        sent, received = sends[channel], receives[channel]
        for (source, num_sent), (target, num_received) in zip(sent, received, strict=False):
            if num_sent != num_received:
                raise ScheduleError(f"{_at(source)} sends {num_sent} blocks; {_at(target)} expects {num_received}.")
            partners[source].append(target)
            partners[target].append(source)
        if len(sent) > len(received):
            raise ScheduleError(f"{_at(sent[len(received)][0])} sends to rank {channel[1]}, who never receives it.")
        if len(sent) < len(received):
            place = received[len(sent)][0]
            raise ScheduleError(f"{_at(place)} receives from rank {channel[0]}, who never sends it.")
    return partners


def _run(schedules: Sequence[Schedule], contents: Contents, partners: dict[_Place, list[_Place]]) -> None:
    """Let each rank begin its next round when its last one has ended, until all have ended."""
    begun = [-1] * len(schedules)
    current: list[_Round | None] = [None] * len(schedules)
    runnable = deque(range(len(schedules)))
    while runnable:
        rank = runnable.popleft()
        now = current[rank]
        if now is not None:
            if any(begun[peer] < number for peer, number in partners[now.place]):
                continue
            now.end(contents)
            current[rank] = None
        number = begun[rank] + 1
        if number < len(schedules[rank].rounds):
            begun[rank] = number
            current[rank] = _Round((rank, number), schedules[rank].rounds[number], contents)
            runnable.append(rank)
            runnable.extend(peer for peer, _ in partners[rank, number])
    stuck = [now.place for now in current if now is not None]
    if stuck:
        waits = (peer for peer in partners[stuck[0]] if begun[peer[0]] < peer[1])
        raise ScheduleError(
            f"{_at(stuck[0])} waits for ever for {' and '.join(map(_at, waits))} to begin: "
            f"stuck ranks are {[rank for rank, _ in stuck]}."
        )


class _Round:
    """A round that has begun: its messages are under way."""

    __slots__ = ("_actions", "_copies", "place")

    def __init__(self, place: _Place, actions: Iterable[Action], contents: Contents) -> None:
        self.place: Final = place
        self._actions: Final = actions
        self._copies: Final = deque[list[int]]()
        for action in actions:
            if isinstance(action, Send):
                contents.send(place, action)
            elif isinstance(action, Copy):
                self._copies.append(contents.read(place, action.source))

    def end(self, contents: Contents) -> None:
        """Let what was received and copied take its place."""
        for action in self._actions:
            if isinstance(action, Receive):
                contents.receive(self.place, action)
            elif isinstance(action, Copy):
                contents.write(self.place, action.target, self._copies.popleft())


def _at(place: _Place) -> str:
    return f"rank {place[0]} in round {place[1]}"
