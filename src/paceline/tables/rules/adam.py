"""The update rules Adam and AdamW, which differ in their weight decay."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import numpy as np
from typing_extensions import override

from paceline.tables.rules.base import rule_kernel
from paceline.tables.rules.growth import TINY_GRADIENT, UNKNOWN, Bounds, error, over, power
from paceline.tables.rules.moments import Moments, moment_factors
from paceline.tables.rules.shrinking import shrunk
from paceline.tables.settings import check_bounds, check_flags
from paceline.tables.types import Floats


@rule_kernel
def _update(record, dim, start, stop, grads, at, hyper, sign, step, amsgrad):  # type: ignore[no-untyped-def]
    decay, shrink, epsilon, complement1, beta2, complement2 = moment_factors(hyper, hyper[6] != 0.0)
    size = np.float32(hyper[0] / (1.0 - hyper[3] ** step))
    root = np.float32(np.sqrt(1.0 - hyper[4] ** step))
    first, second, greatest = dim, dim + dim, dim + dim + dim
    for j in range(start, stop):
        value = record[j] * shrink
        gradient = sign * grads[at + j - start] + decay * value
        moment = record[first + j] + complement1 * (gradient - record[first + j])
        square = beta2 * record[second + j] + complement2 * gradient * gradient
        record[first + j] = moment
        record[second + j] = square
        if amsgrad:
            square = max(record[greatest + j], square)
            record[greatest + j] = square
        record[j] = value - size * (moment / (np.sqrt(square) / root + epsilon))
    if hyper[7] != 0.0:
        step_l1, last = np.float32(hyper[0]) * np.float32(hyper[7]), greatest if amsgrad else second
        for j in range(start, stop):
            record[j] = shrunk(record[j], step_l1 / (np.sqrt(record[last + j]) / root + epsilon))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adam(Moments):
    """Adam (Kingma & Ba, ICLR 2015), like ``torch.optim.Adam``; optionally AMSGrad (Reddi et al., ICLR 2018).

    If ``l1`` is given, each update also moves a weight towards 0 by lr·l1 / (root of the second moment), but not beyond
    0.
    """

    amsgrad: bool = False
    l1: float = 0.0

    code: ClassVar[int] = 4
    is_decoupled: ClassVar[bool] = False
    wide_loop: ClassVar[bool] = True
    squares: ClassVar[int] = 2
    logistic_rate: ClassVar[float | None] = 0.002

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flags(self, "amsgrad")
        check_bounds(self, l1=(0, math.inf))

    @property
    @override
    def numbers(self) -> tuple[float, ...]:
        """The hyperparameters of :class:`Moments`, 1 for AMSGrad (otherwise 0), 1 for decoupled weight decay (otherwise
        0), and the L1 penalty.
        """
        return (*super().numbers, float(self.amsgrad), float(self.is_decoupled), self.l1)

    @property
    @override
    def states(self) -> tuple[str, ...]:
        return (*super().states, *(("max_exp_avg_sq",) if self.amsgrad else ()))

    @staticmethod
    @rule_kernel
    def update(record, dim, start, stop, grads, at, hyper, sign, step):  # type: ignore[no-untyped-def]
        """The state consists of the first and second moment, and for AMSGrad the largest second moment so far."""
        if hyper[5] != 0.0:
            _update(record, dim, start, stop, grads, at, hyper, sign, step, True)
        else:
            _update(record, dim, start, stop, grads, at, hyper, sign, step, False)

    @override
    def grown(self, at: Bounds, formed: Bounds, gradient: float, num: int) -> tuple[Bounds, float]:
        beta1, beta2 = self.betas
        forgets = 1.0 - over(beta1 * beta1, beta2) if beta1 else 1.0
        if forgets <= 0.0:
            return UNKNOWN, math.inf
        off = error(num)
        # The Cauchy-Schwarz inequality bounds |b1·m + (1 - b1)·g| divided by the root of b2·v + (1 - b2)·g², if m² ≤
        # ratio²·v (m and v are the moments, and g is the gradient).
        ratio = max(at.ratio, (1.0 - beta1) / math.sqrt((1.0 - beta2) * forgets)) * off
        step = self.lr / (1.0 - beta1) * (ratio + over(TINY_GRADIENT, self.eps))
        growth = abs(1.0 - self.lr * self.weight_decay) if self.is_decoupled else 1.0
        values = (at.values + num * step) * power(max(growth, 1.0), num) * off
        gradient += 0.0 if self.is_decoupled else self.weight_decay * values
        first = max(at.first, gradient) * off
        second = max(at.second, gradient * gradient) * off
        peak = max(first + gradient, over(math.sqrt(second), math.sqrt(1.0 - beta2)))
        return Bounds(values, first, second, ratio), peak

    @override
    def ratio_of(self, planes: list[Floats]) -> float:
        first = np.abs(planes[1].astype(np.float64))
        return float(np.where(first > TINY_GRADIENT, first / np.sqrt(planes[2].astype(np.float64)), 0.0).max())


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov & Hutter, ICLR 2019), like ``torch.optim.AdamW``."""

    weight_decay: float = 0.01

    code: ClassVar[int] = 5
    is_decoupled: ClassVar[bool] = True
    wide_loop: ClassVar[bool] = False
