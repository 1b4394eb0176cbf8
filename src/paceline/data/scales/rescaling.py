"""Scales for the numbers of columns of rows that were read without them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.data.batch import Batch
from paceline.data.scales.scaling import Scale
from paceline.kernels.hashing import name_seed


class ColumnRescaling:
    """Scales of the numeric columns `names`, from whose numbers `centres` were subtracted on reading."""

    def __init__(self, names: Sequence[str], centres: Sequence[float], scales: Sequence[Scale]) -> None:
        from paceline.kernels.features.scaling import scale_columns

        self._scale_columns = scale_columns
        self._seeds = np.array([name_seed(name) for name in names], np.uint64)
        self._centres = np.array(centres, np.float64)
        self._scales = np.array([scale.as_array() for scale in scales]).T.copy()

    def apply(self, batch: Batch) -> None:
        """Scale the values of the batch in place."""
        if len(self._seeds) and batch.values is not None:
            self._scale_columns(batch.indptr, batch.keys, batch.values, self._seeds, self._centres, self._scales)
