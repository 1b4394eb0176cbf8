"""Extend an all-reduce that needs a power-of-two number of ranks to every number of ranks.

If the number of ranks is a power of two plus ``extra``, each even rank below ``2 * extra`` sends its vector to the next
rank. The next rank adds this vector to its own, runs the all-reduce with the remaining ranks, and sends the result
back. For vectors of n bytes, the two additional rounds cost ``2 (α + n β) + n γ`` (the α-β-γ model of ``evaluator``).

Source: Thakur, Rabenseifner and Gropp 2005 "Optimization of collective communication operations in MPICH" (the
section on all-reduce, non-power-of-two sizes). In the variant of Rabenseifner 2004, each rank of a pair adds half of
the vector. This variant saves ``n/2 γ`` and costs one more round.
"""

from __future__ import annotations

from collections.abc import Callable

from paceline.collectives.schedules.base import Receive, Schedule, Send, renamed


def folded(rank: int, size: int, core_all_reduce: Callable[[int, int], Schedule]) -> Schedule:
    """Return the all-reduce schedule of ``rank`` for any ``size``.

    ``core_all_reduce(position, core_size)`` returns one rank's schedule for a power of two.
    """
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
