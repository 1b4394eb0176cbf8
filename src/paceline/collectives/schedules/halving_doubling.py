"""Halving-doubling (Rabenseifner's algorithm): reduce-scatter by recursive halving, all-gather by doubling.

In each round of the first half, a pair of ranks splits its common blocks and each rank reduces its part; the second
half reverses these steps. The longest messages go to the nearest rank. For p a power of two:
``2 log2(p) α + 2 (p - 1)/p n β + (p - 1)/p n γ``: as many bytes as the ring, in a logarithmic number of rounds. Other
sizes need two more rounds with the whole vector (:mod:`paceline.collectives.schedules._fold`). Good for long vectors
and many ranks.

Source: Rabenseifner 2004 "Optimization of collective reduction operations" (recursive vector halving, distance
doubling); Thakur, Rabenseifner and Gropp 2005 "Optimization of collective communication operations in MPICH" (the
section on all-reduce).
"""

from __future__ import annotations

from paceline.collectives.schedules._fold import folded
from paceline.collectives.schedules.base import Receive, Round, Schedule, Send


def all_reduce(rank: int, size: int) -> Schedule:
    return folded(rank, size, _power_of_two)


def _power_of_two(rank: int, size: int) -> Schedule:
    halving: list[Round] = []
    doubling: list[Round] = []
    start, stop = 0, size
    distance = 1
    while distance < size:
        peer = rank ^ distance
        middle = (start + stop) // 2
        lower, upper = (start, middle), (middle, stop)
        keep, give = (lower, upper) if rank < peer else (upper, lower)
        halving.append((Send(peer, (give,)), Receive(peer, (keep,), reduce=True)))
        doubling.append((Send(peer, (keep,)), Receive(peer, (give,))))
        start, stop = keep
        distance *= 2
    return Schedule(size, (*halving, *reversed(doubling)))
