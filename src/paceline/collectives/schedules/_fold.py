"""How an all-reduce for powers of two serves every size: the ranks too many are folded into their neighbours.

With ``extra`` ranks above the power of two, each even rank below ``2 * extra`` gives its vector to the odd rank
after it, which takes part for both and gives the result back: two more rounds, ``2 (α + n β) + n γ``.

Source: Thakur, Rabenseifner and Gropp 2005 "Optimization of collective communication operations in MPICH" (the
section on all-reduce, non-power-of-two sizes). Rabenseifner 2004 lets both of a pair add up half of the vector:
that saves ``n/2 γ`` and costs one more round.
"""

from __future__ import annotations

from collections.abc import Callable

from paceline.collectives.schedules.base import Receive, Schedule, Send, largest_power_of_two, renamed


def folded(rank: int, size: int, core_all_reduce: Callable[[int, int], Schedule]) -> Schedule:
    """The schedule of ``rank``, where ``core_all_reduce(position, core_size)`` serves powers of two."""
    core_size = largest_power_of_two(size)
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
