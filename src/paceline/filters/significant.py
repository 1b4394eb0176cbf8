"""Send rows with large values (Li et al., NIPS 2014, section 4)."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from paceline.filters.base import Preserves, RowFilter
from paceline.tables.settings import check_bounds
from paceline.tables.types import Floats, Keys


@dataclasses.dataclass(frozen=True)
class Significant(RowFilter):
    """Sends a row of a push in iteration t only if a value plus its residual exceeds `threshold` / (t + 1).

    This bound decreases, so training converges to the same result as without the filter.
    """

    threshold: float

    name: ClassVar[str] = "significant"
    preserves: ClassVar[Preserves] = "bounded"
    keeps_residual: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_bounds(self, threshold=(0, math.inf))

    @override
    def choose(self, keys: Keys, rows: Floats, clock: int, seed: int) -> npt.NDArray[np.bool_]:
        chosen: npt.NDArray[np.bool_] = np.abs(rows).max(axis=1) > self.threshold / (clock + 1)
        return chosen
