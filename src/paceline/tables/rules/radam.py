"""The update rule RAdam."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np
from typing_extensions import override

from paceline.tables.rules.base import rule_kernel
from paceline.tables.rules.moments import Moments, moment_factors
from paceline.tables.settings import check_flags

_F1 = np.float32(1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RAdam(Moments):
    """Rectified Adam (Liu et al., ICLR 2020), like ``torch.optim.RAdam``."""

    decoupled_weight_decay: bool = False

    code: ClassVar[int] = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flags(self, "decoupled_weight_decay")

    @property
    @override
    def numbers(self) -> tuple[float, ...]:
        """The hyperparameters of :class:`Moments`, and 1 for decoupled weight decay (otherwise 0)."""
        return (*super().numbers, float(self.decoupled_weight_decay))

    @staticmethod
    @rule_kernel
    def update(record, dim, start, stop, grads, at, hyper, sign, step):  # type: ignore[no-untyped-def]
        """The state consists of the first moment and the second moment of the gradients."""
        decay, shrink, epsilon, complement1, beta2, complement2 = moment_factors(hyper, hyper[5] != 0.0)
        correction1, correction2 = np.float32(1.0 - hyper[3] ** step), 1.0 - hyper[4] ** step
        most = 2.0 / (1.0 - hyper[4]) - 1.0
        length = most - 2.0 * step * hyper[4] ** step / correction2
        is_rectified = length > 5.0
        rate, root, rectification = np.float32(hyper[0]), _F1, _F1
        if is_rectified:
            ratio = (length - 4.0) * (length - 2.0) * most / ((most - 4.0) * (most - 2.0) * length)
            root, rectification = np.float32(np.sqrt(correction2)), np.float32(np.sqrt(ratio))
        for j in range(start, stop):
            value = record[j] * shrink
            gradient = sign * grads[at + j - start] + decay * value
            moment = record[dim + j] + complement1 * (gradient - record[dim + j])
            square = beta2 * record[2 * dim + j] + complement2 * gradient * gradient
            record[dim + j] = moment
            record[2 * dim + j] = square
            change = moment / correction1 * rate
            if is_rectified:
                change = change * (root / (np.sqrt(square) + epsilon)) * rectification
            record[j] = value - change
