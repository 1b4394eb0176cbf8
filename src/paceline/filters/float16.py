"""Half precision: IEEE 754 binary16."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np
from typing_extensions import override

from paceline.filters.base import Bytes, Preserves, ValueFilter
from paceline.tables.types import Floats

_LARGEST = np.float32(65504)


@dataclasses.dataclass(frozen=True)
class Float16(ValueFilter):
    """Two bytes per value, with 11 significant bits.

    The relative error is at most 2^-11. Below 2^-14, the error is at most 2^-25. Finite values beyond ±65504 become
    ±65504. Infinities and NaN do not change.
    """

    name: ClassVar[str] = "float16"
    preserves: ClassVar[Preserves] = "bounded"

    @override
    def num_bytes(self, count: int) -> int:
        return 2 * count

    @override
    def encode(self, values: Floats, seed: int | None, out: Bytes) -> None:
        halves = out.view(np.float16)
        halves[:] = np.clip(values, -_LARGEST, _LARGEST)
        is_infinite = np.isinf(values)
        if is_infinite.any():
            halves[is_infinite] = values[is_infinite]

    @override
    def decode(self, data: Bytes, out: Floats) -> None:
        out[:] = data.view(np.float16)
