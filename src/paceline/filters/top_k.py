"""Send the largest rows (Aji and Heafield, EMNLP 2017; Stich et al., NeurIPS 2018)."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from paceline.filters.base import Preserves, ShareFilter
from paceline.tables.types import Floats, Keys


@dataclasses.dataclass(frozen=True)
class TopK(ShareFilter):
    """Sends the `share` of each push's rows with the largest norms. The worker adds unsent rows to later pushes."""

    name: ClassVar[str] = "top-k"
    preserves: ClassVar[Preserves] = "nothing"
    keeps_residual: ClassVar[bool] = True

    @override
    def choose(self, keys: Keys, rows: Floats, clock: int, seed: int) -> npt.NDArray[np.bool_]:
        chosen = np.zeros(len(keys), np.bool_)
        count = math.ceil(self.share * len(keys))
        norms = np.einsum("ij,ij->i", rows, rows)
        chosen[np.argpartition(norms, len(keys) - count)[len(keys) - count :]] = True
        return chosen
