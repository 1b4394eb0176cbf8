"""The blocks of all ranks in the checker's symbolic run: start, changes and expected end.

A symbol is an integer, ``(block << size) | contributors``: the original block, and the set of ranks that contributed
(without a reduction, the source rank).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Final

from paceline.collectives.schedules.base import Receive, ScheduleError, Send, Spans
from paceline.errors import UsageError

COLLECTIVES: Final = (
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
)

ROOTED: Final = frozenset({"broadcast", "gather", "reduce", "scatter"})
"""Collectives with a root."""

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
        # A barrier has no blocks. Its messages carry the ranks that the sender knows to have reached the barrier.
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
