"""One embedding's way to its rows: prefetched or fetched, and the gradients on their way back."""

from __future__ import annotations

import numpy as np
import torch

from paceline.tables.types import Floats
from paceline.torch.embeddings.distinct import DistinctKeys, keys_of
from paceline.torch.embeddings.gradients import RowGradients
from paceline.torch.embeddings.prefetching import Prefetcher
from paceline.torch.embeddings.tables import RowTable


class LastKeys:
    """The distinct keys of the last lookup: several embeddings are often asked for the same ones."""

    def __init__(self) -> None:
        self._last: DistinctKeys | None = None

    def distinct(self, keys: torch.Tensor) -> DistinctKeys:
        """Return the distinct ones of a tensor of keys."""
        flat, last = keys_of(keys), self._last
        if last is None or not np.array_equal(last.flat, flat):
            last = self._last = DistinctKeys(flat)
        return last


class RowSource:
    """Where one embedding's rows come from, and what backward has found for them."""

    def __init__(
        self, table: RowTable, gradients: RowGradients, last_keys: LastKeys, prefetcher: Prefetcher | None
    ) -> None:
        self.table = table
        self.gradients = gradients
        self._last_keys = last_keys
        self._prefetcher = prefetcher

    def lookup(self, keys: torch.Tensor) -> tuple[DistinctKeys, Floats]:
        """Return the distinct keys of a lookup, and their rows, float32 [u, dim]."""
        if self._prefetcher is not None:
            found = self._prefetcher.find(self, keys, keys_of(keys))
            if found is not None:
                return found
        distinct = self._last_keys.distinct(keys)
        return distinct, self.table.fetch(distinct.unique).result()
