"""The update rule stochastic gradient descent with momentum."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar, Literal

import numpy as np
from typing_extensions import override

from paceline.tables.rules.base import UpdateRule, rule_kernel
from paceline.tables.rules.growth import UNKNOWN, Bounds, error
from paceline.tables.settings import check_bounds, check_flags

_F1 = np.float32(1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Momentum(UpdateRule):
    """SGD with momentum, optionally Nesterov's, like ``torch.optim.SGD(momentum=…, dampening=…, nesterov=…)``.

    Source: Sutskever et al., ICML 2013.
    """

    lr: float
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0
    dampening: float = 0.0
    maximize: bool = False

    code: ClassVar[int] = 1
    counts: ClassVar[Literal["by settings"]] = "by settings"
    logistic_rate: ClassVar[float | None] = 0.005

    def __post_init__(self) -> None:
        check_bounds(
            self, lr=(0, math.inf), momentum=(0, 1), weight_decay=(0, math.inf), dampening=(-math.inf, math.inf)
        )
        check_flags(self, "nesterov", "maximize")

    @property
    @override
    def numbers(self) -> tuple[float, ...]:
        return (self.lr, self.weight_decay, self.momentum, float(self.nesterov), self.dampening)

    @property
    @override
    def states(self) -> tuple[str, ...]:
        return ("momentum_buffer",)

    @property
    @override
    def has_count(self) -> bool:
        return self.dampening != 0  # for the kernel to detect the first gradient, which is not dampened

    @staticmethod
    @rule_kernel
    def update(record, dim, start, stop, grads, at, hyper, sign, step):  # type: ignore[no-untyped-def]
        """`hyper` contains the rate, weight decay, momentum, whether the momentum is Nesterov's, and dampening. The
        state is the velocity.
        """
        rate, decay, momentum = np.float32(hyper[0]), np.float32(hyper[1]), np.float32(hyper[2])
        nesterov = hyper[3] != 0.0
        complement = _F1 if step == 1.0 else np.float32(1.0 - hyper[4])
        for j in range(start, stop):
            gradient = sign * grads[at + j - start] + decay * record[j]
            velocity = momentum * record[dim + j] + complement * gradient
            record[dim + j] = velocity
            record[j] -= rate * (gradient + momentum * velocity if nesterov else velocity)

    @override
    def grown(self, at: Bounds, formed: Bounds, gradient: float, num: int) -> tuple[Bounds, float]:
        off = error(num)
        undamped = max(1.0, abs(1.0 - self.dampening))
        gain = undamped * (1.0 / (1.0 - self.momentum) if self.momentum < 1.0 else num)  # bounds velocity / gradient
        # With weight decay, the gradient grows with the values, and the values with the gradient. The bound of the
        # values is the solution of this inequality.
        factor = num * self.lr * (1.0 + gain) * off
        divisor = 1.0 - factor * self.weight_decay
        if divisor < 0.5:
            return UNKNOWN, math.inf
        values = (off * (at.values + num * self.lr * at.first) + factor * gradient) / divisor
        gradient += self.weight_decay * values
        velocity = (at.first + gain * gradient if self.momentum >= 1.0 else max(at.first, gain * gradient)) * off
        step = gradient + velocity
        return Bounds(values, velocity), max(step, self.lr * step)
