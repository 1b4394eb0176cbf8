"""A worker's examples by column. The worker collects them while reading and sorts them once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from paceline.data import Batch
from paceline.data.key_scaling import distinct_keys
from paceline.environment import available_memory
from paceline.errors import DataError
from paceline.kernels.columns import sort_entries
from paceline.models.base import BIAS_KEY
from paceline.models.proximal.schedule import places_of
from paceline.tables.types import Floats, Keys

_SORT_BYTES: Final = 40
"""Bytes per value that sorting needs: column numbers, hash table, sorted rows and values."""
_SPARE_BYTES: Final = 64 << 20
_MOST_ROWS: Final = 2**31 - 1


@dataclass(frozen=True, eq=False)
class ExampleColumns:
    """Examples in compressed sparse columns, in the order of :func:`~.schedule.places_of`; the intercept is last.

    `keys` uint64 [columns]; `places` uint64 [columns - 1]; `indptr` int64 [columns + 1]; `rows` int32 [nnz]; `values`
    float32 [nnz], or empty if all are 1; `labels` float32 [examples], 0 or 1; `weights` float32 [examples], or empty if
    all are 1. No value is 0. Only the intercept's column may be empty.
    """

    keys: Keys
    places: Keys
    indptr: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int32]
    values: Floats
    labels: Floats
    weights: Floats

    @property
    def num_examples(self) -> int:
        return len(self.labels)

    @property
    def num_values(self) -> int:
        return int(self.indptr[-2])

    def magnitudes(self) -> npt.NDArray[np.float64]:
        if not len(self.values):
            return np.diff(self.indptr).astype(np.float64)
        sums, is_full = np.zeros(len(self.keys)), np.diff(self.indptr) > 0
        if is_full.any():  # no differences of running sums, which lose all digits after a large column
            sums[is_full] = np.add.reduceat(np.abs(self.values), self.indptr[:-1][is_full], dtype=np.float64)
        return sums


class ColumnCollector:
    """Collects examples and sorts them by column. `available_bytes` limits the memory; None: the free memory."""

    def __init__(self, available_bytes: int | None = None) -> None:
        self._batches: list[Batch] = []
        self._available_bytes = available_bytes
        self._num_values = self._num_rows = 0

    def add(self, batch: Batch) -> None:
        """Store a copy of examples. Raises DataError if the memory is too small."""
        self._num_values += len(batch.keys)
        self._num_rows += batch.num_examples
        available = self._available_bytes
        if available is None:
            available = available_memory()
        wanted = len(batch.keys) * 12 + (self._num_values + self._num_rows) * _SORT_BYTES
        if wanted > available - (_SPARE_BYTES if self._available_bytes is None else 0) or self._num_rows > _MOST_ROWS:
            raise DataError(
                f"{self._num_rows:,} examples with {self._num_values:,} values do not fit into this worker's memory by "
                f"column: {wanted >> 20:,} MiB more are needed and {available >> 20:,} MiB are free. Use more hosts, "
                "or leave --solver out to read the data again in every pass"
            )
        self._batches.append(batch.copy())

    def finish(self) -> ExampleColumns:
        batch, self._batches = Batch.concatenate(self._batches), []
        keys, numbers = distinct_keys(batch.keys)
        keys = keys.copy()  # a copy, because the underlying array is as large as all values
        values = np.empty(0, np.float32) if batch.values is None else batch.values
        counts = np.bincount(numbers if not len(values) else numbers[values != 0], minlength=len(keys))
        places = places_of(keys)
        order = np.argsort(places)
        order = order[counts[order] > 0]
        starts = np.zeros(len(order) + 2, np.int64)
        np.cumsum(counts[order], out=starts[1:-1])
        starts[-1] = starts[-2] + batch.num_examples
        ends = np.zeros(max(len(keys), 1), np.int64)
        ends[order] = starts[:-2]
        rows = np.empty(int(starts[-1]), np.int32)
        sorted_values = np.ones(len(rows) if len(values) else 0, np.float32)
        sort_entries(numbers, batch.indptr, values, ends, rows, sorted_values)
        rows[starts[-2] :] = np.arange(batch.num_examples)
        return ExampleColumns(
            keys=np.append(keys[order], BIAS_KEY),
            places=places[order],
            indptr=starts,
            rows=rows,
            values=sorted_values,
            labels=batch.labels,
            weights=_weights_of(batch),
        )


def _weights_of(batch: Batch) -> Floats:
    weights = batch.weights
    return np.empty(0, np.float32) if weights is None or bool((weights == 1).all()) else weights
