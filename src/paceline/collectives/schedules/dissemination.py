"""Dissemination barrier: in round k each rank tells the rank 2^k after it all that it has heard of.

``ceil(log2 p) α`` at every size, with no root. After the last round everybody has heard, through somebody, of
everybody.

Source: Hensgen, Finkel and Manber 1988 "Two algorithms for barrier synchronization", section 3.
"""

from __future__ import annotations

from paceline.collectives.schedules.base import Receive, Round, Schedule, Send


def barrier(rank: int, size: int) -> Schedule:
    """Messages without blocks."""
    rounds: list[Round] = []
    hop = 1
    while hop < size:
        rounds.append((Send((rank + hop) % size, ()), Receive((rank - hop) % size, ())))
        hop *= 2
    return Schedule(0, tuple(rounds))
