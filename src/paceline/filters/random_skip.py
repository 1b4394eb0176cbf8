"""Send random rows, rescaled (Li et al., NIPS 2014, section 4)."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from paceline.filters.base import Preserves, ShareFilter
from paceline.filters.chance import chances
from paceline.tables.types import Floats, Keys


@dataclasses.dataclass(frozen=True)
class RandomSkip(ShareFilter):
    """Sends each row of a push with probability `share`. Divides sent rows by `share` to keep the mean. Stateless."""

    name: ClassVar[str] = "random-skip"
    preserves: ClassVar[Preserves] = "unbiased"
    keeps_residual: ClassVar[bool] = False

    @override
    def choose(self, keys: Keys, rows: Floats, clock: int, seed: int) -> npt.NDArray[np.bool_]:
        return chances(keys, seed) < self.share

    @override
    def rescale(self) -> float:
        return 1.0 / self.share
