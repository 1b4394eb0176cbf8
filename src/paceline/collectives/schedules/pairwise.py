"""Pairwise: in round i each rank sends to the rank i after it and receives from the rank i before it.

Every block is sent directly to its target: ``(p - 1) α + (p - 1)/p n β``, and ``(p - 1)/p n γ`` for the reduce-scatter,
where n is one rank's whole vector. No algorithm sends fewer bytes; each rank sends p - 1 messages. Good for all-to-all
of long blocks. All-gather and reduce-scatter cost as much as the ring, but no round depends on data of the previous
round, and each block is added by one rank, in a fixed order.

Source: Thakur, Rabenseifner and Gropp 2005 "Optimization of collective communication operations in MPICH" (the
sections on all-to-all and reduce-scatter).
"""

from __future__ import annotations

from paceline.collectives.schedules.base import Copy, Receive, Round, Schedule, Send, Spans


def all_to_all(rank: int, size: int) -> Schedule:
    """Send blocks from input to output, without scratch memory. The first round copies the rank's own block."""
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
