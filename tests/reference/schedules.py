"""Prove by a symbolic run that the schedules of all ranks implement their collective.

The symbol of a block consists of the block's number and the set of ranks that contributed. A reduction forms the union
of two sets; a rank in both sets would be counted twice. Schedules do not depend on the data, so one symbolic run covers
all runs with that number of ranks.

The run also excludes deadlocks. A round ends only when the rounds at the other ends of its messages have begun, as if
sends waited for their receives. If this run succeeds, runs with any buffering succeed with the same data, because
messages are matched in order.

A symbol is an integer, ``(block << size) | contributors``; without a reduction, the contributor is the source rank.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias

from paceline.collectives.schedules import Action, Copy, Receive, Schedule, ScheduleError, Send, Spans
from paceline.collectives.schedules.registry import COLLECTIVES
from paceline.errors import UsageError

_Place: TypeAlias = tuple[int, int]
"""A rank and the number of one of its rounds."""


def count_blocks(spans: Spans) -> int:
    """Return the number of blocks in the spans."""
    return sum(stop - start for start, stop in spans)


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
    """Start each rank's next round when its current round has ended, until all rounds have ended."""
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
    """A running round and its messages."""

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


_NOTHING: Final = -1
_REDUCING: Final = frozenset({"all_reduce", "reduce", "reduce_scatter"})


class Contents:
    """The memory of every rank, and the messages between the ranks."""

    def __init__(self, collective: str, size: int, num_blocks: Sequence[int], root: int) -> None:
        if collective not in COLLECTIVES:
            raise UsageError(f"No collective {collective!r}: expected one of {', '.join(COLLECTIVES)}.")
        if size < 1 or not 0 <= root < size:
            raise UsageError(f"Schedules of {size} ranks, root {root}: expected at least one, and a root among them.")
        self._collective: Final = collective
        self._size: Final = size
        self._root: Final = root
        self._messages: Final = defaultdict[tuple[int, int], deque[list[int]]](deque)
        for rank, number in enumerate(num_blocks):
            if number != self._expected_num_blocks(num_blocks[0]):
                raise ScheduleError(f"rank {rank} has {number} blocks, which do not fit {collective} of {size} ranks.")
        self._num_blocks: Final = num_blocks[0]
        self._memories: Final = [self._begin(rank) for rank in range(size)]
        # A barrier has no blocks. Its messages contain the ranks that have reached the barrier, as far as the sender
        # has received.
        self._reached: Final = [1 << rank for rank in range(size)]

    def read(self, place: tuple[int, int], spans: Spans) -> list[int]:
        """Return the symbols in these blocks of the rank."""
        memory = self._memories[place[0]]
        read = [symbol for start, stop in spans for symbol in memory[start:stop]]
        if _NOTHING in read:
            raise self._fault(place, _block_at(spans, read.index(_NOTHING)), "is read, but is still empty")
        return read

    def write(self, place: tuple[int, int], spans: Spans, symbols: Sequence[int], *, reduce: bool = False) -> None:
        """Write symbols into these blocks of the rank, or combine them with the current symbols."""
        memory = self._memories[place[0]]
        blocks = (block for start, stop in spans for block in range(start, stop))
        for block, symbol in zip(blocks, symbols, strict=True):
            if self._collective != "all_to_all" and symbol >> self._size != block:
                raise self._fault(place, block, f"gets {self._describe(symbol)}")
            if not reduce:
                memory[block] = symbol
                continue
            if memory[block] == _NOTHING or self._collective not in _REDUCING:
                raise self._fault(place, block, "is reduced into, but is empty or not reducible")
            repeated = memory[block] & symbol & ((1 << self._size) - 1)
            if repeated:
                raise self._fault(place, block, f"counts ranks {_ranks(repeated)} twice")
            memory[block] |= symbol

    def send(self, place: tuple[int, int], action: Send) -> None:
        """Enqueue a message."""
        symbols = self.read(place, action.spans) if self._collective != "barrier" else [self._reached[place[0]]]
        self._messages[place[0], action.peer].append(symbols)

    def receive(self, place: tuple[int, int], action: Receive) -> None:
        """Apply the oldest message from the peer, which must exist."""
        symbols = self._messages[action.peer, place[0]].popleft()
        if self._collective == "barrier":
            self._reached[place[0]] |= symbols[0]
        else:
            self.write(place, action.spans, symbols, reduce=action.reduce)

    def check_end(self) -> None:
        """Raise ScheduleError unless each rank has the expected result."""
        for rank, memory in enumerate(self._memories):
            missing = ((1 << self._size) - 1) & ~self._reached[rank]
            if self._collective == "barrier" and missing:
                raise ScheduleError(f"rank {rank} leaves the barrier without a message from ranks {_ranks(missing)}.")
            for block, expected in self._end(rank):
                if memory[block] != expected:
                    raise ScheduleError(
                        f"rank {rank} ends with {self._describe(memory[block])} in block {block}, "
                        f"expected {self._describe(expected)}."
                    )

    def _expected_num_blocks(self, first: int) -> int:
        """Return the required ``num_blocks`` of each rank, if the first rank has ``first``."""
        if self._collective in ("all_reduce", "broadcast", "reduce"):
            return max(first, 1)
        return {"all_to_all": 3 * self._size, "barrier": 0}.get(self._collective, self._size)

    def _symbol(self, block: int, contributors: int) -> int:
        return (block << self._size) | contributors

    def _begin(self, rank: int) -> list[int]:
        own = [self._symbol(block, 1 << rank) for block in range(self._num_blocks)]
        nothing = [_NOTHING] * self._num_blocks
        if self._collective in ("broadcast", "scatter"):
            return own if rank == self._root else nothing
        if self._collective in ("all_gather", "gather"):
            return [*nothing[:rank], own[rank], *nothing[rank + 1 :]]
        if self._collective == "all_to_all":
            return [*own[: self._size], *nothing[self._size :]]
        return own

    def _end(self, rank: int) -> list[tuple[int, int]]:
        """Return the blocks of the result at this rank, with the expected symbols."""
        blocks: Sequence[int] = range(self._num_blocks)
        if self._collective in ("gather", "reduce") and rank != self._root:
            blocks = ()
        if self._collective in ("reduce_scatter", "scatter"):
            blocks = (rank,)
        if self._collective == "all_to_all":
            return [(self._size + source, self._symbol(rank, 1 << source)) for source in range(self._size)]
        if self._collective in ("broadcast", "scatter"):
            return [(block, self._symbol(block, 1 << self._root)) for block in blocks]
        if self._collective in ("all_gather", "gather"):
            return [(block, self._symbol(block, 1 << block)) for block in blocks]
        return [(block, self._symbol(block, (1 << self._size) - 1)) for block in blocks]

    def _describe(self, symbol: int) -> str:
        if symbol == _NOTHING:
            return "nothing"
        return f"block {symbol >> self._size} of ranks {_ranks(symbol & ((1 << self._size) - 1))}"

    def _fault(self, place: tuple[int, int], block: int, problem: str) -> ScheduleError:
        return ScheduleError(f"{self._collective}: rank {place[0]} in round {place[1]}: block {block} {problem}.")


def _block_at(spans: Spans, index: int) -> int:
    return [block for start, stop in spans for block in range(start, stop)][index]


def _ranks(contributors: int) -> list[int]:
    return [rank for rank in range(contributors.bit_length()) if contributors >> rank & 1]
