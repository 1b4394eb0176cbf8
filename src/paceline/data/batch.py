"""Batches of sparse examples, and the conversion of large batches to minibatches."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.kernels.hashing import field_of


@dataclass(slots=True, eq=False)
class Batch:
    """Labelled sparse examples in compressed rows.

    `labels` float32 [n]: 0 or 1, unless the data set reads labels as numbers. `indptr` int64 [n+1]: row i has the pairs
    ``indptr[i]`` to ``indptr[i+1]``, and ``indptr[0]`` is 0. `keys` uint64 [pairs]. `values` float32 [pairs]; None if
    all are 1. `weights` float32 [n]; None if all are 1. `fields` uint32 [pairs]: the hash of each pair's field name
    (:func:`paceline.kernels.hashing.field_of`). None if there are no fields, or if a pair's position in its row
    determines its field.
    """

    labels: npt.NDArray[np.float32]
    indptr: npt.NDArray[np.int64]
    keys: npt.NDArray[np.uint64]
    values: npt.NDArray[np.float32] | None = None
    weights: npt.NDArray[np.float32] | None = None
    fields: npt.NDArray[np.uint32] | None = None

    @property
    def num_examples(self) -> int:
        """The number of rows."""
        return len(self.labels)

    def slice(self, start: int, stop: int) -> Batch:
        """Return rows `start` to `stop` (excluded) as views of labels, keys and values."""
        indptr = self.indptr[start : stop + 1]
        first, last = int(indptr[0]), int(indptr[-1])
        return self._part(slice(start, stop), indptr - first if first else indptr, slice(first, last))

    def take(self, rows: npt.NDArray[np.int64]) -> Batch:
        """Return copies of these rows, in this order."""
        return self._part(rows, *pairs_of(self.indptr, rows))

    def _part(self, rows: Any, indptr: npt.NDArray[np.int64], pairs: Any) -> Batch:
        return Batch(
            self.labels[rows],
            indptr,
            self.keys[pairs],
            None if self.values is None else self.values[pairs],
            None if self.weights is None else self.weights[rows],
            None if self.fields is None else self.fields[pairs],
        )

    def copy(self) -> Batch:
        """Return the rows in new arrays."""
        return copy.deepcopy(self)

    @staticmethod
    def concatenate(batches: Sequence[Batch]) -> Batch:
        """Return the rows of all `batches` in order; an empty batch if there are no `batches`."""
        if len(batches) == 1:
            return batches[0]
        if not batches:
            return Batch(np.empty(0, np.float32), np.zeros(1, np.int64), np.empty(0, np.uint64))
        indptr = np.empty(sum(batch.num_examples for batch in batches) + 1, np.int64)
        indptr[0] = row = pair = 0
        for batch in batches:
            np.add(batch.indptr[1:], pair, out=indptr[row + 1 : row + 1 + batch.num_examples])
            row += batch.num_examples
            pair += len(batch.keys)
        values = None
        if any(batch.values is not None for batch in batches):
            values = np.concatenate([_or_ones(batch.values, len(batch.keys)) for batch in batches])
        weights = None
        if any(batch.weights is not None for batch in batches):
            weights = np.concatenate([_or_ones(batch.weights, batch.num_examples) for batch in batches])
        fields = [batch.fields for batch in batches if batch.fields is not None]
        assert len(fields) in (0, sum(len(batch.keys) > 0 for batch in batches)) or sum(map(len, fields)) == pair
        return Batch(
            np.concatenate([batch.labels for batch in batches]),
            indptr,
            np.concatenate([batch.keys for batch in batches]),
            values,
            weights,
            np.concatenate(fields) if fields else None,
        )


def pairs_of(
    indptr: npt.NDArray[np.int64], rows: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the `indptr` (int64 [rows + 1]) of the selected rows, and the positions of their pairs."""
    starts = indptr[rows]
    sizes = indptr[rows + 1] - starts
    chosen = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(sizes, out=chosen[1:])
    return chosen, np.repeat(starts - chosen[:-1], sizes) + np.arange(chosen[-1])


def _or_ones(array: npt.NDArray[np.float32] | None, count: int) -> npt.NDArray[np.float32]:
    return np.ones(count, np.float32) if array is None else array


def rebatch(blocks: Iterable[Batch], batch_size: int) -> Iterator[Batch]:
    """Turn `blocks` into batches of `batch_size` rows (the last may be smaller). Copies only rows at blocks' ends."""
    pending: list[Batch] = []
    missing = batch_size
    for block in blocks:
        start = 0
        if pending:
            start = min(missing, block.num_examples)
            pending.append(block.slice(0, start))
            missing -= start
            if missing:
                continue
            yield Batch.concatenate(pending)
            pending, missing = [], batch_size
        aligned = start + (block.num_examples - start) // batch_size * batch_size
        for first in range(start, aligned, batch_size):
            yield block.slice(first, first + batch_size)
        if aligned < block.num_examples:
            pending, missing = (
                [block.slice(aligned, block.num_examples)],
                batch_size - (block.num_examples - aligned),
            )
    if pending:
        yield Batch.concatenate(pending)


_ROW_BYTES, _PAIR_BYTES = 16, 12  # a row has a label, a weight and an `indptr` element; a pair has a key and a value


def cut_by_bytes(batches: Iterable[Batch], num_bytes: int, multiple: int = 1) -> Iterator[Batch]:
    """Turn `batches` into batches of at most `num_bytes`. A larger row is a batch of its own.

    If more than `multiple` rows fit, the number of rows is a multiple of `multiple`, except in the last batch.
    """
    pending: list[Batch] = []
    left = num_bytes
    for batch in batches:
        sizes = _num_bytes(batch.indptr)
        start = 0
        while start < batch.num_examples:
            stop = int(np.searchsorted(sizes, sizes[start] + left, side="right")) - 1
            if stop == start and not pending:
                stop += 1  # this row alone is larger than `num_bytes`
            if stop > start:
                pending.append(batch.slice(start, stop))
                left -= int(sizes[stop] - sizes[start])
            if stop < batch.num_examples or left <= 0:
                held = Batch.concatenate(pending)
                num_held = held.num_examples // multiple * multiple or held.num_examples
                yield held.slice(0, num_held)
                pending, left = [], num_bytes
                if num_held < held.num_examples:
                    pending.append(held.slice(num_held, held.num_examples))
                    left -= int(_num_bytes(pending[0].indptr)[-1])
            start = stop
    if pending:
        yield Batch.concatenate(pending)


def _num_bytes(indptr: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the size in bytes of all rows before each row: int64 [rows + 1]."""
    return _ROW_BYTES * np.arange(len(indptr)) + _PAIR_BYTES * indptr


def fields_by_place(batch: Batch, categorical: Sequence[str]) -> npt.NDArray[np.uint32]:
    """Return the fields of the pairs. A row has a pair per categorical column, then a pair per number."""
    at = np.arange(len(batch.keys)) - np.repeat(batch.indptr[:-1], np.diff(batch.indptr))
    of_categories = np.array([*map(field_of, categorical), 0], np.uint32)
    found = of_categories[np.minimum(at, len(categorical))]
    return np.where(at < len(categorical), found, batch.keys.astype(np.uint32))


def insert_lists(
    batch: Batch,
    field: int | npt.NDArray[np.uint32],
    lengths: npt.NDArray[np.int64],
    keys: npt.NDArray[np.uint64],
    num_numbers: npt.NDArray[np.int64],
) -> Batch:
    """Insert `lengths[i]` of the `keys`, with value 1, into row i, before its last `num_numbers[i]` pairs.

    `field` is the field of all keys, or an array with one field per key.
    """
    indptr = batch.indptr + np.concatenate([[0], np.cumsum(lengths)])
    ends = np.repeat(batch.indptr[1:] - num_numbers, lengths)  # the insertion point of each key
    values = None if batch.values is None else np.insert(batch.values, ends, np.float32(1))
    fields = None if batch.fields is None else np.insert(batch.fields, ends, field)
    return Batch(batch.labels, indptr, np.insert(batch.keys, ends, keys), values, batch.weights, fields)
