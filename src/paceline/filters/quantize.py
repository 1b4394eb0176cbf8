"""Few bits a value, by stochastic rounding (Alistarh et al., NeurIPS 2017, section 3, with the largest as the norm).

With error feedback (Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019) values are rounded to the nearest.
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
_LEAST_PULLED_BITS = 4  # models whose weights were pulled with 2 bits or 1 were worse than the base rate


@dataclasses.dataclass(frozen=True)
class Quantize(ValueFilter):
    """8, 4, 2 or 1 bits a value, and 4 bytes for the largest magnitude of every 256 values, by which they are scaled.

    Values are rounded up or down by chance, so that the mean is right. The error is less than a step, which is the
    largest magnitude by 127, 7, 1 or, with one bit, twice that magnitude. Zero stays zero, except with one bit, which
    is the sign. Where a block holds an infinity or NaN, all of it is NaN.

    With 1 and 2 bits a worker rounds what it pushes to the nearest number instead, and adds the error to the next push
    of the same row (error feedback): chance alone would be too much noise. It keeps an error for every row.
    """

    bits: int = 8

    name: ClassVar[str] = "quantize"
    preserves: ClassVar[Preserves] = "unbiased"
    ns_per_value: ClassVar[float] = 8.0

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
