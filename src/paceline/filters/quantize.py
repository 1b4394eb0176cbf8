"""Encode values in few bits by stochastic rounding (Alistarh et al., NeurIPS 2017, section 3, maximum norm).

If there is error feedback, values are rounded to nearest (Seide et al., Interspeech 2014; Karimireddy et al., ICML
2019).
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np
from typing_extensions import override

from paceline.errors import UsageError
from paceline.filters.base import Bytes, Preserves, ValueFilter
from paceline.kernels.filters import BLOCK, dequantize, quantize, quantize_nearest
from paceline.tables.types import Floats

_HALVES = {8: np.float32(127), 4: np.float32(7), 2: np.float32(1), 1: np.float32(0.5)}
_LEAST_PULLED_BITS = 4  # with 1 or 2 bits in pulls, models were worse than the base rate


@dataclasses.dataclass(frozen=True)
class Quantize(ValueFilter):
    """8, 4, 2 or 1 bits per value, plus 4 bytes per block of 256 values for the scale: the largest magnitude.

    Values are rounded up or down at random to a multiple of a step, so that their expectation does not change. The step
    is the scale divided by 127 (8 bits), 7 (4 bits) or 1 (2 bits), so zero stays zero. One bit encodes the sign, with a
    step of twice the scale. All values of a block with an infinity or NaN become NaN.

    With 1 or 2 bits, random rounding would be too noisy. So a worker rounds pushed values to nearest and adds the error
    to the next push of the same row (error feedback). The worker then stores an error for every row.
    """

    bits: int = 8

    name: ClassVar[str] = "quantize"
    preserves: ClassVar[Preserves] = "unbiased"

    def __post_init__(self) -> None:
        if self.bits not in _HALVES or isinstance(self.bits, bool):
            raise UsageError(f"Quantize(bits={self.bits!r}): expected 8, 4, 2 or 1")

    @property
    @override
    def for_pulls(self) -> Quantize:
        return Quantize(bits=max(self.bits, _LEAST_PULLED_BITS))

    @override
    def num_bytes(self, count: int) -> int:
        return 4 * -(-count // BLOCK) + -(-count * self.bits // 8)

    @property
    @override
    def keeps_error(self) -> bool:
        return self.bits <= 2

    @override
    def encode(self, values: Floats, seed: int | None, out: Bytes) -> None:
        scales, codes = self._split(out, len(values))
        if seed is None:
            quantize_nearest(values, self.bits, _HALVES[self.bits], scales, codes)
        else:
            quantize(values, self.bits, _HALVES[self.bits], np.uint64(seed), scales, codes)

    @override
    def decode(self, data: Bytes, out: Floats) -> None:
        scales, codes = self._split(data, len(out))
        dequantize(codes, self.bits, _HALVES[self.bits], scales, out)

    def _split(self, data: Bytes, count: int) -> tuple[Floats, Bytes]:
        scale_bytes = 4 * -(-count // BLOCK)
        return data[:scale_bytes].view(np.float32), data[scale_bytes:]
