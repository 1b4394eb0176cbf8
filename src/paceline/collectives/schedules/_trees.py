"""Trees of ranks with a timetable, and the pipelines that run on them.

A vector is cut in pieces that follow each other up the tree (reduce), down it (broadcast), or up and straight down
again (all-reduce). Each edge has a step at which its first piece passes; piece k passes k steps later, and an
action of any rank belongs to one step. A rank's rounds are its actions in the order of steps. Both ends of a message
name the same step: so nobody deadlocks, even where a send waits for its receive, because the ranks at the smallest
step can always finish it.

Two children never pass the same piece to their parent at the same step: the parent adds one at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final, TypeAlias

from paceline.collectives.schedules.base import Action, Receive, Round, Send, Spans

NO_RANK: Final = -1

Timed: TypeAlias = tuple[int, Action]
"""An action and the step that it belongs to."""


@dataclass(frozen=True, slots=True)
class Tree:
    """A tree over ranks 0..p-1; make one with :func:`tree_of`."""

    parents: tuple[int, ...]
    """The parent of each rank; ``NO_RANK`` for the root."""
    children: tuple[tuple[int, ...], ...]
    """The children of each rank, the one with most ranks below it first: it has the longest way to go."""
    up_steps: tuple[int, ...]
    """When each rank passes piece 0 up to its parent."""
    down_steps: tuple[int, ...]
    """When each rank gets piece 0 from its parent, if the root passes it on at step 0."""
    height: int
    """The step at which the root has piece 0 complete."""


def tree_of(parents: Sequence[int]) -> Tree:
    """The tree that is given by each rank's parent, ``NO_RANK`` at the root; its timetable is as early as can be."""
    num_ranks = len(parents)
    children: list[list[int]] = [[] for _ in parents]
    for rank, parent in enumerate(parents):
        if parent != NO_RANK:
            children[parent].append(rank)
    order = [parents.index(NO_RANK)]
    for rank in order:  # grows while we go: parents come before their children
        order.extend(children[rank])
    assert len(order) == num_ranks, "the parents make no tree"
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
    """What ``rank`` does to reduce the pieces to the root."""
    for number, spans in enumerate(pieces):
        for child in tree.children[rank]:
            yield tree.up_steps[child] + number, Receive(child, spans, reduce=True)
        if tree.parents[rank] != NO_RANK:
            yield tree.up_steps[rank] + number, Send(tree.parents[rank], spans)


def passed_down(tree: Tree, rank: int, pieces: Sequence[Spans], start: int = 0) -> Iterator[Timed]:
    """What ``rank`` does to broadcast the pieces from the root, which passes on the first at step ``start``."""
    for number, spans in enumerate(pieces):
        if tree.parents[rank] != NO_RANK:
            yield start + tree.down_steps[rank] + number, Receive(tree.parents[rank], spans)
        for child in tree.children[rank]:
            yield start + tree.down_steps[child] + number, Send(child, spans)


def passed_up_and_down(tree: Tree, rank: int, pieces: Sequence[Spans]) -> Iterator[Timed]:
    """What ``rank`` does to all-reduce: each piece goes down as soon as it is complete."""
    yield from passed_up(tree, rank, pieces)
    yield from passed_down(tree, rank, pieces, start=tree.height)


def in_rounds(timed: Iterable[Timed]) -> tuple[Round, ...]:
    """The actions in the order of steps, those of one step in one round; steps without action fall out."""
    ordered = sorted(timed, key=lambda entry: entry[0])
    return tuple(tuple(action for _, action in group) for _, group in groupby(ordered, key=lambda entry: entry[0]))


def cut(start: int, count: int) -> tuple[Spans, ...]:
    """``count`` pieces of one block each, from block ``start`` on."""
    return tuple(((block, block + 1),) for block in range(start, start + count))
