"""Recursive doubling: in round k, each rank exchanges its data with the rank whose number differs in bit k only.

For p ranks (a power of two) and vectors of n bytes, an all-reduce takes ``log2(p) (α + n β + n γ)`` (the α-β-γ model of
``evaluator``). If p is not a power of two, the all-reduce needs two more rounds
(:mod:`paceline.collectives.schedules._fold`). No algorithm has fewer rounds, but each round sends the whole vector, so
the all-reduce is good for short vectors.

An all-gather takes ``log2(p) α + (p - 1)/p n β`` and accepts only powers of two. Bruck's algorithm has the same cost,
and accepts every p.

Source: Thakur, Rabenseifner and Gropp 2005 "Optimization of collective communication operations in MPICH" (the
sections on all-gather and all-reduce).
"""

from __future__ import annotations

from paceline.collectives.schedules._fold import folded
from paceline.collectives.schedules.base import Receive, Round, Schedule, Send
from paceline.errors import UsageError


def all_reduce(rank: int, size: int) -> Schedule:
    return folded(rank, size, _power_of_two)


def all_gather(rank: int, size: int) -> Schedule:
    """Return the all-gather schedule of ``rank``. Raises UsageError if ``size`` is not a power of two."""
    if size & (size - 1):
        raise UsageError(
            f"All-gather by recursive doubling among {size} ranks: expected a power of two. "
            'Choose "bruck", which has the same cost and accepts every number of ranks.'
        )
    rounds: list[Round] = []
    distance = 1
    while distance < size:
        peer = rank ^ distance
        own_start, peer_start = rank & -distance, peer & -distance
        rounds.append(
            (Send(peer, ((own_start, own_start + distance),)), Receive(peer, ((peer_start, peer_start + distance),)))
        )
        distance *= 2
    return Schedule(size, tuple(rounds))


def _power_of_two(rank: int, size: int) -> Schedule:
    vector = ((0, 1),)
    peers = (rank ^ (1 << bit) for bit in range(size.bit_length() - 1))
    return Schedule(1, tuple((Send(peer, vector), Receive(peer, vector, reduce=True)) for peer in peers))
