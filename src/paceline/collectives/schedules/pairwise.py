"""Pairwise: in round i, rank r sends to rank ``r + i`` and receives from rank ``r - i`` (modulo the number of ranks).

Every block is sent directly to its target, in p - 1 messages per rank. For p ranks and vectors of n bytes, the time is
``(p - 1) α + (p - 1)/p n β``, and for the reduce-scatter additionally ``(p - 1)/p n γ`` (the α-β-γ model of
``evaluator``). No algorithm sends fewer bytes. The algorithm is good for all-to-all of long blocks.

All-gather and reduce-scatter cost as much as with the ring. Unlike the ring, no round waits for data of the previous
round, and one rank does all additions of a block, in a fixed order.

Source: Thakur, Rabenseifner and Gropp 2005 "Optimization of collective communication operations in MPICH" (the
sections on all-to-all and reduce-scatter).
"""

from __future__ import annotations

from paceline.collectives.schedules.base import Copy, Receive, Round, Schedule, Send, Spans


def all_to_all(rank: int, size: int) -> Schedule:
    """Send each block from the sender's input to the receiver's output, without scratch memory.

    The rank's block for itself is copied in the first round.
    """
    copy_own = Copy(_one(rank), _one(size + rank))
    if size == 1:
        return Schedule(3, ((copy_own,),))
    rounds: list[Round] = []
    for after, before in _peers(rank, size):
        rounds.append((Send(after, _one(after)), Receive(before, _one(size + before))))
    rounds[0] = (*rounds[0], copy_own)
    return Schedule(3 * size, tuple(rounds))


def all_gather(rank: int, size: int) -> Schedule:
    rounds = ((Send(after, _one(rank)), Receive(before, _one(before))) for after, before in _peers(rank, size))
    return Schedule(size, tuple(rounds))


def reduce_scatter(rank: int, size: int) -> Schedule:
    rounds = (
        (Send(after, _one(after)), Receive(before, _one(rank), reduce=True)) for after, before in _peers(rank, size)
    )
    return Schedule(size, tuple(rounds))


def _peers(rank: int, size: int) -> list[tuple[int, int]]:
    return [((rank + step) % size, (rank - step) % size) for step in range(1, size)]


def _one(block: int) -> Spans:
    return ((block, block + 1),)
