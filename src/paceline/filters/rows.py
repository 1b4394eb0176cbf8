"""What a worker holds back of its pushes to a table, by row (error feedback)."""

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
"""So many ranges of a dense table have errors kept; programs push the same ones again and again."""


class HeldRows:
    """Rows of `dim` values to be added to later pushes of the same rows; those that were never held back are zero."""

    def __init__(self, dim: int) -> None:
        self._dim = dim
        self._store = SparseStore(dim=dim, rule=SGD(lr=1.0))

    def read(self, keys: Keys) -> Floats:
        """Return what is held back of these rows, float32 [n, dim]."""
        rows = np.empty((len(keys), self._dim), np.float32)
        self._store.pull(keys, rows.reshape(-1))
        return rows

    def add(self, keys: Keys, change: Floats) -> None:
        """Hold back so much more of these rows."""
        self._store.push(keys, -change.reshape(-1))  # since its rule is w ← w − x


class ZeroRows:
    """Rows that were 0 when they were pulled last, and have not been sent since."""

    def __init__(self) -> None:
        self._marks = HeldRows(1)

    def read(self, keys: Keys) -> npt.NDArray[np.bool_]:
        """Return which of these rows they are, bool [n]."""
        are_zero: npt.NDArray[np.bool_] = self._marks.read(keys)[:, 0] > 0
        return are_zero

    def note_pulled(self, keys: Keys, rows: Floats) -> None:
        """Take note of what distinct rows were (float32 [n, dim])."""
        change = np.logical_not(rows.any(axis=1)).astype(np.float32) - self._marks.read(keys)[:, 0]
        changed = change != 0
        self._marks.add(keys[changed], change[changed])

    def note_sent(self, keys: Keys) -> None:
        """Take note that rows are sent, which :meth:`read` has returned."""
        self._marks.add(keys, np.full(len(keys), -1, np.float32))


class RowSelection:
    """Applies a filter to the pushes of one table of rows of `dim` values."""

    def __init__(self, chosen_by: RowFilter, dim: int) -> None:
        self._filter = chosen_by
        self._dim = dim
        self._held = HeldRows(dim) if chosen_by.keeps_rest else None
        self._zeros = ZeroRows() if chosen_by.needs_l1 else None

    def note_pulled(self, keys: Keys, values: Floats) -> None:
        """Take note of what this worker has pulled of distinct rows (float32 [n * dim])."""
        if self._zeros is not None:
            self._zeros.note_pulled(keys, values.reshape(-1, self._dim))

    def choose(self, keys: Keys, values: Floats, clock: int, seed: int, l1: float = 0.0) -> tuple[Keys, Floats]:
        """Return the keys and values (float32 [n * dim]) that go out; hold back the others.

        `l1` is the penalty of the table's rule.
        """
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
        """Return which rows go out: rows that are not finite always, for servers to refuse or to count."""
        chosen = rows_chosen_by(self._filter, keys, rows, clock, seed)
        if self._zeros is not None:
            are_zero = self._zeros.read(keys)
            chosen = chosen.copy()
            chosen[are_zero] = zeros_chosen_by(self._filter, rows[are_zero], l1)
        is_finite = np.isfinite(rows)
        if not is_finite.all():
            chosen = chosen | ~is_finite.all(axis=1)
        if self._zeros is not None:
            self._zeros.note_sent(keys[are_zero & chosen])
        return chosen

    def held_back(self, keys: Keys) -> Floats:
        """Return what is held back of these rows, float32 [n, dim]."""
        return np.zeros((len(keys), self._dim), np.float32) if self._held is None else self._held.read(keys)


class RowErrors:
    """What a filter of values has taken of the rows pushed to a sparse table, to be added to their next pushes."""

    def __init__(self, dim: int) -> None:
        self._rows = HeldRows(dim)

    def read(self, keys: Keys, num_values: int, *, is_range: bool) -> Floats:
        """Return what is to be added to a push of these keys (float32 [num_values])."""
        return self._rows.read(keys).reshape(-1)

    def keep(self, keys: Keys, before: Floats, after: Floats, *, is_range: bool) -> None:
        """Have `after` be read of them next time, in place of `before`; what is not finite is set to 0."""
        self._rows.add(keys, forget_non_finite(after) - before)


class ElementErrors:
    """As :class:`RowErrors`, for what one server has of a dense table: its elements by key, and ranges of them.

    A range is known by its bounds (uint64 [2]), of which the server may have a part: other bounds are another range.
    """

    def __init__(self) -> None:
        self._elements = np.zeros(0, np.float32)
        self._ranges: dict[bytes, Floats] = {}

    def read(self, keys: Keys, num_values: int, *, is_range: bool) -> Floats:
        """Return what is to be added to a push of these keys, or bounds (float32 [num_values])."""
        if is_range:
            kept = self._ranges.pop(keys.tobytes(), None)
            return np.zeros(num_values, np.float32) if kept is None or len(kept) != num_values else kept
        missing = int(keys.max(initial=0)) + 1 - len(self._elements)
        if missing > 0:
            self._elements = np.pad(self._elements, (0, missing))
        return self._elements[keys]

    def keep(self, keys: Keys, before: Floats, after: Floats, *, is_range: bool) -> None:
        """Have `after` be read of them next time, in place of `before`; what is not finite is set to 0."""
        if is_range:
            self._ranges[keys.tobytes()] = forget_non_finite(after)
            while len(self._ranges) > _MAX_RANGES:
                del self._ranges[next(iter(self._ranges))]
        else:
            self._elements[keys] = forget_non_finite(after)

    def forget_ranges(self) -> None:
        """Forget the ranges: the server has other parts of them now."""
        self._ranges.clear()


def forget_non_finite(errors: Floats) -> Floats:
    """Set infinities and NaN among errors to 0, for they would come back for ever; return the same array."""
    is_finite = np.isfinite(errors)
    if not is_finite.all():
        errors[~is_finite] = 0
    return errors


def quiet() -> np.errstate:
    """Return a context without NumPy's warnings of what is not finite, which others tell: servers, or a loss scale."""
    return np.errstate(over="ignore", invalid="ignore")
