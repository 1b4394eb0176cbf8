"""Double binary tree: two trees that each carry half of the vector; who is an inner rank of one is a leaf of the other.

In a single binary tree the leaves, half of all ranks, send nothing on. Here every rank passes on about as much as it
gets, so broadcast and reduce approach ``n β``, and all-reduce ``2 n β``, in O(log p) steps of latency. With the two
halves in ``pieces`` each, broadcast takes about ``(log2 p + pieces) α + (1 + log2(p)/pieces) n β``, reduce and
all-reduce about twice the steps (a parent adds one child's piece at a time) and ``n γ``. Good for long vectors and
many ranks; ``pieces`` near the square root of ``n β log2(p) / α`` is best.

Source: Sanders, Speck and Träff 2009 "Two-tree algorithms for full bandwidth broadcast, reduction and scan" (the
sections on broadcast and reduction). Their two-colouring of the edges orders the messages of ranks that can send
one at a time; here both trees move in every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain

from paceline.collectives.schedules._trees import (
    NO_RANK,
    Tree,
    cut,
    in_rounds,
    passed_down,
    passed_up,
    passed_up_and_down,
    tree_of,
)
from paceline.collectives.schedules.base import Schedule


def all_reduce(rank: int, size: int, *, pieces: int = 1) -> Schedule:
    """In ``2 * pieces`` blocks: the first half of them goes by one tree, the second by the other."""
    halves = zip(_trees(size), (cut(0, pieces), cut(pieces, pieces)), strict=True)
    timed = (passed_up_and_down(tree, rank, half) for tree, half in halves)
    return Schedule(2 * pieces, in_rounds(chain.from_iterable(timed)))


def broadcast(rank: int, size: int, *, root: int = 0, pieces: int = 1) -> Schedule:
    """In ``2 * pieces`` blocks; the root stands above both trees."""
    halves = zip(_trees_below(size, root), (cut(0, pieces), cut(pieces, pieces)), strict=True)
    timed = (passed_down(tree, rank, half) for tree, half in halves)
    return Schedule(2 * pieces, in_rounds(chain.from_iterable(timed)))


def reduce(rank: int, size: int, *, root: int = 0, pieces: int = 1) -> Schedule:
    """In ``2 * pieces`` blocks; the root stands above both trees."""
    halves = zip(_trees_below(size, root), (cut(0, pieces), cut(pieces, pieces)), strict=True)
    timed = (passed_up(tree, rank, half) for tree, half in halves)
    return Schedule(2 * pieces, in_rounds(chain.from_iterable(timed)))


@lru_cache(maxsize=64)
def _trees(size: int) -> tuple[Tree, Tree]:
    """Two trees over all ranks."""
    first, second = _parent_lists(size)
    return tree_of(first), tree_of(second)


@lru_cache(maxsize=64)
def _trees_below(size: int, root: int) -> tuple[Tree, Tree]:
    """Two trees over all ranks but the root, which is the only parent of both their roots."""
    if size == 1:
        return _trees(1)
    ranks = [(root + 1 + place) % size for place in range(size - 1)]
    first, second = (_placed(parents, ranks, root) for parents in _parent_lists(size - 1))
    return tree_of(first), tree_of(second)


def _placed(parents: Sequence[int], ranks: Sequence[int], root: int) -> list[int]:
    """The tree of places as one of ranks: place i is ``ranks[i]``, and ``root`` above all."""
    result = [NO_RANK] * (len(ranks) + 1)
    for place, parent in enumerate(parents):
        result[ranks[place]] = root if parent == NO_RANK else ranks[parent]
    return result


def _parent_lists(size: int) -> tuple[list[int], list[int]]:
    """The parent of each place in both trees: the second is the first, shifted by one place.

    In the first the odd places are inner (as far as they have anyone below), the even ones leaves; in the second it
    is the other way round.
    """
    first = [_in_order_parent(place + 1, size) - 1 for place in range(size)]
    shifted = [first[(place + 1) % size] for place in range(size)]
    second = [NO_RANK if parent == NO_RANK else (parent - 1) % size for parent in shifted]
    return first, second


def _in_order_parent(number: int, size: int) -> int:
    """The parent of ``number`` in the binary tree whose in-order walk is 1, 2, ..., size; 0 for its root.

    The level of a number is that of its lowest bit, so the odd ones are leaves. Where a parent is above ``size``,
    the nearest ancestor within it takes its place.
    """
    if number == 1 << (size.bit_length() - 1):
        return 0
    while True:
        lowest = number & -number
        number = (number ^ lowest) | (lowest << 1)
        if number <= size:
            return number
