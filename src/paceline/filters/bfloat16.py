"""bfloat16: the upper 16 bits of a float32."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np
from typing_extensions import override

from paceline.filters.base import Bytes, Preserves, ValueFilter
from paceline.tables.types import Floats

_LARGEST, _NAN = np.uint32(0x7F7F), np.uint32(0x7FC0)
_SIGN, _INFINITY = np.uint32(0x80000000), np.uint32(0x7F800000)
_HALF, _ONE, _SHIFT = np.uint32(0x7FFF), np.uint32(1), np.uint32(16)


@dataclasses.dataclass(frozen=True)
class BFloat16(ValueFilter):
    """Two bytes per value: the range of float32, with 8 significant bits. The relative error is at most 2^-8."""

    name: ClassVar[str] = "bfloat16"
    preserves: ClassVar[Preserves] = "bounded"

    @override
    def num_bytes(self, count: int) -> int:
        return 2 * count

    @override
    def encode(self, values: Floats, seed: int | None, out: Bytes) -> None:
        bits = values.view(np.uint32)
        magnitude = bits & ~_SIGN
        rounded = magnitude + (_HALF + ((bits >> _SHIFT) & _ONE)) >> _SHIFT  # round half to even
        rounded = np.minimum(rounded, _LARGEST)  # a large finite value stays finite
        rounded = np.where(magnitude == _INFINITY, _INFINITY >> _SHIFT, rounded)
        rounded = np.where(magnitude > _INFINITY, _NAN, rounded)  # a NaN's upper half may be an infinity
        out.view(np.uint16)[:] = rounded | ((bits & _SIGN) >> _SHIFT)

    @override
    def decode(self, data: Bytes, out: Floats) -> None:
        out.view(np.uint32)[:] = data.view(np.uint16).astype(np.uint32) << _SHIFT
