"""Bounds of the records of a table, the parts of an update rule's bounds.

See :mod:`paceline.tables.magnitudes` for their use.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

ROUNDING: Final = 1e-6
"""More than the relative errors of all operations of one update together."""
TINY_GRADIENT: Final = 1e-16
"""A gradient below this may have a square that, times a small factor, is 0 as a float32."""
_LEAST: Final = 1e-37
"""A smaller number may be 0 as a float32, so it cannot be a divisor."""


class Bounds(NamedTuple):
    """Upper bounds of the magnitudes in all records: the values, the state planes by number, and of Adam a ratio."""

    values: float = 0.0
    first: float = 0.0
    second: float = 0.0
    ratio: float = 0.0
    """Bound of the first moment divided by the root of the second, if the first is at least a tiny number."""

    def __or__(self, other: Bounds) -> Bounds:
        """Return the greater ones; NaN of the first stays."""
        return Bounds(*(b if b > a else a for a, b in zip(self, other, strict=True)))


UNKNOWN: Final = Bounds(math.inf, math.inf, math.inf, math.inf)


def over(number: float, divisor: float) -> float:
    """Return the quotient; infinity where the divisor may be 0 as a float32."""
    return number / divisor if divisor > _LEAST else math.inf


def power(base: float, exponent: int) -> float:
    """Return a power of a number near 1, which does not overflow: infinity where it might."""
    return base**exponent if base < 2.0 else base if exponent == 1 else math.inf


def error(num: int) -> float:
    """Return the factor by which `num` updates may be off, each by rounding."""
    return power(1.0 + ROUNDING, num)


def normed(eps: float) -> float:
    """Return how large a gradient is that is divided by the root of a sum with its square."""
    return max(2.0, over(TINY_GRADIENT, eps))
