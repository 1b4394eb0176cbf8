"""Build trees of ranks with a timetable, and the schedules that send a vector in pieces along these trees.

The pieces of the vector move up the tree (reduce), down the tree (broadcast), or up and then down (all-reduce). The
timetable has, for each edge of the tree, the step in which piece 0 is sent along the edge. Piece k follows k steps
later. Each round of a rank contains the rank's actions of one step, and the rounds are in the order of steps.

The ranks cannot deadlock, even if each send waits for its receive: a send and its receive have the same step, so the
ranks at the earliest step can always finish it. The children of a rank send piece k to the rank at different steps,
because the rank adds one child's piece at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Final, TypeAlias

from paceline.collectives.schedules.base import Action, Receive, Round, Schedule, Send, Spans

NO_RANK: Final = -1

Timed: TypeAlias = tuple[int, Action]


@dataclass(frozen=True, slots=True)
class Tree:
    """A tree whose nodes are the ranks 0..p-1, with its timetable. :func:`tree_of` builds it."""

    parents: tuple[int, ...]
    children: tuple[tuple[int, ...], ...]
    """The children of each rank. The child with the largest subtree is first, because its subtree needs most time."""
    up_steps: tuple[int, ...]
    """The step at which each rank sends piece 0 to its parent."""
    down_steps: tuple[int, ...]
    """The step at which each rank receives piece 0 from its parent, if the root sends piece 0 at step 0."""
    height: int


def tree_of(parents: Sequence[int]) -> Tree:
    """Return the tree in which rank r has the parent ``parents[r]`` (``NO_RANK`` for the root).

    The timetable of the tree has the earliest possible steps.
    """
    num_ranks = len(parents)
    children: list[list[int]] = [[] for _ in parents]
    for rank, parent in enumerate(parents):
        if parent != NO_RANK:
            children[parent].append(rank)
    order = [parents.index(NO_RANK)]
    for rank in order:  # the loop appends children to the list during the iteration, so parents come first
        order.extend(children[rank])
    assert len(order) == num_ranks, "the parents do not form a tree: some ranks cannot be reached from the root"
    weights, ready = [1] * num_ranks, [0] * num_ranks
    up_steps, down_steps = [0] * num_ranks, [-1] * num_ranks
    for rank in reversed(order):
        step = -1
        for child in sorted(children[rank], key=ready.__getitem__):
            step = max(step + 1, ready[child])
            up_steps[child] = step
            weights[rank] += weights[child]
        ready[rank] = step + 1
    for rank in order[1:]:
        down_steps[rank] = down_steps[parents[rank]] + 1
    heavy_first = tuple(tuple(sorted(below, key=lambda child: -weights[child])) for below in children)
    return Tree(tuple(parents), heavy_first, tuple(up_steps), tuple(down_steps), ready[order[0]])


def passed_up(tree: Tree, rank: int, pieces: Sequence[Spans]) -> Iterator[Timed]:
    for number, spans in enumerate(pieces):
        for child in tree.children[rank]:
            yield tree.up_steps[child] + number, Receive(child, spans, reduce=True)
        if tree.parents[rank] != NO_RANK:
            yield tree.up_steps[rank] + number, Send(tree.parents[rank], spans)


def passed_down(tree: Tree, rank: int, pieces: Sequence[Spans], start: int = 0) -> Iterator[Timed]:
    for number, spans in enumerate(pieces):
        if tree.parents[rank] != NO_RANK:
            yield start + tree.down_steps[rank] + number, Receive(tree.parents[rank], spans)
        for child in tree.children[rank]:
            yield start + tree.down_steps[child] + number, Send(child, spans)


def passed_up_and_down(tree: Tree, rank: int, pieces: Sequence[Spans]) -> Iterator[Timed]:
    """Yield the steps and actions of ``rank`` for an all-reduce.

    The root sends each piece down as soon as the piece contains the data of all ranks.
    """
    yield from passed_up(tree, rank, pieces)
    yield from passed_down(tree, rank, pieces, start=tree.height)


def pipelined(
    passed: Callable[[Tree, int, Sequence[Spans]], Iterator[Timed]], trees: Sequence[Tree], rank: int, pieces: int
) -> Schedule:
    timed = (
        passed(tree, rank, [((block, block + 1),) for block in range(number * pieces, (number + 1) * pieces)])
        for number, tree in enumerate(trees)
    )
    return Schedule(len(trees) * pieces, _in_rounds(chain.from_iterable(timed)))


def _in_rounds(timed: Iterable[Timed]) -> tuple[Round, ...]:
    ordered = sorted(timed, key=lambda entry: entry[0])
    return tuple(tuple(action for _, action in group) for _, group in groupby(ordered, key=lambda entry: entry[0]))
