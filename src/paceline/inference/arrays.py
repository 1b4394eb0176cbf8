"""Convert arrays, sparse matrices and rows of pairs to batches. The number of a column is its key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.data import Batch
from paceline.errors import UsageError

_ROWS = 8192
_LARGEST = float(np.finfo(np.float32).max)


class ArrayReader:
    """Checks and converts arrays. `key_range` has the model's smallest and largest key; None before training."""

    def __init__(self, key_range: tuple[int, int] | None) -> None:
        self._key_range = key_range

    def batches(self, X: Any) -> Iterator[Batch]:
        """Yield the rows of an array, an array-like object or a SciPy sparse matrix."""
        if hasattr(X, "tocsr"):
            return self._sparse(X)
        if not hasattr(X, "__len__"):
            raise UsageError(f"X is {X!r}: expected an array, a frame, a dict of columns, rows, or paths of files")
        try:
            array = np.asarray(X)
        except (TypeError, ValueError) as error:
            raise UsageError(f"X is a {type(X).__name__}: expected an array of numbers: {error}") from None
        self._check(array, array.dtype)
        return self._dense(array)

    def _dense(self, array: npt.NDArray[Any]) -> Iterator[Batch]:
        for start in range(0, len(array), _ROWS):
            piece = array[start : start + _ROWS]
            row, column = np.nonzero(piece)
            indptr = np.zeros(len(piece) + 1, np.int64)
            np.cumsum(np.bincount(row, minlength=len(piece)), out=indptr[1:])
            yield _batch(indptr, column.astype(np.uint64), piece[row, column], start)

    def _sparse(self, matrix: Any) -> Iterator[Batch]:
        matrix = matrix.tocsr()
        self._check(matrix, matrix.dtype)
        if not matrix.has_canonical_format:
            matrix = matrix.copy()
            matrix.sum_duplicates()
        for start in range(0, matrix.shape[0], _ROWS):
            indptr = np.asarray(matrix.indptr[start : start + _ROWS + 1], np.int64)
            part = slice(int(indptr[0]), int(indptr[-1]))
            yield _batch(indptr - indptr[0], matrix.indices[part].astype(np.uint64), matrix.data[part], start)

    def _check(self, X: Any, dtype: np.dtype[Any]) -> None:
        if len(X.shape) != 2:
            hint = ". For a single example pass X.reshape(1, -1)" if len(X.shape) == 1 else ""
            raise UsageError(f"X has shape {X.shape}: expected two dimensions, examples by columns{hint}")
        if dtype.kind not in "fiub":
            raise UsageError(f"X has dtype {dtype}: expected numbers")
        if self._key_range is not None and self._key_range[1] >= X.shape[1]:
            first, last = self._key_range
            hint = ". The number of a column is its key"
            if first >= 1 and last == X.shape[1]:
                hint = ". The keys start at 1, so load the data with a column 0 (load_svmlight_file: zero_based=True)"
            raise UsageError(
                f"X has {X.shape[1]:,} columns, 0 to {X.shape[1] - 1:,}, but the model has keys from {first:,} to "
                f"{last:,}{hint}"
            )

    def row_batches(self, rows: Sequence[Mapping[Any, Any]]) -> Iterator[Batch]:
        """Yield the rows of dicts that map keys to values. A key may be text, because JSON has only text keys."""
        indptr = np.cumsum([0, *map(len, rows)], dtype=np.int64)
        keys: list[Any] = [*chain.from_iterable(rows)]
        values: list[Any] = [*chain.from_iterable(row.values() for row in rows)]
        if not {*map(type, keys)} <= {int} or not {*map(type, values)} <= {int, float} or min(keys, default=0) < 0:
            keys = [_key(key, number) for number, row in enumerate(rows) for key in row]
            values = [_number(value, key, number) for number, row in enumerate(rows) for key, value in row.items()]
        try:
            yield _batch(indptr, np.array(keys, np.uint64), np.array(values, np.float64), 0)
        except OverflowError:
            raise UsageError(f"the rows hold the key {max(keys)}: expected whole numbers from 0 to 2^64 - 1") from None


def _key(key: Any, row: int) -> int:
    try:
        found = int(key)
        if isinstance(key, bool | float) or not 0 <= found < 2**64:
            raise ValueError
    except (TypeError, ValueError):
        raise UsageError(f"row {row} has the key {key!r}: expected a whole number from 0 to 2^64 - 1") from None
    return found


def _number(value: Any, key: Any, row: int) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise UsageError(f"row {row}, key {key}: the value is {value!r}, expected a number")
    return float(value)


def _batch(
    indptr: npt.NDArray[np.int64], keys: npt.NDArray[np.uint64], values: npt.NDArray[Any], first_row: int
) -> Batch:
    """Return a batch without missing values (NaN). All labels are 0. Raises UsageError for values beyond float32."""
    if values.dtype.kind == "f" and (missing := np.isnan(values)).any():
        indptr = indptr - np.append(0, np.cumsum(missing))[indptr]
        keys, values = keys[~missing], values[~missing]
    good = np.abs(values) <= _LARGEST if values.dtype.kind == "f" else np.ones(0, np.bool_)
    if not good.all():
        at = int(np.argmin(good))
        row = int(np.searchsorted(indptr, at, side="right")) - 1 + first_row
        raise UsageError(
            f"X has {values[at]} in row {row:,}, column {keys[at]:,}: expected numbers within the range of float32, or "
            "NaN for a missing value"
        )
    return Batch(np.zeros(len(indptr) - 1, np.float32), indptr, keys, values.astype(np.float32))
