"""Double binary tree: each of two trees carries half of the vector; inner ranks of one tree are leaves of the other.

In a broadcast along a single binary tree, the leaves (half of all ranks) send nothing. With two trees, every rank sends
about as many bytes as it receives. For p ranks and long vectors of n bytes, the time of broadcast and reduce therefore
approaches ``n β``, and the time of all-reduce ``2 n β``, plus O(log p) times α (the α-β-γ model of ``evaluator``).

If each half of the vector is divided into ``pieces``, a broadcast takes about ``(log2 p + pieces) α + (1 +
log2(p)/pieces) n β``. Reduce and all-reduce take about twice as many steps, because a parent adds one child's piece at
a time, and additionally ``n γ``. The best number of pieces is about the square root of ``n β log2(p) / α``. The
algorithm is good for long vectors and many ranks.

Source: Sanders, Speck and Träff 2009 "Two-tree algorithms for full bandwidth broadcast, reduction and scan" (the
sections on broadcast and reduction). In the paper a rank uses its two trees in alternate steps, so that it sends one
message at a time. In this implementation a rank may send along both trees in one step.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from paceline.collectives.schedules import _trees
from paceline.collectives.schedules._trees import NO_RANK, Tree, pipelined, tree_of
from paceline.collectives.schedules.base import Schedule


def all_reduce(rank: int, size: int, *, pieces: int = 1) -> Schedule:
    return pipelined(_trees.passed_up_and_down, _two_trees(size), rank, pieces)


def broadcast(rank: int, size: int, *, root: int = 0, pieces: int = 1) -> Schedule:
    """Broadcast a vector of ``2 * pieces`` blocks. ``root`` sends half of the blocks to the top rank of each tree."""
    return pipelined(_trees.passed_down, _trees_below(size, root), rank, pieces)


def reduce(rank: int, size: int, *, root: int = 0, pieces: int = 1) -> Schedule:
    """Reduce a vector of ``2 * pieces`` blocks. The top rank of each tree sends half of the blocks to ``root``."""
    return pipelined(_trees.passed_up, _trees_below(size, root), rank, pieces)


@lru_cache(maxsize=64)
def _two_trees(size: int) -> tuple[Tree, Tree]:
    first, second = _parent_lists(size)
    return tree_of(first), tree_of(second)


@lru_cache(maxsize=64)
def _trees_below(size: int, root: int) -> tuple[Tree, Tree]:
    """Return two trees over all ranks except ``root``, which is the parent of the top ranks of both trees."""
    if size == 1:
        return _two_trees(1)
    ranks = [(root + 1 + position) % size for position in range(size - 1)]
    first, second = (_placed(parents, ranks, root) for parents in _parent_lists(size - 1))
    return tree_of(first), tree_of(second)


def _placed(parents: Sequence[int], ranks: Sequence[int], root: int) -> list[int]:
    """Return the parent of each rank, given the parents of positions. The rank at position i is ``ranks[i]``, and the
    parent of the top rank is ``root``.
    """
    result = [NO_RANK] * (len(ranks) + 1)
    for position, parent in enumerate(parents):
        result[ranks[position]] = root if parent == NO_RANK else ranks[parent]
    return result


def _parent_lists(size: int) -> tuple[list[int], list[int]]:
    """Return the parent of each position in both trees. Odd positions are inner nodes of the first tree, and even
    positions are inner nodes of the second tree.
    """
    first = [_in_order_parent(position + 1, size) - 1 for position in range(size)]
    shifted = [first[(position + 1) % size] for position in range(size)]
    second = [NO_RANK if parent == NO_RANK else (parent - 1) % size for parent in shifted]
    return first, second


def _in_order_parent(number: int, size: int) -> int:
    """Return the parent of ``number`` in the binary tree whose in-order walk is 1, 2, ..., size; 0 for the root.

    The height of a number in the tree is the position of its lowest set bit. If the number that should be the parent is
    larger than ``size``, the nearest ancestor that is at most ``size`` takes its place.
    """
    if number == 1 << (size.bit_length() - 1):
        return 0
    while True:
        lowest = number & -number
        number = (number ^ lowest) | (lowest << 1)
        if number <= size:
            return number
