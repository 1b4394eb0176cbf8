"""Sequential consistency on a server: the pushes of one iteration, summed in rank order and applied once.

The result is that of one process on the concatenated batches (to float rounding), and the same on every run.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..kernels.dedup import dedup, scratch_size, sum_rows
from .sparse_store import Floats
from .tables import DensePart, Selection, TablePart

Push = tuple[Selection, Floats]


class IterationBuffer:
    """What live workers have pushed for iterations that are not complete."""

    def __init__(self, mean: bool) -> None:
        self._mean = mean
        self._pushes: dict[int, dict[int, list[tuple[int, Push]]]] = {}

    def add(self, iteration: int, worker: int, table: int, selection: Selection, grads: Floats) -> None:
        """Keep a push (copied) of a worker for an iteration."""
        pushes = self._pushes.setdefault(iteration, {}).setdefault(worker, [])
        pushes.append((table, (selection.copy(), grads.copy())))

    def forget(self, worker: int, from_iteration: int) -> None:
        """Drop what a worker that is gone has pushed for iterations it did not finish."""
        for iteration, pushes in self._pushes.items():
            if iteration >= from_iteration:
                pushes.pop(worker, None)

    def complete(self, iteration: int, workers: Sequence[int]) -> dict[int, tuple[list[Push], float]]:
        """Take an iteration's pushes: per table those of `workers` in that order, and the factor of their sum."""
        pushes = self._pushes.pop(iteration, {})
        factor = 1.0 / len(workers) if self._mean and workers else 1.0
        tables: dict[int, tuple[list[Push], float]] = {}
        for worker in workers:
            for table, push in pushes.get(worker, ()):
                tables.setdefault(table, ([], factor))[0].append(push)
        return tables


def apply_sum(part: TablePart, pushes: Sequence[Push], factor: float) -> None:
    """Sum pushes in the order given, equal keys into one gradient, and apply the update rule once."""
    selection, grads = pushes[0]
    first = (selection.start, selection.stop)
    if all(other.keys is None and (other.start, other.stop) == first for other, _ in pushes):
        if len(pushes) > 1:
            grads = grads.copy()
            for _, more in pushes[1:]:
                grads += more
    else:
        keys = np.concatenate([_keys_of(part, selection) for selection, _ in pushes])
        rows = np.concatenate([grads for _, grads in pushes])
        unique, inverse = np.empty(len(keys), np.uint64), np.empty(len(keys), np.int32)
        count = dedup(keys, np.empty(scratch_size(len(keys)), np.int32), unique, inverse)
        grads = np.empty(count * part.dim, np.float32)
        sum_rows(inverse, rows, part.dim, grads)
        selection = Selection(unique[:count])
    part.push(selection, grads if factor == 1.0 else grads * np.float32(factor))


def _keys_of(part: TablePart, selection: Selection) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    if selection.keys is not None:
        return selection.keys
    assert isinstance(part, DensePart)
    return part.keys_in(selection.start, selection.stop)
