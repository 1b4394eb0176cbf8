"""The update rule Adamax."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np
from typing_extensions import override

from paceline.tables.rules.base import rule_kernel
from paceline.tables.rules.moments import Moments


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adamax(Moments):
    """Adam with the infinity norm (Kingma & Ba, section 7.1), like ``torch.optim.Adamax``."""

    code: ClassVar[int] = 8

    @property
    @override
    def states(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_inf")

    @staticmethod
    @rule_kernel
    def update(record, dim, start, stop, grads, at, hyper, sign, step):  # type: ignore[no-untyped-def]
        """The state consists of the first moment and the decayed infinity norm of the gradients."""
        decay, epsilon = np.float32(hyper[1]), np.float32(hyper[2])
        complement1, beta2 = np.float32(1.0 - hyper[3]), np.float32(hyper[4])
        size = np.float32(hyper[0] / (1.0 - hyper[3] ** step))
        for j in range(start, stop):
            gradient = sign * grads[at + j - start] + decay * record[j]
            moment = record[dim + j] + complement1 * (gradient - record[dim + j])
            norm = max(beta2 * record[2 * dim + j], abs(gradient) + epsilon)
            record[dim + j] = moment
            record[2 * dim + j] = norm
            record[j] -= size * (moment / norm)
