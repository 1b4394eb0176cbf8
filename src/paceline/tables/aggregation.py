"""Sequential consistency on a server: the pushes of one iteration, summed in rank order and applied once.

The result is that of one process on the concatenated batches (to float rounding), and the same on every run.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from paceline.kernels.dedup import dedup, scratch_size, sum_rows
from paceline.protocol.buckets import Buckets
from paceline.tables.sparse_part import Selection, TablePart
from paceline.tables.types import Floats

Push = tuple[Selection, Floats]
_LARGE_BYTES = 1 << 16


class IterationPushes(NamedTuple):
    """What was pushed in an iteration that is complete."""

    tables: dict[int, list[Push]]
    """The pushes by table."""
    tops: dict[int, float]
    """How large their sum can be, by table, before the factor."""
    factor: float
    """Of the sum."""


class IterationBuffer:
    """What live workers have pushed for iterations that are not complete.

    A worker is known by its incarnation. Its rank, which the order of summation follows from, is kept with its pushes:
    it may have ticked and left before the iteration is complete.
    """

    def __init__(self, mean: bool) -> None:
        self._mean = mean
        # iteration → worker → its rank, and its pushes with the number of their table and their greatest magnitude
        self._pushes: dict[int, dict[int, tuple[int, list[tuple[int, Push, float]]]]] = {}
        self._free: dict[int, list[Floats]] = {}  # arrays of the last iteration, by length

    @property
    def num_bytes(self) -> int:
        """How much memory the gradients take."""
        workers = (pushes for by_worker in self._pushes.values() for _, pushes in by_worker.values())
        return sum(push[1].nbytes for pushes in workers for _, push, _ in pushes)

    def copy(self, selection: Selection, grads: Floats) -> Push:
        """Return a copy of a push that may be kept: all the memory that it needs until its iteration is complete."""
        free = self._free.get(len(grads))
        if not free:
            return selection.copy(), grads.copy()
        kept = free.pop()
        kept[:] = grads
        return selection.copy(), kept

    def add(self, iteration: int, worker: int, rank: int, table: int, kept: Push, top: float) -> None:
        """Keep a push of a worker, which nobody else changes, for an iteration; `top` is its greatest magnitude."""
        self._pushes.setdefault(iteration, {}).setdefault(worker, (rank, []))[1].append((table, kept, top))

    def clear(self) -> None:
        """Drop all that workers have pushed."""
        self._pushes, self._free = {}, {}

    def recycle(self, tables: Mapping[int, Sequence[Push]]) -> None:
        """Take back an iteration's pushes, once they are applied: the next one's copies are made in their memory."""
        # Fresh pages cost more than the copy that fills them. What an iteration has not asked for again is let go.
        self._free = {}
        for pushes in tables.values():
            for _, grads in pushes:
                if grads.nbytes >= _LARGE_BYTES:
                    self._free.setdefault(len(grads), []).append(grads)

    def restrict(self, parts: Mapping[int, TablePart], buckets: Buckets) -> None:
        """Keep of all pushes what is of these buckets; `parts` has the tables' parts by number."""
        for by_worker in self._pushes.values():
            for _, pushes in by_worker.values():
                cut = [(table, parts[table].restrict(*push, buckets), top) for table, push, top in pushes]
                pushes[:] = [each for each in cut if len(each[1][1])]

    def forget(self, worker: int, from_iteration: int) -> None:
        """Drop what a worker that is gone has pushed for iterations it did not finish."""
        for iteration, pushes in self._pushes.items():
            if iteration >= from_iteration:
                pushes.pop(worker, None)

    def complete(self, iteration: int, workers: Collection[int]) -> IterationPushes:
        """Take an iteration's pushes: those of `workers`, by rank."""
        pushes = self._pushes.pop(iteration, {})
        found = IterationPushes({}, {}, 1.0 / len(workers) if self._mean and workers else 1.0)
        for worker in sorted(pushes.keys() & workers, key=lambda worker: (pushes[worker][0], worker)):
            for table, push, top in pushes[worker][1]:
                found.tables.setdefault(table, []).append(push)
                found.tops[table] = found.tops.get(table, 0.0) + top
        return found


def apply_sum(part: TablePart, pushes: Sequence[Push], factor: float) -> None:
    """Sum pushes in the order given, equal keys into one gradient, and apply the update rule once to each key."""
    for selection, grads in _alike(part, pushes):
        part.push_sum(selection, grads, factor)


def sum_up(part: TablePart, pushes: Sequence[Push], factor: float) -> list[Push]:
    """Return what :func:`apply_sum` applies, as pushes of keys or ranges that have nothing in common."""
    found: list[Push] = []
    with np.errstate(over="ignore", invalid="ignore"):  # the caller looks
        for selection, grads in _alike(part, pushes):
            total = grads[0]
            for more in grads[1:]:
                total = total + more
            found.append((selection, total if factor == 1.0 else total * np.float32(factor)))
    return found


def _alike(part: TablePart, pushes: Sequence[Push]) -> list[tuple[Selection, list[Floats]]]:
    """Return the pushes as selections that have nothing in common, each with the gradients to be summed in order."""
    ranges = _disjoint_ranges(pushes)
    if ranges is not None:
        return [(same[0][0], [grads for _, grads in same]) for same in ranges]
    if len(pushes) == 1:
        return [(pushes[0][0], [pushes[0][1]])]
    keys = np.concatenate([part.keys_of(selection) for selection, _ in pushes])
    rows = np.concatenate([grads for _, grads in pushes])
    unique, inverse = np.empty(len(keys), np.uint64), np.empty(len(keys), np.int32)
    count = dedup(keys, np.empty(scratch_size(len(keys)), np.int32), unique, inverse)
    grads = np.empty(count * part.dim, np.float32)
    sum_rows(inverse, rows, part.dim, grads)
    return [(Selection(unique[:count]), [grads])]


def _disjoint_ranges(pushes: Sequence[Push]) -> list[list[Push]] | None:
    """Return the pushes by range, in the order given, if all are of ranges that are equal or have nothing in common."""
    found: dict[tuple[int, int, int], list[Push]] = {}
    for push in pushes:
        if push[0].keys is not None:
            return None
        found.setdefault((push[0].start, push[0].stop, push[0].buckets or 0), []).append(push)
    bounds = sorted(found, key=lambda each: each[:2])
    if any(after[0] < before[1] for before, after in pairwise(bounds)):
        return None
    return [found[each] for each in bounds]
