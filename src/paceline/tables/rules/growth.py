"""Upper bounds of the numbers in a table's records, and functions with which update rules compute these bounds.

:mod:`paceline.tables.magnitudes` explains the use of bounds.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

ROUNDING: Final = 1e-6
"""Upper bound of the total relative rounding error of one update."""
TINY_GRADIENT: Final = 1e-16
"""If a gradient is below this number, its square times a small factor may be 0 as a float32."""
_LEAST: Final = 1e-37
"""A number below this one may be 0 as a float32, so it cannot be used as a divisor."""


class Bounds(NamedTuple):
    """Upper bounds for all records: of the magnitudes of values and of two state planes, and (Adam) of a ratio."""

    values: float = 0.0
    first: float = 0.0
    second: float = 0.0
    ratio: float = 0.0
    """The bound of the first moment divided by the root of the second moment. It ignores first moments near zero."""

    def __or__(self, other: Bounds) -> Bounds:
        """Return the larger of the two bounds for each field. It is NaN if the bound in `self` is NaN."""
        return Bounds(*(b if b > a else a for a, b in zip(self, other, strict=True)))


UNKNOWN: Final = Bounds(math.inf, math.inf, math.inf, math.inf)


def over(number: float, divisor: float) -> float:
    """Return the quotient of two numbers. It is infinite if the divisor may be 0 as a float32."""
    return number / divisor if divisor > _LEAST else math.inf


def power(base: float, exponent: int) -> float:
    """Return a power of a number near 1. It is infinite if the power might overflow."""
    return base**exponent if base < 2.0 else base if exponent == 1 else math.inf


def error(num: int) -> float:
    """Return the largest factor by which rounding errors can increase a number in `num` updates."""
    return power(1.0 + ROUNDING, num)


def normed(eps: float) -> float:
    """Return a bound of g / (root(s) + eps), where g is a gradient, and s is a sum that includes the square of g."""
    return max(2.0, over(TINY_GRADIENT, eps))
