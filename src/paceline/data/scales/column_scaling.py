"""Scales for the numeric columns of rows that were read without them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.data.batch import Batch
from paceline.data.scales.bins import ColumnBins
from paceline.data.scales.scaling import Scale
from paceline.kernels.hashing import name_seed


class ColumnScaling:
    """Scales, and bins, of the numeric columns `names`, whose numbers were read less `centres`."""

    def __init__(
        self, names: Sequence[str], centres: Sequence[float], scales: Sequence[Scale], bins: ColumnBins | None = None
    ) -> None:
        from paceline.kernels.features.scaling import scale_columns

        self._scale_columns = scale_columns
        self._seeds = np.array([name_seed(name) for name in names], np.uint64)
        self._centres = np.array(centres, np.float64)
        self._scales = np.array([scale.as_array() for scale in scales]).T.copy()
        self._bins = bins

    def apply(self, batch: Batch) -> Batch:
        return self.apply_in_place(batch.copy())

    def apply_in_place(self, batch: Batch) -> Batch:
        """Scale the values of the batch, and return the rows with bins in place of numbers."""
        if batch.values is None or not len(self._seeds):
            return batch
        self._scale_columns(batch.indptr, batch.keys, batch.values, self._seeds, self._centres, self._scales)
        return batch if self._bins is None else self._bins.apply(batch)
