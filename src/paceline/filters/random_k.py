"""Send random rows, with error feedback (Stich et al., NeurIPS 2018)."""

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
class RandomK(ShareFilter):
    """Sends each row of a push with probability `share`. The worker adds unsent rows to later pushes."""

    name: ClassVar[str] = "random-k"
    preserves: ClassVar[Preserves] = "nothing"
    keeps_residual: ClassVar[bool] = True

    @override
    def choose(self, keys: Keys, rows: Floats, clock: int, seed: int) -> npt.NDArray[np.bool_]:
        return chances(keys, seed) < self.share
