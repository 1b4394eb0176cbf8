"""Do not send rows whose weights would stay 0 (Li et al., OSDI 2014, section 5.1: Karush-Kuhn-Tucker filter)."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from paceline.errors import UsageError
from paceline.filters.base import Preserves, RowFilter
from paceline.tables.types import Floats, Keys


@dataclasses.dataclass(frozen=True)
class KKT(RowFilter):
    """Sends a row with weights 0 only if a gradient plus its kept residual exceeds (1 - margin) l1.

    The table's update rule must have an L1 penalty, as :class:`~paceline.FTRL` has: a weight stays 0 as long as the sum
    of its gradients is below the penalty l1. The filter regards a row's weights as 0 if the worker's last pull of the
    row returned zeros and the worker has not sent the row since then. All other rows are always sent. If `margin` is at
    least 1 - 1 / workers, the sum of a row's residuals on all workers stays below l1.
    """

    margin: float = 0.1

    name: ClassVar[str] = "kkt"
    preserves: ClassVar[Preserves] = "bounded"
    keeps_residual: ClassVar[bool] = True
    needs_l1: ClassVar[bool] = True

    def __post_init__(self) -> None:
        is_number = isinstance(self.margin, (int, float)) and not isinstance(self.margin, bool)
        if not is_number or not 0 <= self.margin < 1:
            raise UsageError(f"KKT(margin={self.margin!r}): expected a number from 0 to below 1")

    @override
    def choose(self, keys: Keys, rows: Floats, clock: int, seed: int) -> npt.NDArray[np.bool_]:
        return np.ones(len(keys), np.bool_)

    @override
    def choose_zeros(self, rows: Floats, l1: float) -> npt.NDArray[np.bool_]:
        exceeding: npt.NDArray[np.bool_] = np.abs(rows).max(axis=1) > (1 - self.margin) * l1
        return exceeding
