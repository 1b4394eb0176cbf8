"""What a worker holds back of its pushes to a table, by row: the state of one :class:`RowFilter`."""

from __future__ import annotations

import numpy as np

from paceline.filters.base import RowFilter
from paceline.tables.rules import SGD
from paceline.tables.sparse_store import SparseStore
from paceline.tables.types import Floats, Keys


class RowSelection:
    """Applies a filter to the pushes of one table of rows of `dim` values."""

    def __init__(self, chosen_by: RowFilter, dim: int) -> None:
        self._filter = chosen_by
        self._dim = dim
        # A push of −x to it adds x, since its rule is w ← w − x.
        self._rest = SparseStore(dim=dim, rule=SGD(lr=1.0)) if chosen_by.keeps_rest else None

    def choose(self, keys: Keys, values: Floats, clock: int, seed: int) -> tuple[Keys, Floats]:
        """Return the keys and values (float32 [n * dim]) that go out; hold back the others."""
        if not len(keys):
            return keys, values
        rows = given = values.reshape(-1, self._dim)
        if self._rest is None:
            chosen = self._filter.choose(keys, rows, clock, seed)
        else:
            held = self.held_back(keys)
            rows = given + held
            chosen = self._filter.choose(keys, rows, clock, seed)
            self._rest.push(keys, np.where(chosen[:, None], held, -given).reshape(-1))
        rows, scale = rows[chosen], self._filter.rescale()
        if scale != 1.0:
            rows *= np.float32(scale)
        return keys[chosen], rows.reshape(-1)

    def held_back(self, keys: Keys) -> Floats:
        """Return what is held back of these rows, float32 [n, dim]."""
        rows = np.zeros((len(keys), self._dim), np.float32)
        if self._rest is not None:
            self._rest.pull(keys, rows.reshape(-1))
        return rows
