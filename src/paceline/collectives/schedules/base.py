"""Define schedules: the actions of one rank, as data.

An algorithm is a pure function ``(rank, size, ...) -> Schedule``. One executor runs the schedules of all algorithms on
connections, one evaluator predicts their times, and one checker in the tests proves that they are correct.

Rules of all schedules:

- The working memory of a rank is one vector of ``num_blocks`` blocks. The blocks may have different sizes.
- A rank runs its rounds in order. The actions of a round start together, and the round ends when all its actions are
  done. A rank does not wait for the rounds of other ranks, except for the messages that it receives.
- ``Send`` and ``Copy`` read the contents that the blocks have at the beginning of the round, even if another action of
  the round writes these blocks.
- The first message that rank a sends to rank b belongs to the first ``Receive`` of rank b from rank a, and so on.

Each collective numbers its blocks in this way:

- all_reduce, reduce and broadcast divide the vector into any number of blocks.
- In reduce_scatter, all_gather, gather and scatter, block r belongs to rank r.
- In all_to_all, the blocks ``[0, size)`` are the read-only input, and block d goes to rank d. The blocks ``[size, 2 *
  size)`` are the output, and block ``size + s`` comes from rank s. The blocks ``[2 * size, 3 * size)`` are scratch
  memory.
- A barrier has no blocks, and its messages are empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from paceline.errors import PacelineError

Spans: TypeAlias = tuple[tuple[int, int], ...]
"""Half-open ranges of block numbers, in the order in which a message contains the blocks."""


class ScheduleError(PacelineError, AssertionError):
    """Raised if schedules deadlock or give a wrong result. The cause is an error in the algorithm, not in the data."""


class Send(NamedTuple):
    """Send the blocks of ``spans`` to ``peer``."""

    peer: int
    spans: Spans


class Receive(NamedTuple):
    """Receive the blocks of ``spans`` from ``peer``.

    With ``reduce``, each received block is combined with the block's current contents (for example added).
    """

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
    """The rounds that one rank runs for one collective operation."""

    num_blocks: int
    rounds: tuple[Round, ...]


def wrapped(start: int, count: int, size: int) -> Spans:
    """Return the ``count`` blocks from ``start`` on, modulo ``size``: one span, or two if the range passes the end.

    >>> wrapped(6, 3, 8)
    ((6, 8), (0, 1))
    """
    start %= size
    stop = start + count
    return ((start, stop),) if stop <= size else ((start, size), (0, stop - size))


def merged(blocks: Iterable[int]) -> Spans:
    """Return spans that contain ``blocks`` in their order. Consecutive block numbers become one span.

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
    """Return the rounds with each peer i replaced by ``ranks[i]``, to run an algorithm among some of the ranks."""
    return tuple(
        tuple(action if isinstance(action, Copy) else action._replace(peer=ranks[action.peer]) for action in actions)
        for actions in rounds
    )


def widened(rounds: Iterable[Round], spans: Spans) -> tuple[Round, ...]:
    return tuple(
        tuple(action if isinstance(action, Copy) else action._replace(spans=spans) for action in actions)
        for actions in rounds
    )
