"""Sequential consistency on a server: the pushes of one iteration, summed in rank order and applied once.

The result is that of one process on the concatenated batches (to float rounding), and the same on every run.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from paceline.kernels.dedup import dedup, scratch_size, sum_rows
from paceline.ps.sparse_store import Floats
from paceline.ps.tables import Selection, TablePart

Push = tuple[Selection, Floats]


class IterationBuffer:
    """What live workers have pushed for iterations that are not complete.

    A worker is known by its incarnation. Its rank, which the order of summation follows from, is kept with its pushes:
    it may have ticked and left before the iteration is complete.
    """

    def __init__(self, mean: bool) -> None:
        self._mean = mean
        # iteration → worker → its rank, and its pushes with the number of their table
        self._pushes: dict[int, dict[int, tuple[int, list[tuple[int, Push]]]]] = {}

    def add(self, iteration: int, worker: int, rank: int, table: int, selection: Selection, grads: Floats) -> None:
        """Keep a push (copied) of a worker for an iteration."""
        pushes = self._pushes.setdefault(iteration, {}).setdefault(worker, (rank, []))[1]
        pushes.append((table, (selection.copy(), grads.copy())))

    def forget(self, worker: int, from_iteration: int) -> None:
        """Drop what a worker that is gone has pushed for iterations it did not finish."""
        for iteration, pushes in self._pushes.items():
            if iteration >= from_iteration:
                pushes.pop(worker, None)

    def complete(self, iteration: int, workers: Collection[int]) -> tuple[dict[int, list[Push]], float]:
        """Take an iteration's pushes: per table those of `workers`, by rank; and the factor of their sum."""
        pushes = self._pushes.pop(iteration, {})
        tables: dict[int, list[Push]] = {}
        for worker in sorted(pushes.keys() & workers, key=lambda worker: (pushes[worker][0], worker)):
            for table, push in pushes[worker][1]:
                tables.setdefault(table, []).append(push)
        return tables, 1.0 / len(workers) if self._mean and workers else 1.0


def apply_sum(part: TablePart, pushes: Sequence[Push], factor: float) -> None:
    """Sum pushes in the order given, equal keys into one gradient, and apply the update rule once."""
    selection, grads = pushes[0]
    first = (selection.start, selection.stop)
    if len(pushes) == 1:
        pass
    elif all(other.keys is None and (other.start, other.stop) == first for other, _ in pushes):
        grads = grads.copy()
        for _, more in pushes[1:]:
            grads += more
    else:
        keys = np.concatenate([part.keys_of(selection) for selection, _ in pushes])
        rows = np.concatenate([grads for _, grads in pushes])
        unique, inverse = np.empty(len(keys), np.uint64), np.empty(len(keys), np.int32)
        count = dedup(keys, np.empty(scratch_size(len(keys)), np.int32), unique, inverse)
        grads = np.empty(count * part.dim, np.float32)
        sum_rows(inverse, rows, part.dim, grads)
        selection = Selection(unique[:count])
    part.push(selection, grads if factor == 1.0 else grads * np.float32(factor))
