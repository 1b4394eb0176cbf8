"""The update rule Adagrad."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar, Literal

import numpy as np
from typing_extensions import override

from paceline.tables.rules.base import UpdateRule, rule_kernel
from paceline.tables.rules.growth import Bounds, error, normed
from paceline.tables.rules.shrinking import shrunk
from paceline.tables.settings import check_bounds, check_flags
from paceline.tables.types import Doubles, Floats


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adagrad(UpdateRule):
    """Adagrad (Duchi et al., JMLR 2011), like ``torch.optim.Adagrad``.

    If ``l1`` is given, each update also moves a weight towards 0, but not beyond 0: by l1 times the step that a
    gradient of 1 would make.
    """

    lr: float
    eps: float = 1e-10
    initial_accumulator: float = 0.0
    weight_decay: float = 0.0
    lr_decay: float = 0.0
    maximize: bool = False
    l1: float = 0.0

    code: ClassVar[int] = 2
    counts: ClassVar[Literal["by settings"]] = "by settings"
    narrow_words: ClassVar[int] = 2
    wide_loop: ClassVar[bool] = True
    squares: ClassVar[int] = 1
    logistic_rate: ClassVar[float | None] = 0.05

    def __post_init__(self) -> None:
        check_bounds(
            self,
            lr=(0, math.inf),
            eps=(0, math.inf),
            initial_accumulator=(0, math.inf),
            weight_decay=(0, math.inf),
            lr_decay=(0, math.inf),
            l1=(0, math.inf),
        )
        check_flags(self, "maximize")

    @property
    @override
    def numbers(self) -> tuple[float, ...]:
        return (self.lr, self.weight_decay, self.eps, self.initial_accumulator, self.lr_decay, self.l1)

    @property
    @override
    def states(self) -> tuple[str, ...]:
        return ("sum",)

    @property
    @override
    def has_count(self) -> bool:
        return self.lr_decay != 0

    @staticmethod
    @rule_kernel
    def update(record, dim, start, stop, grads, at, hyper, sign, step):  # type: ignore[no-untyped-def]
        """`hyper` contains the rate, weight decay, epsilon, initial accumulator, decay of the rate, and L1 penalty. The
        state is the sum of the squared gradients.
        """
        decay, epsilon = np.float32(hyper[1]), np.float32(hyper[2])
        rate = np.float32(hyper[0] / (1.0 + (step - 1.0) * hyper[4]))
        for j in range(start, stop):
            gradient = sign * grads[at + j - start] + decay * record[j]
            total = record[dim + j] + gradient * gradient
            record[dim + j] = total
            record[j] -= rate * (gradient / (np.sqrt(total) + epsilon))
        if hyper[5] != 0.0:
            step_l1 = rate * np.float32(hyper[5])
            for j in range(start, stop):
                record[j] = shrunk(record[j], step_l1 / (np.sqrt(record[dim + j]) + epsilon))

    @staticmethod
    @rule_kernel
    def initialize(record, dim, start, stop, hyper):  # type: ignore[no-untyped-def]
        """Set the sum of squared gradients to the initial accumulator."""
        for j in range(start, stop):
            record[dim + j] = np.float32(hyper[3])

    @staticmethod
    @override
    def initialize_reference(w: Floats, states: list[Floats], hyper: Doubles) -> None:
        states[0][:] = hyper[3]

    @override
    def initial_bounds(self, largest: float) -> Bounds:
        return Bounds(largest, self.initial_accumulator)

    @override
    def grown(self, at: Bounds, formed: Bounds, gradient: float, num: int) -> tuple[Bounds, float]:
        off = error(num)
        values = (at.values + num * self.lr * normed(self.eps)) * off
        gradient += self.weight_decay * values
        return Bounds(values, (at.first + num * gradient * gradient) * off), gradient
