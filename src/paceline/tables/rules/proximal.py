"""The update rule of the delayed block proximal gradient method: a proximal Newton step for each weight.

The second derivatives (the Hessian) are replaced by an upper bound for each weight.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar, Final

import numpy as np
from typing_extensions import override

from paceline.tables.rules.base import UpdateRule, rule_kernel
from paceline.tables.rules.growth import Bounds, error
from paceline.tables.settings import check_bounds
from paceline.tables.types import Floats

START: Final = 1.0
"""The first radius of a weight's trust region. Radii are in units of 1 / (mean magnitude of the weight's column)."""
LEAST: Final = 0.1
MOST: Final = 5.0
_LONGEST: Final = 1e18  # the maximum unit
_START, _LEAST, _MOST = np.float32(START), np.float32(LEAST), np.float32(MOST)
_LONG, _SHORT = np.float32(_LONGEST), np.float32(1.0 / _LONGEST)
_F0, _F1, _F2 = np.float32(0), np.float32(1), np.float32(2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProximalNewton(UpdateRule):
    """A proximal step on a weight w, given the gradient g of a loss and an upper bound u of its second derivative.

    The step d minimizes g·d + u·d²/2 + l1·|w + d| + l2·(w + d)²/2 over |d| ≤ radius (Li et al., OSDI'14, algorithm 3).
    Then the radius becomes min(5, 2|d| + 0.1) units (Genkin, Lewis and Madigan 2007, section 3.1). A unit is the
    inverse of the mean magnitude of the weight's column. A row has two values: the weight, and the gradient of the last
    step. A push consists of two numbers, and has one of three meanings:

    - (g, u) with u > 0 makes a step.
    - (s, -n) with n > 0 describes the column of the weight: it has n values, and s is the sum of their magnitudes. The
      push sets the weight to 0. Until the first step, the row's values are (s, n). If s is negative, the weight has no
      penalty.
    - (g, 0) only sets the second value of the row. Workers push numbers in this way, and then read their sum.

    The state consists of the radius and the unit. The unit is negative if the weight has no penalty.
    """

    l1: float = 0.0
    l2: float = 0.0

    code: ClassVar[int] = 13
    row_dim: ClassVar[int] = 2

    def __post_init__(self) -> None:
        check_bounds(self, l1=(0, math.inf), l2=(0, math.inf))

    @property
    @override
    def numbers(self) -> tuple[float, ...]:
        return (self.l1, self.l2)

    @property
    @override
    def states(self) -> tuple[str, ...]:
        return ("radius",)

    @staticmethod
    @rule_kernel
    def update(record, dim, start, stop, grads, at, hyper, sign, step):  # type: ignore[no-untyped-def]
        """The state consists of the radius and the unit."""
        gradient, curvature = grads[at], grads[at + 1]
        if curvature < _F0:
            record[0], record[1] = gradient, -curvature
            record[2], record[3] = _F0, _F0
        elif curvature == _F0:
            record[1] = gradient
        else:
            if record[2] == _F0:  # the first step
                unit = _F1
                if record[0] != _F0 and record[1] != _F0:
                    unit = min(max(abs(record[1] / record[0]), _SHORT), _LONG)
                record[2], record[3] = _START * unit, np.copysign(unit, record[0])
                record[0] = _F0
            weight, radius, unit = record[0], record[2], abs(record[3])
            l1, l2 = np.float32(hyper[0]), np.float32(hyper[1])
            if record[3] < _F0:
                l1, l2 = _F0, _F0
            slope, bound = gradient + l2 * weight, curvature + l2
            if slope + l1 <= bound * weight:
                change = -(slope + l1) / bound
            elif slope - l1 >= bound * weight:
                change = -(slope - l1) / bound
            else:
                change = -weight
            change = min(max(change, -radius), radius)
            record[0], record[1] = weight + change, gradient
            record[2] = min(_MOST * unit, _F2 * abs(change) + _LEAST * unit)

    @override
    def grown(self, at: Bounds, formed: Bounds, gradient: float, num: int) -> tuple[Bounds, float]:
        off = error(num)
        values = (max(at.values, gradient) + num * MOST * _LONGEST) * off
        return Bounds(values, MOST * _LONGEST * off), gradient + self.l2 * values + self.l1


def proximal_step(weight: Floats, gradient: Floats, bound: Floats, l1: Floats, l2: Floats) -> Floats:
    """Return the d that minimizes g·d + u·d²/2 + l1·|w + d| + l2·(w + d)²/2, by element."""
    slope, bound = gradient + l2 * weight, bound + l2
    up, down = slope + l1 <= bound * weight, slope - l1 >= bound * weight
    change: Floats = np.where(up, -(slope + l1) / bound, np.where(down, -(slope - l1) / bound, -weight))
    return change
