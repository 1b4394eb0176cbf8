"""The update rule averaged stochastic gradient descent (ASGD)."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar, Literal

import numpy as np
from typing_extensions import override

from paceline.tables.rules.base import UpdateRule, rule_kernel
from paceline.tables.settings import check_bounds, check_flags

_F1 = np.float32(1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ASGD(UpdateRule):
    """Averaged SGD (Polyak & Juditsky, 1992), like ``torch.optim.ASGD``.

    The average of the values is the state ``ax``.
    """

    lr: float
    lambd: float = 1e-4
    alpha: float = 0.75
    t0: float = 1e6
    weight_decay: float = 0.0
    maximize: bool = False

    code: ClassVar[int] = 11
    counts: ClassVar[Literal["always"]] = "always"

    def __post_init__(self) -> None:
        everything = (0, math.inf)
        check_bounds(self, lr=everything, lambd=everything, alpha=everything, t0=everything, weight_decay=everything)
        check_flags(self, "maximize")

    @property
    @override
    def numbers(self) -> tuple[float, ...]:
        """The rate, weight decay, decay term, exponent of the rate's decay, and step at which averaging starts."""
        return (self.lr, self.weight_decay, self.lambd, self.alpha, self.t0)

    @property
    @override
    def states(self) -> tuple[str, ...]:
        return ("ax", "eta")

    @staticmethod
    @rule_kernel
    def update(record, dim, start, stop, grads, at, hyper, sign, step):  # type: ignore[no-untyped-def]
        """The state consists of the average of the values, and the learning rate of the next step."""
        decay = np.float32(hyper[1])
        weight = np.float32(1.0 if step == 1.0 else 1.0 / max(1.0, step - 1.0 - hyper[4]))
        following = np.float32(hyper[0] / (1.0 + hyper[2] * hyper[0] * step) ** hyper[3])
        for j in range(start, stop):
            gradient = sign * grads[at + j - start] + decay * record[j]
            rate = np.float32(hyper[0]) if step == 1.0 else record[2 * dim + j]
            value = record[j] * np.float32(1.0 - hyper[2] * np.float64(rate)) - rate * gradient
            average = record[dim + j]
            record[j] = value
            record[dim + j] = value if weight == _F1 else average + (value - average) * weight
            record[2 * dim + j] = following
