"""Dissemination barrier: in round k, rank r sends an empty message to rank ``r + 2^k`` (modulo the number of ranks).

For p ranks the barrier takes ``ceil(log2 p) α``, where α is the latency of a message. It has no root. After the last
round, every rank has received a message from every other rank, directly or through other ranks.

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
