"""The update rule NAdam."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import numpy as np
from typing_extensions import override

from paceline.tables.rules.base import rule_kernel
from paceline.tables.rules.moments import Moments, moment_factors
from paceline.tables.settings import check_bounds, check_flags

_F1 = np.float32(1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NAdam(Moments):
    """Adam with Nesterov's momentum (Dozat, ICLR workshop 2016), like ``torch.optim.NAdam``."""

    momentum_decay: float = 4e-3
    decoupled_weight_decay: bool = False

    code: ClassVar[int] = 9

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bounds(self, momentum_decay=(0, math.inf))
        check_flags(self, "decoupled_weight_decay")

    @property
    @override
    def numbers(self) -> tuple[float, ...]:
        """The hyperparameters of :class:`Moments`, the momentum's decay, and 1 for decoupled weight decay (otherwise
        0).
        """
        return (*super().numbers, self.momentum_decay, float(self.decoupled_weight_decay))

    @property
    @override
    def states(self) -> tuple[str, ...]:
        return (*super().states, "mu_product")

    @staticmethod
    @rule_kernel
    def update(record, dim, start, stop, grads, at, hyper, sign, step):  # type: ignore[no-untyped-def]
        """The state consists of the first moment, the second moment, and the product of all momenta so far."""
        decay, shrink, epsilon, complement1, beta2, complement2 = moment_factors(hyper, hyper[6] != 0.0)
        correction = np.float32(1.0 - hyper[4] ** step)
        momentum = hyper[3] * (1.0 - 0.5 * 0.96 ** (step * hyper[5]))
        following = hyper[3] * (1.0 - 0.5 * 0.96 ** ((step + 1.0) * hyper[5]))
        for j in range(start, stop):
            value = record[j] * shrink
            gradient = sign * grads[at + j - start] + decay * value
            moment = record[dim + j] + complement1 * (gradient - record[dim + j])
            square = beta2 * record[2 * dim + j] + complement2 * gradient * gradient
            product = (_F1 if step == 1.0 else record[3 * dim + j]) * np.float32(momentum)
            record[dim + j] = moment
            record[2 * dim + j] = square
            record[3 * dim + j] = product
            root = np.sqrt(square / correction) + epsilon
            now = np.float32(hyper[0] * (1.0 - momentum) / (1.0 - np.float64(product)))
            ahead = np.float32(hyper[0] * following / (1.0 - np.float64(product) * following))
            record[j] = value - now * (gradient / root) - ahead * (moment / root)
