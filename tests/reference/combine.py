"""The reference of :mod:`paceline.kernels.combine` in NumPy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from paceline.kernels.combine import BITWISE_AND, BITWISE_OR, BITWISE_XOR, MAX, MIN, PRODUCT, SUM

Array = npt.NDArray[Any]

_FLOATS: Final = ("float16", "bfloat16", "float32", "float64")


def reference(dtype: str, op: int, sources: Sequence[Array], scale: float) -> Array:
    """Return the result of the function of `dtype`."""
    if len(sources) == 1 and scale == 1.0:
        return sources[0].copy()
    total, *addends = (_widened(dtype, source) for source in sources)
    with np.errstate(all="ignore"):
        for other in addends:
            total = _TWINS[op](total, other)
        if dtype in _FLOATS:
            total = total * total.dtype.type(scale)
        return _bfloat16(total) if dtype == "bfloat16" else total.astype(dtype)


def _widened(dtype: str, source: Array) -> Array:
    if dtype == "bfloat16":
        return (source.astype(np.uint32) << 16).view(np.float32)
    return source.astype(np.float32) if dtype == "float16" else source


def _bfloat16(values: Array) -> npt.NDArray[np.uint16]:
    bits = values.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), bits >> 16 | 0x40, rounded).astype(np.uint16)


_TWINS: Final[Mapping[int, Callable[[Array, Array], Array]]] = {
    SUM: np.add,
    PRODUCT: np.multiply,
    MIN: lambda a, b: np.where((a < b) | (a != a), a, b),
    MAX: lambda a, b: np.where((a > b) | (a != a), a, b),
    BITWISE_AND: np.bitwise_and,
    BITWISE_OR: np.bitwise_or,
    BITWISE_XOR: np.bitwise_xor,
}
