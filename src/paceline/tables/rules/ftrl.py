"""The update rule FTRL-proximal."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import numpy as np
from typing_extensions import override

from paceline.tables.rules.base import UpdateRule, rule_kernel
from paceline.tables.rules.growth import ROUNDING, Bounds, error, over
from paceline.tables.settings import TINY, check_bounds
from paceline.tables.types import Doubles, Floats

_F0 = np.float32(0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FTRL(UpdateRule):
    """FTRL-proximal with a learning rate per weight (McMahan et al., KDD 2013, algorithm 1).

    With the penalty ``l1``, a weight is exactly 0 until its gradients are large enough. The penalty ``l2`` shrinks all
    weights.
    """

    alpha: float = 0.05
    beta: float = 1.0
    l1: float = 0.0
    l2: float = 0.0

    code: ClassVar[int] = 6
    narrow_words: ClassVar[int] = 3
    squares: ClassVar[int] = 2
    logistic_rate: ClassVar[float | None] = 0.05

    def __post_init__(self) -> None:
        check_bounds(self, alpha=(TINY, math.inf), beta=(TINY, math.inf), l1=(0, math.inf), l2=(0, math.inf))

    @property
    @override
    def numbers(self) -> tuple[float, ...]:
        return (self.alpha, self.beta, self.l1, self.l2)

    @property
    @override
    def states(self) -> tuple[str, ...]:
        return ("z", "n")

    @staticmethod
    @rule_kernel
    def update(record, dim, start, stop, grads, at, hyper, sign, step):  # type: ignore[no-untyped-def]
        """The state consists of z and n (see the paper), from which the weight is computed with the L1 and L2
        penalties.
        """
        inverse, beta = np.float32(1.0 / hyper[0]), np.float32(hyper[1])
        l1, l2, squares = np.float32(hyper[2]), np.float32(hyper[3]), dim + dim
        for j in range(start, stop):
            gradient = grads[at + j - start]
            before = record[squares + j]
            after = before + gradient * gradient
            root = np.sqrt(after)
            z = record[dim + j] + gradient - (root - np.sqrt(before)) * inverse * record[j]
            weight = (np.copysign(l1, z) - z) / ((beta + root) * inverse + l2)
            record[dim + j] = z
            record[squares + j] = after
            record[j] = weight if abs(z) > l1 else _F0

    @staticmethod
    @rule_kernel
    def initialize(record, dim, start, stop, hyper):  # type: ignore[no-untyped-def]
        """Set the state z so that the weight computed from it, with n = 0, is the initial weight."""
        for j in range(start, stop):
            value = record[j]
            if value != _F0:
                slope = np.float32(hyper[1] / hyper[0] + hyper[3])
                record[dim + j] = -value * slope - np.copysign(np.float32(hyper[2]), value)

    @staticmethod
    @override
    def initialize_reference(w: Floats, states: list[Floats], hyper: Doubles) -> None:
        z = -w * np.float32(hyper[1] / hyper[0] + hyper[3]) - np.copysign(np.float32(hyper[2]), w)
        states[0][:] = np.where(w != 0, z, np.float32(0))

    @override
    def initial_bounds(self, largest: float) -> Bounds:
        if not largest:
            return Bounds()
        return Bounds(largest, largest * (over(self.beta, self.alpha) + self.l2) + self.l1)

    @override
    def grown(self, at: Bounds, formed: Bounds, gradient: float, num: int) -> tuple[Bounds, float]:
        off = error(num)
        inverse, least = over(1.0, self.alpha), over(self.beta, self.alpha) + self.l2
        squares = (at.second + num * gradient * gradient) * off
        root = math.sqrt(squares)
        slope = (gradient + ROUNDING * root) * inverse  # upper bound of the growth of a weight's divisor in one push
        # A weight that was computed with these hyperparameters changes by at most the gradient divided by its new
        # divisor. A weight that was computed with other hyperparameters may change more, and is bounded by `formed`.
        updated = formed.first + gradient + slope * formed.values
        moves = num * (self.alpha + over(ROUNDING * self.l1, least))
        values = (max(at.values, over(updated + self.l1, least)) + moves) * off
        first = max(values * (root * inverse + least) + self.l1, updated) * off
        return Bounds(values, first, squares), max(first + gradient, root * inverse, slope * values)
