"""Update rules that count their steps: the Adam family, averaged SGD, Rprop."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

from typing_extensions import override

from paceline.errors import UsageError
from paceline.tables.update_rule import UpdateRule, check_bounds, check_flags, check_pair


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Moments(UpdateRule):
    """What the rules of the Adam family share; the step count is each row's own. Abstract."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    maximize: bool = False

    def __post_init__(self) -> None:
        check_bounds(self, lr=(0, math.inf), eps=(0, math.inf), weight_decay=(0, math.inf))
        check_pair(self, "betas", 0, 1, "in [0, 1)")
        check_flags(self, "maximize")

    @property
    def numbers(self) -> tuple[float, ...]:
        """Rate, weight decay, epsilon, the two betas."""
        return (self.lr, self.weight_decay, self.eps, *self.betas)

    @property
    @override
    def states(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    @property
    @override
    def has_count(self) -> bool:
        return True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adam(_Moments):
    """Adam (Kingma & Ba, ICLR 2015), as ``torch.optim.Adam``; AMSGrad (Reddi et al., ICLR 2018) on demand."""

    amsgrad: bool = False
    code: ClassVar[int] = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flags(self, "amsgrad")

    @property
    def numbers(self) -> tuple[float, ...]:
        """Those of the family, whether AMSGrad."""
        return (*super().numbers, float(self.amsgrad))

    @property
    @override
    def states(self) -> tuple[str, ...]:
        return (*super().states, *(("max_exp_avg_sq",) if self.amsgrad else ()))


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov & Hutter, ICLR 2019), as ``torch.optim.AdamW``."""

    weight_decay: float = 0.01
    code: ClassVar[int] = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adamax(_Moments):
    """Adam with the infinity norm (Kingma & Ba, section 7.1), as ``torch.optim.Adamax``."""

    code: ClassVar[int] = 8

    @property
    @override
    def states(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_inf")


@dataclasses.dataclass(frozen=True, kw_only=True)
class NAdam(_Moments):
    """Adam with Nesterov's momentum (Dozat, ICLR workshop 2016), as ``torch.optim.NAdam``."""

    momentum_decay: float = 4e-3
    decoupled_weight_decay: bool = False
    code: ClassVar[int] = 9

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bounds(self, momentum_decay=(0, math.inf))
        check_flags(self, "decoupled_weight_decay")

    @property
    def numbers(self) -> tuple[float, ...]:
        """Those of the family, the momentum's decay, whether the weights' is decoupled."""
        return (*super().numbers, self.momentum_decay, float(self.decoupled_weight_decay))

    @property
    @override
    def states(self) -> tuple[str, ...]:
        return (*super().states, "mu_product")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RAdam(_Moments):
    """Rectified Adam (Liu et al., ICLR 2020), as ``torch.optim.RAdam``."""

    decoupled_weight_decay: bool = False
    code: ClassVar[int] = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flags(self, "decoupled_weight_decay")

    @property
    def numbers(self) -> tuple[float, ...]:
        """Those of the family, whether weight decay is decoupled."""
        return (*super().numbers, float(self.decoupled_weight_decay))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ASGD(UpdateRule):
    """Averaged SGD (Polyak & Juditsky, 1992), as ``torch.optim.ASGD``; the average is a state, ``ax``."""

    lr: float
    lambd: float = 1e-4
    alpha: float = 0.75
    t0: float = 1e6
    weight_decay: float = 0.0
    maximize: bool = False
    code: ClassVar[int] = 11

    def __post_init__(self) -> None:
        everything = (0, math.inf)
        check_bounds(self, lr=everything, lambd=everything, alpha=everything, t0=everything, weight_decay=everything)
        check_flags(self, "maximize")

    @property
    def numbers(self) -> tuple[float, ...]:
        """Rate, weight decay, decay term, power of the rate's decay, step at which averaging starts."""
        return (self.lr, self.weight_decay, self.lambd, self.alpha, self.t0)

    @property
    @override
    def states(self) -> tuple[str, ...]:
        return ("ax", "eta")

    @property
    @override
    def has_count(self) -> bool:
        return True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rprop(UpdateRule):
    """Resilient propagation (Riedmiller & Braun, 1993), as ``torch.optim.Rprop``; `lr` is the first step's size."""

    lr: float
    etas: tuple[float, float] = (0.5, 1.2)
    step_sizes: tuple[float, float] = (1e-6, 50.0)
    maximize: bool = False
    code: ClassVar[int] = 12

    def __post_init__(self) -> None:
        check_bounds(self, lr=(0, math.inf))
        check_pair(self, "etas", 0, math.inf, "from 0")
        check_pair(self, "step_sizes", 0, math.inf, "from 0")
        if not 0 < self.etas[0] < 1 < self.etas[1]:
            raise UsageError(f"Rprop(etas={self.etas!r}): expected one between 0 and 1, and one above 1")
        check_flags(self, "maximize")

    @property
    def numbers(self) -> tuple[float, ...]:
        """Rate, the factors of steps that shrink and grow, the least and the greatest step."""
        return (self.lr, *self.etas, *self.step_sizes)

    @property
    @override
    def states(self) -> tuple[str, ...]:
        return ("prev", "step_size")

    @property
    @override
    def has_count(self) -> bool:
        return True
