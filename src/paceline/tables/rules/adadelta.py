"""The update rule Adadelta."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import numpy as np
from typing_extensions import override

from paceline.tables.rules.base import UpdateRule, rule_kernel
from paceline.tables.settings import check_bounds, check_flags


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adadelta(UpdateRule):
    """Adadelta (Zeiler, arXiv:1212.5701), like ``torch.optim.Adadelta``."""

    lr: float = 1.0
    rho: float = 0.9
    eps: float = 1e-6
    weight_decay: float = 0.0
    maximize: bool = False

    code: ClassVar[int] = 7

    def __post_init__(self) -> None:
        check_bounds(self, lr=(0, math.inf), rho=(0, 1), eps=(0, math.inf), weight_decay=(0, math.inf))
        check_flags(self, "maximize")

    @property
    @override
    def numbers(self) -> tuple[float, ...]:
        return (self.lr, self.weight_decay, self.eps, self.rho)

    @property
    @override
    def states(self) -> tuple[str, ...]:
        return ("square_avg", "acc_delta")

    @staticmethod
    @rule_kernel
    def update(record, dim, start, stop, grads, at, hyper, sign, step):  # type: ignore[no-untyped-def]
        """`hyper` contains the rate, weight decay, epsilon and smoothing. The state consists of the moving averages of
        squared gradients and of squared steps.
        """
        rate, decay, epsilon = np.float32(hyper[0]), np.float32(hyper[1]), np.float32(hyper[2])
        rho, complement = np.float32(hyper[3]), np.float32(1.0 - hyper[3])
        for j in range(start, stop):
            gradient = sign * grads[at + j - start] + decay * record[j]
            square = rho * record[dim + j] + complement * gradient * gradient
            change = np.sqrt(record[2 * dim + j] + epsilon) / np.sqrt(square + epsilon) * gradient
            record[dim + j] = square
            record[2 * dim + j] = rho * record[2 * dim + j] + complement * change * change
            record[j] -= rate * change
