"""Prove by a symbolic run that the schedules of all ranks implement their collective.

The symbol of a block consists of the block's number and the set of ranks that contributed. A reduction forms the union
of two sets; a rank in both sets would be counted twice. Schedules do not depend on the data, so one symbolic run covers
all runs with that number of ranks.

The run also excludes deadlocks. A round ends only when the rounds at the other ends of its messages have begun, as if
sends waited for their receives. If this run succeeds, runs with any buffering succeed with the same data, because
messages are matched in order.
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
"""A rank and the number of one of its rounds."""


def check(collective: str, schedules: Sequence[Schedule], *, root: int = 0) -> None:
    """Check that ``schedules`` (one per rank) implement ``collective``.

    Checks: peers and blocks exist, no rank sends to itself, the actions of a round write different blocks; each
    message is received with the size that was sent; every block is written before it is read; no contribution is
    counted twice or written to another block; the input of an all-to-all is kept; there is no deadlock, even if a
    send completes only after the round of its receive has begun; and each rank ends with the expected result.

    Raises:
        ScheduleError: a check failed; the message names the rank, the round and the block.
        UsageError: the collective is unknown.
    """
    contents = Contents(collective, len(schedules), [schedule.num_blocks for schedule in schedules], root)
    for rank, schedule in enumerate(schedules):
        for number, actions in enumerate(schedule.rounds):
            _check_round(collective, (rank, number), actions, len(schedules), schedule.num_blocks)
    _run(schedules, contents, _partners(schedules))
    contents.check_end()


def _check_round(collective: str, place: _Place, actions: Sequence[Action], size: int, num_blocks: int) -> None:
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
    """Return for each round the rounds at the other ends of its messages."""
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
            raise ScheduleError(f"{_at(sent[len(received)][0])} sends to rank {channel[1]}, which never receives it.")
        if len(sent) < len(received):
            place = received[len(sent)][0]
            raise ScheduleError(f"{_at(place)} receives from rank {channel[0]}, which never sends it.")
    return partners


def _run(schedules: Sequence[Schedule], contents: Contents, partners: dict[_Place, list[_Place]]) -> None:
    """Start each rank's next round when its last one has ended, until all rounds have ended."""
    started = [-1] * len(schedules)
    current: list[_Round | None] = [None] * len(schedules)
    runnable = deque(range(len(schedules)))
    while runnable:
        rank = runnable.popleft()
        round_ = current[rank]
        if round_ is not None:
            if any(started[peer] < number for peer, number in partners[round_.place]):
                continue
            round_.end(contents)
            current[rank] = None
        number = started[rank] + 1
        if number < len(schedules[rank].rounds):
            started[rank] = number
            current[rank] = _Round((rank, number), schedules[rank].rounds[number], contents)
            runnable.append(rank)
            runnable.extend(peer for peer, _ in partners[rank, number])
    stuck = [round_.place for round_ in current if round_ is not None]
    if stuck:
        waits = (peer for peer in partners[stuck[0]] if started[peer[0]] < peer[1])
        raise ScheduleError(
            f"{_at(stuck[0])} waits forever for {' and '.join(map(_at, waits))} to begin: "
            f"stuck ranks are {[rank for rank, _ in stuck]}."
        )


class _Round:
    """A round in progress, with its messages."""

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
        """Write the received and the copied blocks."""
        for action in self._actions:
            if isinstance(action, Receive):
                contents.receive(self.place, action)
            elif isinstance(action, Copy):
                contents.write(self.place, action.target, self._copies.popleft())


def _at(place: _Place) -> str:
    return f"rank {place[0]} in round {place[1]}"
