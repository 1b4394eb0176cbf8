"""Keep the unsent parts of a worker's pushes to a table, to send them later (error feedback)."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from paceline.filters.base import RowFilter
from paceline.filters.calls import rows_chosen_by, scale_of, zeros_chosen_by
from paceline.tables.rules import SGD
from paceline.tables.sparse_store import SparseStore
from paceline.tables.types import Floats, Keys

_MAX_RANGES: Final = 1024
"""Errors are kept for at most this number of ranges of a dense table. Programs push the same ranges repeatedly."""


class HeldRows:
    """Rows of `dim` values, initially zero, to add to later pushes of the same rows."""

    def __init__(self, dim: int) -> None:
        self._dim = dim
        self._store = SparseStore(dim=dim, rule=SGD(lr=1.0))

    def read(self, keys: Keys) -> Floats:
        rows = np.empty((len(keys), self._dim), np.float32)
        self._store.pull(keys, rows.reshape(-1))
        return rows

    def add(self, keys: Keys, change: Floats) -> None:
        self._store.push(keys, -change.reshape(-1))  # negative, because the store subtracts pushes


class ZeroRows:
    """Records the rows that were 0 in the last pull and have not been sent since then."""

    def __init__(self) -> None:
        self._marks = HeldRows(1)

    def read(self, keys: Keys) -> npt.NDArray[np.bool_]:
        are_zero: npt.NDArray[np.bool_] = self._marks.read(keys)[:, 0] > 0
        return are_zero

    def record_pulled(self, keys: Keys, rows: Floats) -> None:
        """Record for distinct rows whether their pulled values (float32 [n, dim]) are all 0."""
        change = np.logical_not(rows.any(axis=1)).astype(np.float32) - self._marks.read(keys)[:, 0]
        changed = change != 0
        self._marks.add(keys[changed], change[changed])

    def record_sent(self, keys: Keys) -> None:
        self._marks.add(keys, np.full(len(keys), -1, np.float32))


class RowSelection:
    """Applies a row filter to the pushes of one table with rows of `dim` values."""

    def __init__(self, chosen_by: RowFilter, dim: int) -> None:
        self._filter = chosen_by
        self._dim = dim
        self._held = HeldRows(dim) if chosen_by.keeps_residual else None
        self._zeros = ZeroRows() if chosen_by.needs_l1 else None

    def record_pulled(self, keys: Keys, values: Floats) -> None:
        if self._zeros is not None:
            self._zeros.record_pulled(keys, values.reshape(-1, self._dim))

    def choose(self, keys: Keys, values: Floats, clock: int, seed: int, l1: float = 0.0) -> tuple[Keys, Floats]:
        """Return the keys and values (float32 [n * dim]) to send; keep the other rows. `l1` is the rule's penalty."""
        if not len(keys):
            return keys, values
        rows = given = values.reshape(-1, self._dim)
        if self._held is None:
            chosen = self._choose(keys, rows, clock, seed, l1)
        else:
            held = self._held.read(keys)
            with quiet():
                rows = given + held
            chosen = self._choose(keys, rows, clock, seed, l1)
            self._held.add(keys, np.where(chosen[:, None], -held, given))
        rows, scale = rows[chosen], scale_of(self._filter)
        if scale != 1.0:
            with quiet():
                rows *= np.float32(scale)
        return keys[chosen], rows.reshape(-1)

    def _choose(self, keys: Keys, rows: Floats, clock: int, seed: int, l1: float) -> npt.NDArray[np.bool_]:
        """Return the rows to send. They include all rows with non-finite values, which servers reject or count."""
        chosen = rows_chosen_by(self._filter, keys, rows, clock, seed)
        if self._zeros is not None:
            are_zero = self._zeros.read(keys)
            chosen = chosen.copy()
            chosen[are_zero] = zeros_chosen_by(self._filter, rows[are_zero], l1)
        is_finite = np.isfinite(rows)
        if not is_finite.all():
            chosen = chosen | ~is_finite.all(axis=1)
        if self._zeros is not None:
            self._zeros.record_sent(keys[are_zero & chosen])
        return chosen

    def held_back(self, keys: Keys) -> Floats:
        return np.zeros((len(keys), self._dim), np.float32) if self._held is None else self._held.read(keys)


class RowErrors:
    """A value filter's rounding errors in rows pushed to a sparse table, to add to the next pushes of these rows."""

    def __init__(self, dim: int) -> None:
        self._rows = HeldRows(dim)

    def read(self, keys: Keys, num_values: int, *, is_range: bool) -> Floats:
        return self._rows.read(keys).reshape(-1)

    def keep(self, keys: Keys, before: Floats, after: Floats, *, is_range: bool) -> None:
        """Replace the errors `before` by `after`; values that are not finite become 0."""
        self._rows.add(keys, forget_non_finite(after) - before)


class ElementErrors:
    """A value filter's rounding errors in one server's part of a dense table, of single elements and of ranges.

    A range is identified by its bounds (uint64 [2]), even if the server has only a part of the range. Ranges with other
    bounds have separate errors.
    """

    def __init__(self) -> None:
        self._elements = np.zeros(0, np.float32)
        self._ranges: dict[bytes, Floats] = {}

    def read(self, keys: Keys, num_values: int, *, is_range: bool) -> Floats:
        if is_range:
            errors = self._ranges.pop(keys.tobytes(), None)
            return np.zeros(num_values, np.float32) if errors is None or len(errors) != num_values else errors
        missing = int(keys.max(initial=0)) + 1 - len(self._elements)
        if missing > 0:
            self._elements = np.pad(self._elements, (0, missing))
        return self._elements[keys]

    def keep(self, keys: Keys, before: Floats, after: Floats, *, is_range: bool) -> None:
        if is_range:
            self._ranges[keys.tobytes()] = forget_non_finite(after)
            while len(self._ranges) > _MAX_RANGES:
                del self._ranges[next(iter(self._ranges))]
        else:
            self._elements[keys] = forget_non_finite(after)

    def forget_ranges(self) -> None:
        """Drop the rounding errors of ranges, because the server's part of each range may have changed."""
        self._ranges.clear()


def forget_non_finite(errors: Floats) -> Floats:
    """Set infinities and NaN in `errors` to 0, because they would recur forever. Return the same array."""
    is_finite = np.isfinite(errors)
    if not is_finite.all():
        errors[~is_finite] = 0
    return errors


def quiet() -> np.errstate:
    """Return a context without NumPy's warnings. Servers, or the user of a loss scale, detect non-finite values."""
    return np.errstate(over="ignore", invalid="ignore")
