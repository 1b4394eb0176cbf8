"""Central: all data goes through one rank, as in a parameter server.

For p ranks and vectors of n bytes, the root sends or receives p - 1 messages, so the times grow linearly with p (in the
α-β-γ model of ``evaluator``):

- A reduce takes about ``α + (p - 1) n β + (p - 1) n γ``.
- A broadcast takes ``α + (p - 1) n β``.
- An all-reduce takes the time of a reduce and a broadcast. With several ``pieces``, the reduce and the broadcast
  overlap.
- Gather and scatter take ``α + (p - 1)/p n β``.
- All-gather and reduce-scatter take ``2 α`` and about ``p n β``.

The algorithm is good for very few ranks, for gather and scatter of long blocks, and as a baseline.

Source: Li et al. 2014 "Scaling Distributed Machine Learning with the Parameter Server" (OSDI'14); the
linear algorithms of Chan, Heimlich, Purkayastha and van de Geijn 2007, "Collective communication: theory, practice,
and experience".
"""

from __future__ import annotations

from functools import lru_cache

from paceline.collectives.schedules import _trees
from paceline.collectives.schedules._trees import NO_RANK, Tree, pipelined, tree_of
from paceline.collectives.schedules.base import Receive, Round, Schedule, Send, merged, widened


def broadcast(rank: int, size: int, *, root: int = 0, pieces: int = 1) -> Schedule:
    return pipelined(_trees.passed_down, [_star(size, root)], rank, pieces)


def reduce(rank: int, size: int, *, root: int = 0, pieces: int = 1) -> Schedule:
    """Reduce a vector of ``pieces`` blocks to ``root``, which adds the data of the ranks in their order."""
    return pipelined(_trees.passed_up, [_star(size, root)], rank, pieces)


def all_reduce(rank: int, size: int, *, pieces: int = 1) -> Schedule:
    return pipelined(_trees.passed_up_and_down, [_star(size, 0)], rank, pieces)


def gather(rank: int, size: int, *, root: int = 0) -> Schedule:
    if size == 1:
        return Schedule(size, ())
    if rank != root:
        return Schedule(size, ((Send(root, ((rank, rank + 1),)),),))
    return Schedule(size, (tuple(Receive(peer, ((peer, peer + 1),)) for peer in range(size) if peer != root),))


def scatter(rank: int, size: int, *, root: int = 0) -> Schedule:
    if size == 1:
        return Schedule(size, ())
    if rank != root:
        return Schedule(size, ((Receive(root, ((rank, rank + 1),)),),))
    return Schedule(size, (tuple(Send(peer, ((peer, peer + 1),)) for peer in range(size) if peer != root),))


def all_gather(rank: int, size: int) -> Schedule:
    if size == 1:
        return Schedule(size, ())
    distribute: Round
    if rank:
        distribute = (Receive(0, _all_but(rank, size)),)
    else:
        distribute = tuple(Send(peer, _all_but(peer, size)) for peer in range(1, size))
    return Schedule(size, (*gather(rank, size).rounds, distribute))


def reduce_scatter(rank: int, size: int) -> Schedule:
    return Schedule(size, widened(reduce(rank, size).rounds, ((0, size),)) + scatter(rank, size).rounds)


@lru_cache(maxsize=64)
def _star(size: int, root: int) -> Tree:
    return tree_of([NO_RANK if rank == root else root for rank in range(size)])


def _all_but(rank: int, size: int) -> tuple[tuple[int, int], ...]:
    return merged(block for block in range(size) if block != rank)
