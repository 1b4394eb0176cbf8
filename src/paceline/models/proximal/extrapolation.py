"""Extrapolate the weights from the last passes, to speed up slow progress along a narrow valley.

Coordinate descent is slow if the sum of some columns is nearly another column: one-hot columns add up to the intercept.
The combination of the last iterates with the smallest combined residual is often a better point. This point replaces
the weights if it lowers the objective. Source: Bertrand and Massias, "Anderson acceleration of coordinate descent",
AISTATS 2021, algorithm 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from paceline.tables.types import Doubles

NUM_STEPS: Final = 5
"""The number of steps (from one pass to the next) to combine."""
NUM_PRODUCTS: Final = NUM_STEPS * (NUM_STEPS + 1) // 2
_REGULARIZATION: Final = 1e-8


class Iterates:
    """The weights after the last passes."""

    def __init__(self, weights: Doubles) -> None:
        self._weights = [weights.copy()]

    def add(self, weights: Doubles) -> None:
        self._weights.append(weights.copy())

    @property
    def is_complete(self) -> bool:
        return len(self._weights) > NUM_STEPS

    def products(self, shares: Doubles) -> Doubles:
        """Return the inner products of the steps, weighted by the columns' `shares`: float64 [NUM_PRODUCTS]."""
        steps = [after - before for before, after in zip(self._weights, self._weights[1:], strict=False)]
        found = [float((shares * a * b).sum()) for i, a in enumerate(steps) for b in steps[: i + 1]]
        return np.array(found)

    def extrapolate(self, products: Doubles) -> Doubles | None:
        """Return the extrapolated weights, rounded to float32, given the summed products; None if undefined."""
        factors = combine(products.tolist())
        if factors is None:
            return None
        found = np.zeros_like(self._weights[0])
        for factor, weights in zip(factors, self._weights[1:], strict=True):
            found += factor * weights
        return found.astype(np.float32).astype(np.float64)


def combine(products: Sequence[float]) -> list[float] | None:
    """Return the factors, which add up to 1, of the shortest combination of steps; None if undefined.

    `products` has the products of step i with steps 0 to i, in order. All workers must compute the same bits, so this
    function uses plain arithmetic instead of a library.
    """
    gram = [[0.0] * NUM_STEPS for _ in range(NUM_STEPS)]
    pairs = [(i, j) for i in range(NUM_STEPS) for j in range(i + 1)]
    for (i, j), product in zip(pairs, products, strict=True):
        gram[i][j] = gram[j][i] = product
    trace = sum(gram[i][i] for i in range(NUM_STEPS))
    if not 0 < trace < float("inf"):
        return None
    for i in range(NUM_STEPS):
        gram[i] = [product / trace for product in gram[i]] + [1.0]
        gram[i][i] += _REGULARIZATION
    for i in range(NUM_STEPS):  # no pivoting, because the matrix is positive definite
        for row in range(i + 1, NUM_STEPS):
            factor = gram[row][i] / gram[i][i]
            gram[row] = [a - factor * b for a, b in zip(gram[row], gram[i], strict=True)]
    found = [0.0] * NUM_STEPS
    for i in reversed(range(NUM_STEPS)):
        known = sum(gram[i][j] * found[j] for j in range(i + 1, NUM_STEPS))
        found[i] = (gram[i][NUM_STEPS] - known) / gram[i][i]
    total = sum(found)
    return [factor / total for factor in found] if total else None
