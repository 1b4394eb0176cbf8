"""The margins of a worker's examples while weights change, and the loss, gradients and curvatures."""

from __future__ import annotations

import numpy as np

from paceline.errors import DataError
from paceline.kernels.columns import column_gradients, count_entries, move_columns, summed_loss
from paceline.models.proximal.columns import ExampleColumns
from paceline.models.proximal.rules import Positions
from paceline.tables.types import Doubles, Floats


class Margins:
    """Margins of a logistic regression. All weights are initially 0. Methods take the numbers of columns."""

    def __init__(self, columns: ExampleColumns, offset: float) -> None:
        num = columns.num_examples
        self._columns = columns
        self._margins = np.full(num, offset - 1.0)
        self._residuals, self._curvatures = np.empty(num, np.float32), np.empty(num, np.float32)
        self._touched = np.zeros(num, np.uint8)
        self._moving = np.zeros(num, np.int32)
        self.move(np.array([len(columns.keys) - 1]), np.ones(1))  # the intercept affects all examples

    def begin_moving(self, columns: Positions) -> None:
        count_entries(self._columns.indptr, self._columns.rows, columns, 1, self._moving)

    def end_moving(self, columns: Positions) -> None:
        count_entries(self._columns.indptr, self._columns.rows, columns, -1, self._moving)

    def gradients(self, columns: Positions, radii: Floats) -> Floats:
        """Return for each weight the loss's gradient, and an upper bound of its second derivative: float32 [n, 2].

        The bound is valid while no weight changes by more than its radius (`radii` float32 [all columns]). Raises
        DataError if a result exceeds float32.
        """
        matrix, pairs = self._columns, np.empty((len(columns), 2), np.float32)
        column_gradients(
            matrix.indptr,
            matrix.rows,
            matrix.values,
            columns,
            radii,
            self._moving,
            matrix.weights,
            self._residuals,
            self._curvatures,
            pairs,
        )
        if not np.isfinite(pairs).all():
            raise DataError(
                f"the values of the column with key {matrix.keys[columns[~np.isfinite(pairs).all(axis=1)][0]]} are too "
                "large for this solver. Scale them to below 1e12"
            )
        return pairs

    def move(self, columns: Positions, steps: Doubles) -> None:
        matrix = self._columns
        move_columns(
            matrix.indptr,
            matrix.rows,
            matrix.values,
            columns,
            steps,
            matrix.labels,
            matrix.weights,
            self._margins,
            self._residuals,
            self._curvatures,
            self._touched,
        )

    def losses(self) -> tuple[float, int]:
        """Return the summed log loss, and the number of examples with a margin on the wrong side."""
        labels, margins = self._columns.labels, self._margins
        loss = summed_loss(labels, self._columns.weights, margins)
        return float(loss), int(np.count_nonzero(np.where(labels > 0, margins, -margins) <= 0))
