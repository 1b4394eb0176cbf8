"""What a schedule is: the actions of one rank, as data.

An algorithm is a pure function ``(rank, size, ...) -> Schedule``. One executor runs schedules on channels, one
checker proves them right, one evaluator prices them; none of them knows an algorithm.

The rules that all of them keep:

- The working memory of a rank is one vector of ``num_blocks`` blocks, which may be of unequal size in bytes.
- Rounds of one rank run in order. The actions of a round start together, and it ends when all of them are done.
  There is no barrier between the rounds of different ranks.
- What a round sends or copies is what was there when the round began, even where another action of the same
  round writes those blocks.
- Messages from one rank to another are matched in the order in which they were sent.

Where the blocks lie, by collective:

- all_reduce, reduce, broadcast: the vector, cut in as many blocks as the algorithm wants.
- reduce_scatter, all_gather, gather, scatter: block r is that of rank r.
- all_to_all: ``[0, size)`` is the input (block d goes to rank d; never written), ``[size, 2 * size)`` the output
  (block size + s comes from rank s), ``[2 * size, 3 * size)`` scratch.
- barrier: no blocks; its messages are empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from paceline.errors import PacelineError

Spans: TypeAlias = tuple[tuple[int, int], ...]
"""Half-open ranges of blocks, concatenated in this order in the message."""


class ScheduleError(PacelineError, AssertionError):
    """Schedules do not do what their collective promises: a fault of the algorithm, never of a caller's data."""


class Send(NamedTuple):
    """Send these blocks to ``peer``."""

    peer: int
    spans: Spans


class Receive(NamedTuple):
    """Receive these blocks from ``peer``: combined into what is there if ``reduce``, else written over it."""

    peer: int
    spans: Spans
    reduce: bool = False


class Copy(NamedTuple):
    """Copy blocks within this rank's memory."""

    source: Spans
    target: Spans


Action: TypeAlias = Send | Receive | Copy
Round: TypeAlias = tuple[Action, ...]


@dataclass(frozen=True, slots=True)
class Schedule:
    """All that one rank does."""

    num_blocks: int
    rounds: tuple[Round, ...]


def count_blocks(spans: Spans) -> int:
    """How many blocks the spans hold."""
    return sum(stop - start for start, stop in spans)


def wrapped(start: int, count: int, size: int) -> Spans:
    """``count`` blocks from ``start`` on, in a circle of ``size``: one span, or two where it goes over the end.

    >>> wrapped(6, 3, 8)
    ((6, 8), (0, 1))
    """
    start %= size
    stop = start + count
    return ((start, stop),) if stop <= size else ((start, size), (0, stop - size))


def merged(blocks: Iterable[int]) -> Spans:
    """These blocks in this order, neighbours merged into one span.

    >>> merged([1, 2, 3, 7, 6])
    ((1, 4), (7, 8), (6, 7))
    """
    spans: list[tuple[int, int]] = []
    for block in blocks:
        if spans and spans[-1][1] == block:
            spans[-1] = (spans[-1][0], block + 1)
        else:
            spans.append((block, block + 1))
    return tuple(spans)


def renamed(rounds: Iterable[Round], ranks: Sequence[int]) -> tuple[Round, ...]:
    """The same rounds, where peer number i is now ``ranks[i]``: an algorithm run among some of the ranks."""
    return tuple(
        tuple(action if isinstance(action, Copy) else action._replace(peer=ranks[action.peer]) for action in actions)
        for actions in rounds
    )


def largest_power_of_two(size: int) -> int:
    """The largest power of two that is not above ``size``."""
    return 1 << (size.bit_length() - 1)
