"""Dissemination barrier: in round k each rank sends to the rank 2^k after it.

``ceil(log2 p) α`` for every p, without a root. After the last round every rank has, directly or indirectly, received a
message from every other rank.

Source: Hensgen, Finkel and Manber 1988 "Two algorithms for barrier synchronization", section 3.
"""

from __future__ import annotations

from paceline.collectives.schedules.base import Receive, Round, Schedule, Send


def barrier(rank: int, size: int) -> Schedule:
    rounds: list[Round] = []
    hop = 1
    while hop < size:
        rounds.append((Send((rank + hop) % size, ()), Receive((rank - hop) % size, ())))
        hop *= 2
    return Schedule(0, tuple(rounds))
