"""Binomial tree: in each step of a broadcast, every rank that has the data sends it to one more rank.

For p ranks and vectors of n bytes, a broadcast costs ``ceil(log2 p) (α + n β)``, and a reduce costs ``ceil(log2 p)
(α + n β + n γ)`` (the α-β-γ model of ``evaluator``). Gather and scatter cost ``ceil(log2 p) α + (p - 1)/p n β``. An
all-reduce is a reduce and then a broadcast. Binomial trees are good for short vectors and short blocks.

If the vector is divided into several ``pieces``, the steps of different pieces overlap. So long vectors take less time,
but more than with the double binary tree, because the root sends each piece log2(p) times.

Source: Chan, Heimlich, Purkayastha and van de Geijn 2007 "Collective communication: theory, practice, and
experience" (the section on minimum-spanning-tree algorithms); Thakur, Rabenseifner and Gropp 2005 "Optimization of
collective communication operations in MPICH" (the sections on broadcast and reduce).
"""

from __future__ import annotations

from functools import lru_cache

from paceline.collectives.schedules import _trees
from paceline.collectives.schedules._trees import NO_RANK, Tree, pipelined, tree_of
from paceline.collectives.schedules.base import Receive, Round, Schedule, Send, Spans, wrapped


def broadcast(rank: int, size: int, *, root: int = 0, pieces: int = 1) -> Schedule:
    return pipelined(_trees.passed_down, [_tree(size, root)], rank, pieces)


def reduce(rank: int, size: int, *, root: int = 0, pieces: int = 1) -> Schedule:
    """Reduce a vector of ``pieces`` blocks to ``root``. A parent adds the data of its nearest child first."""
    return pipelined(_trees.passed_up, [_tree(size, root)], rank, pieces)


def all_reduce(rank: int, size: int, *, pieces: int = 1) -> Schedule:
    return pipelined(_trees.passed_up_and_down, [_tree(size, 0)], rank, pieces)


def gather(rank: int, size: int, *, root: int = 0) -> Schedule:
    tree = _tree(size, root)
    parent = tree.parents[rank]
    collect: Round = tuple(Receive(child, _subtree(child, size, root)) for child in tree.children[rank])
    give: Round = () if parent == NO_RANK else (Send(parent, _subtree(rank, size, root)),)
    return Schedule(size, tuple(filter(None, (collect, give))))


def scatter(rank: int, size: int, *, root: int = 0) -> Schedule:
    tree = _tree(size, root)
    parent = tree.parents[rank]
    take: Round = () if parent == NO_RANK else (Receive(parent, _subtree(rank, size, root)),)
    give: Round = tuple(Send(child, _subtree(child, size, root)) for child in tree.children[rank])
    return Schedule(size, tuple(filter(None, (take, give))))


@lru_cache(maxsize=64)
def _tree(size: int, root: int) -> Tree:
    """Return the binomial tree. The parent of the rank at distance d from the root is at distance d without its lowest
    set bit.
    """
    distances = [(rank - root) % size for rank in range(size)]
    return tree_of([((v & (v - 1)) + root) % size if v else NO_RANK for v in distances])


def _subtree(rank: int, size: int, root: int) -> Spans:
    """Return the blocks of ``rank`` and its descendants, which have consecutive distances from the root."""
    distance = (rank - root) % size
    reach = distance & -distance if distance else size
    return wrapped(rank, min(reach, size - distance), size)
