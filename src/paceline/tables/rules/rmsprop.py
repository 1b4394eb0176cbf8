"""The update rule RMSprop."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import numpy as np
from typing_extensions import override

from paceline.tables.rules.base import UpdateRule, rule_kernel
from paceline.tables.rules.growth import UNKNOWN, Bounds, error, normed, over
from paceline.tables.settings import check_bounds, check_flags


@dataclasses.dataclass(frozen=True, kw_only=True)
class RMSprop(UpdateRule):
    """RMSprop (Hinton, lecture 6e), like ``torch.optim.RMSprop``.

    The centered variant is from Graves, arXiv:1308.0850.
    """

    lr: float
    alpha: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0
    centered: bool = False
    maximize: bool = False
    code: ClassVar[int] = 3
    squares: ClassVar[int] = 1
    logistic_rate: ClassVar[float | None] = 0.002

    def __post_init__(self) -> None:
        everything = (0, math.inf)
        check_bounds(self, lr=everything, alpha=(0, 1), eps=everything, weight_decay=everything, momentum=everything)
        check_flags(self, "centered", "maximize")

    @property
    @override
    def numbers(self) -> tuple[float, ...]:
        return (self.lr, self.weight_decay, self.eps, self.alpha, self.momentum, float(self.centered))

    @property
    @override
    def states(self) -> tuple[str, ...]:
        velocity = ("momentum_buffer",) if self.momentum else ()
        return ("square_avg", *velocity, *(("grad_avg",) if self.centered else ()))

    @staticmethod
    @rule_kernel
    def update(record, dim, start, stop, grads, at, hyper, sign, step):  # type: ignore[no-untyped-def]
        """`hyper` contains the rate, weight decay, epsilon, smoothing, momentum, and whether the rule is centered.
        :func:`_update` describes the state.
        """
        if hyper[4] == 0.0 and hyper[5] == 0.0:
            _update(record, dim, start, stop, grads, at, hyper, sign, False, False)
        else:
            _update(record, dim, start, stop, grads, at, hyper, sign, hyper[4] != 0.0, hyper[5] != 0.0)

    @override
    def grown(self, at: Bounds, formed: Bounds, gradient: float, num: int) -> tuple[Bounds, float]:
        if self.centered or self.momentum >= 1.0:  # centered: the root of a difference has no bound
            return UNKNOWN, math.inf
        off = error(num)
        step = over(normed(self.eps), math.sqrt(max(1.0 - self.alpha, 0.0)))
        velocity = max(at.second, step / (1.0 - self.momentum)) * off if self.momentum else 0.0
        values = (at.values + num * self.lr * max(step, velocity)) * off
        gradient += self.weight_decay * values
        return Bounds(values, max(at.first, gradient * gradient) * off, velocity), gradient


@rule_kernel
def _update(record, dim, start, stop, grads, at, hyper, sign, has_momentum, is_centered):  # type: ignore[no-untyped-def]
    """Update elements of a record. The state consists of the moving average of squared gradients, the velocity if there
    is a momentum, and the moving average of gradients if the rule is centered.
    """
    rate, decay, epsilon = np.float32(hyper[0]), np.float32(hyper[1]), np.float32(hyper[2])
    alpha, complement, momentum = np.float32(hyper[3]), np.float32(1.0 - hyper[3]), np.float32(hyper[4])
    middle = 3 * dim if has_momentum else 2 * dim
    for j in range(start, stop):
        gradient = sign * grads[at + j - start] + decay * record[j]
        square = alpha * record[dim + j] + complement * gradient * gradient
        record[dim + j] = square
        if is_centered:
            mean = record[middle + j] + complement * (gradient - record[middle + j])
            record[middle + j] = mean
            square -= mean * mean
        change = gradient / (np.sqrt(square) + epsilon)
        if has_momentum:
            change = momentum * record[2 * dim + j] + change
            record[2 * dim + j] = change
        record[j] -= rate * change
