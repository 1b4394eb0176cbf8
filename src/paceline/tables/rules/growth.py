"""Bounds of the records of a table, and functions for their computation in update rules.

See :mod:`paceline.tables.magnitudes` for the use of bounds.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

ROUNDING: Final = 1e-6
"""A limit of the total relative error of all operations of one update."""
TINY_GRADIENT: Final = 1e-16
"""If a gradient is smaller, its square times a small factor may be 0 as a float32."""
_LEAST: Final = 1e-37
"""A smaller number may be 0 as a float32, so it cannot be used as a divisor."""


class Bounds(NamedTuple):
    """Upper bounds of the magnitudes in all records: of the values, of two state planes, and for Adam of a ratio."""

    values: float = 0.0
    first: float = 0.0
    second: float = 0.0
    ratio: float = 0.0
    """Bound of the first moment divided by the root of the second moment, unless the first moment is tiny."""

    def __or__(self, other: Bounds) -> Bounds:
        """Return the larger bound of each pair; NaN if the bound in `self` is NaN."""
        return Bounds(*(b if b > a else a for a, b in zip(self, other, strict=True)))


UNKNOWN: Final = Bounds(math.inf, math.inf, math.inf, math.inf)


def over(number: float, divisor: float) -> float:
    """Return the quotient; infinity if the divisor may be 0 as a float32."""
    return number / divisor if divisor > _LEAST else math.inf


def power(base: float, exponent: int) -> float:
    """Return a power of a number near 1; infinity if the power might overflow."""
    return base**exponent if base < 2.0 else base if exponent == 1 else math.inf


def error(num: int) -> float:
    """Return a factor that bounds the rounding errors of `num` updates."""
    return power(1.0 + ROUNDING, num)


def normed(eps: float) -> float:
    """Return a bound of a gradient divided by the root of a sum that includes the gradient's square."""
    return max(2.0, over(TINY_GRADIENT, eps))
