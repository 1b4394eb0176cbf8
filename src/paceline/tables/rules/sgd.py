"""The update rule stochastic gradient descent (SGD)."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import numpy as np
from typing_extensions import override

from paceline.tables.rules.base import UpdateRule, rule_kernel
from paceline.tables.rules.growth import ROUNDING, Bounds, power
from paceline.tables.rules.shrinking import shrunk
from paceline.tables.settings import check_bounds, check_flags


@dataclasses.dataclass(frozen=True, kw_only=True)
class SGD(UpdateRule):
    """Stochastic gradient descent: w ← w − lr·(g + weight_decay·w), like ``torch.optim.SGD`` without momentum.

    If ``l1`` is given, each update also moves a weight towards 0 by lr·l1, but not beyond 0.
    """

    lr: float
    weight_decay: float = 0.0
    maximize: bool = False
    l1: float = 0.0

    code: ClassVar[int] = 0
    narrow_words: ClassVar[int] = 1
    wide_loop: ClassVar[bool] = True
    logistic_rate: ClassVar[float | None] = 0.02

    def __post_init__(self) -> None:
        check_bounds(self, lr=(0, math.inf), weight_decay=(0, math.inf), l1=(0, math.inf))
        check_flags(self, "maximize")

    @property
    @override
    def numbers(self) -> tuple[float, ...]:
        return (self.lr, self.weight_decay, self.l1)

    @staticmethod
    @rule_kernel
    def update(record, dim, start, stop, grads, at, hyper, sign, step):  # type: ignore[no-untyped-def]
        """`hyper` contains the rate, weight decay and L1 penalty. The rule has no state."""
        rate, decay = np.float32(hyper[0]), np.float32(hyper[1])
        for j in range(start, stop):
            gradient = sign * grads[at + j - start] + decay * record[j]
            record[j] -= rate * gradient
        if hyper[2] != 0.0:
            by = rate * np.float32(hyper[2])
            for j in range(start, stop):
                record[j] = shrunk(record[j], by)

    @override
    def grown(self, at: Bounds, formed: Bounds, gradient: float, num: int) -> tuple[Bounds, float]:
        shrink = self.lr * self.weight_decay
        growth = abs(1.0 - shrink) + ROUNDING * (1.0 + shrink)
        step = self.lr * gradient * (1.0 + ROUNDING)
        values = (at.values + num * step) * power(max(growth, 1.0), num)
        if growth < 1.0:
            values = min(values, max(at.values, step / (1.0 - growth)))
        total = gradient + self.weight_decay * values
        return Bounds(values), max(total, self.lr * total)
