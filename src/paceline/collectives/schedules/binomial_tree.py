"""Binomial tree: every rank with data sends to one more rank in each step.

Broadcast and reduce take ``ceil(log2 p) (α + n β)`` (and ``n γ`` per step); gather and scatter
``ceil(log2 p) α + (p - 1)/p n β``; all-reduce is reduce and broadcast. Good for short vectors, and for gather and
scatter of short blocks. With ``pieces`` the steps of different pieces overlap. This helps long vectors, but less than
the double binary tree, because the root sends each piece log2(p) times.

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
    """Reduce in ``pieces`` blocks. A parent adds its nearest child's data first."""
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
    """Return the tree. With ranks counted from the root, the parent of v is v without its lowest bit."""
    distances = [(rank - root) % size for rank in range(size)]
    return tree_of([((v & (v - 1)) + root) % size if v else NO_RANK for v in distances])


def _subtree(rank: int, size: int, root: int) -> Spans:
    """Return the blocks of the ranks in the subtree of ``rank``; counted from the root, they are consecutive."""
    distance = (rank - root) % size
    reach = distance & -distance if distance else size
    return wrapped(rank, min(reach, size - distance), size)
