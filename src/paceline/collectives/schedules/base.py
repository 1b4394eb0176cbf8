"""Define schedules: the actions of one rank, as data.

An algorithm is a pure function ``(rank, size, ...) -> Schedule``. One executor runs schedules on connections, one
evaluator predicts their times, and a checker in the tests proves that they are correct. All three work for every
algorithm.

Common rules:

- The working memory of a rank is one vector of ``num_blocks`` blocks, which may have different sizes.
- Rounds of one rank run in order. The actions of a round start together, and the round ends when all are done.
  There is no barrier between the rounds of different ranks.
- A round sends and copies the contents at the round's beginning, even if another action of the same round
  writes these blocks.
- Messages from one rank to another are matched in the order of sending.

Layout of the blocks:

- all_reduce, reduce, broadcast: the vector, divided into any number of blocks.
- reduce_scatter, all_gather, gather, scatter: block r belongs to rank r.
- all_to_all: ``[0, size)`` is the input (block d goes to rank d; read-only), ``[size, 2 * size)`` the output
  (block size + s comes from rank s), ``[2 * size, 3 * size)`` scratch memory.
- barrier: no blocks; its messages are empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from paceline.errors import PacelineError

Spans: TypeAlias = tuple[tuple[int, int], ...]
"""Half-open ranges of block numbers. A message contains these blocks in this order."""


class ScheduleError(PacelineError, AssertionError):
    """The schedules do not implement their collective: an error in the algorithm, not in the caller's data."""


class Send(NamedTuple):
    """Send the blocks of ``spans`` to ``peer``."""

    peer: int
    spans: Spans


class Receive(NamedTuple):
    """Receive the blocks of ``spans`` from ``peer``. With ``reduce``, combine them with the current contents."""

    peer: int
    spans: Spans
    reduce: bool = False


class Copy(NamedTuple):
    """Copy blocks inside this rank's memory."""

    source: Spans
    target: Spans


Action: TypeAlias = Send | Receive | Copy
Round: TypeAlias = tuple[Action, ...]


@dataclass(frozen=True, slots=True)
class Schedule:
    """The rounds of one rank."""

    num_blocks: int
    rounds: tuple[Round, ...]


def wrapped(start: int, count: int, size: int) -> Spans:
    """Return ``count`` blocks from ``start`` on, modulo ``size``, as one span, or two if they continue at block 0.

    >>> wrapped(6, 3, 8)
    ((6, 8), (0, 1))
    """
    start %= size
    stop = start + count
    return ((start, stop),) if stop <= size else ((start, size), (0, stop - size))


def merged(blocks: Iterable[int]) -> Spans:
    """Return spans of these blocks in this order; consecutive numbers are merged into one span.

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
    """Return the rounds with peer i replaced by ``ranks[i]``, to run an algorithm among a subset of the ranks."""
    return tuple(
        tuple(action if isinstance(action, Copy) else action._replace(peer=ranks[action.peer]) for action in actions)
        for actions in rounds
    )


def widened(rounds: Iterable[Round], spans: Spans) -> tuple[Round, ...]:
    return tuple(
        tuple(action if isinstance(action, Copy) else action._replace(spans=spans) for action in actions)
        for actions in rounds
    )
