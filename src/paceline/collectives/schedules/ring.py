"""Ring: every rank sends to the next rank and receives from the previous one.

For p ranks and vectors of n bytes, reduce-scatter and all-gather take p - 1 rounds of n/p bytes each. An all-reduce is
a reduce-scatter and then an all-gather, and takes ``2 (p - 1) (α + n/p β) + (p - 1) n/p γ`` (the α-β-γ model of
``evaluator``). No algorithm sends fewer bytes, and each rank has only two neighbours, but the number of rounds grows
with p. The algorithm is good for long vectors and few ranks.

Source: Chan, Heimlich, Purkayastha and van de Geijn 2007 "Collective communication: theory, practice, and
experience" (the section on bucket algorithms); Patarasuk and Yuan 2009 "Bandwidth optimal all-reduce algorithms
for clusters of workstations" (the section on the ring).
"""

from __future__ import annotations

from paceline.collectives.schedules.base import Receive, Round, Schedule, Send, wrapped


def reduce_scatter(rank: int, size: int) -> Schedule:
    return Schedule(size, _pass_on(rank, size, first=rank - 1, reduce=True))


def all_gather(rank: int, size: int) -> Schedule:
    return Schedule(size, _pass_on(rank, size, first=rank, reduce=False))


def all_reduce(rank: int, size: int) -> Schedule:
    return Schedule(size, reduce_scatter(rank, size).rounds + all_gather(rank, size).rounds)


def _pass_on(rank: int, size: int, *, first: int, reduce: bool) -> tuple[Round, ...]:
    """Return rounds that send block ``first`` in the first round, and then the block received in the previous round."""
    after, before = (rank + 1) % size, (rank - 1) % size
    return tuple(
        (
            Send(after, wrapped(first - step, 1, size)),
            Receive(before, wrapped(first - step - 1, 1, size), reduce),
        )
        for step in range(size - 1)
    )
