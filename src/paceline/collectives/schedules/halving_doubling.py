"""Halving-doubling (Rabenseifner's algorithm): reduce-scatter by recursive halving, all-gather by doubling.

Each round of the first half pairs the ranks. The two ranks of a pair work on the same range of blocks: each sends one
half of the range to the other rank, and reduces the other half, which is its range in the next round. The second half
of the rounds repeats these exchanges in reverse order with the reduced blocks. The longest messages go to the nearest
rank.

For p ranks (a power of two) and vectors of n bytes, an all-reduce takes ``2 log2(p) α + 2 (p - 1)/p n β + (p - 1)/p n
γ`` (the α-β-γ model of ``evaluator``). This is the ring's number of bytes in a logarithmic number of rounds. If p is
not a power of two, two more rounds send the whole vector (:mod:`paceline.collectives.schedules._fold`). The algorithm
is good for long vectors and many ranks.

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
