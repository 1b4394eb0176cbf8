"""Extend an all-reduce for powers of two to all sizes: surplus ranks give their data to a neighbour.

If there are ``extra`` ranks more than a power of two, each even rank below ``2 * extra`` sends its vector to the next
rank, which takes part for both ranks and returns the result. This adds two rounds, ``2 (α + n β) + n γ``.

Source: Thakur, Rabenseifner and Gropp 2005 "Optimization of collective communication operations in MPICH" (the
section on all-reduce, non-power-of-two sizes). In Rabenseifner 2004 both ranks of a pair add half of the vector, which
saves ``n/2 γ`` and costs one more round.
"""

from __future__ import annotations

from collections.abc import Callable

from paceline.collectives.schedules.base import Receive, Schedule, Send, renamed


def folded(rank: int, size: int, core_all_reduce: Callable[[int, int], Schedule]) -> Schedule:
    """Return the schedule of ``rank``. ``core_all_reduce(position, core_size)`` is the all-reduce for powers of two."""
    core_size = 1 << (size.bit_length() - 1)
    extra = size - core_size
    paired = rank < 2 * extra
    position = rank // 2 if paired else rank - extra
    core = core_all_reduce(position, core_size)
    everything = ((0, core.num_blocks),)
    if paired and rank % 2 == 0:
        return Schedule(core.num_blocks, ((Send(rank + 1, everything),), (Receive(rank + 1, everything),)))
    ranks = [*range(1, 2 * extra, 2), *range(2 * extra, size)]
    rounds = renamed(core.rounds, ranks)
    if paired:
        rounds = ((Receive(rank - 1, everything, reduce=True),), *rounds, (Send(rank - 1, everything),))
    return Schedule(core.num_blocks, rounds)
