"""The common parts of the update rules of the Adam family."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar, Literal

import numpy as np
from typing_extensions import override

from paceline.tables.rules.base import UpdateRule, rule_kernel
from paceline.tables.settings import check_bounds, check_flags, check_pair


@dataclasses.dataclass(frozen=True, kw_only=True)
class Moments(UpdateRule, is_abstract=True):
    """The base class of rules with two moments (moving averages) of the gradients, and a step count per row."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    maximize: bool = False

    counts: ClassVar[Literal["always"]] = "always"

    def __post_init__(self) -> None:
        check_bounds(self, lr=(0, math.inf), eps=(0, math.inf), weight_decay=(0, math.inf))
        check_pair(self, "betas", 0, 1, "in [0, 1)")
        check_flags(self, "maximize")

    @property
    @override
    def numbers(self) -> tuple[float, ...]:
        """The rate, weight decay, epsilon, and the two betas."""
        return (self.lr, self.weight_decay, self.eps, *self.betas)

    @property
    @override
    def states(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")


@rule_kernel
def moment_factors(hyper, is_decoupled):  # type: ignore[no-untyped-def]
    """Return the float32 factors of an update: the weight decay that is added to the gradient, the decoupled weight
    decay, epsilon, 1 - beta1, beta2, and 1 - beta2.

    Decoupled weight decay is from Loshchilov & Hutter, ICLR 2019.
    """
    decay = np.float32(0.0 if is_decoupled else hyper[1])
    shrink = np.float32(1.0 - hyper[0] * hyper[1] if is_decoupled else 1.0)
    return (
        decay,
        shrink,
        np.float32(hyper[2]),
        np.float32(1.0 - hyper[3]),
        np.float32(hyper[4]),
        np.float32(1.0 - hyper[4]),
    )
