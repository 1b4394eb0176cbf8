"""Update rules and initializers, as a user writes them.

Each is a keyword-only frozen dataclass that knows its kernel code, its parameter vector and how many state
planes lie beside the values. They travel as plain dictionaries (:func:`to_fields`, :func:`from_fields`),
never pickled.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from abc import ABC, abstractmethod
from typing import Any, ClassVar, TypeVar

from paceline.errors import UsageError


def _check(rule: object, **bounds: tuple[float, float]) -> None:
    """Raise unless every named field is a finite number within its closed bounds."""
    for name, (low, high) in bounds.items():
        value = getattr(rule, name)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not abs(value) <= sys.float_info.max or not low <= value <= high:
            raise UsageError(
                f"{type(rule).__name__}({name}={value!r}): expected a finite number from {low:g} to {high:g}"
            )


_TINY = 5e-324  # the least positive float: an open lower bound


class UpdateRule(ABC):
    """What a server does with a gradient. Abstract: use one of the final classes below."""

    code: ClassVar[int]
    num_states: ClassVar[int]
    """State planes beside the values, each as long as they are."""
    has_count: ClassVar[bool] = False
    """Whether a step count lies behind the planes."""

    @property
    @abstractmethod
    def hyper(self) -> tuple[float, ...]:
        """The hyperparameters in the kernel's order, at most 8."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SGD(UpdateRule):
    """w ← w − lr·(g + weight_decay·w), as ``torch.optim.SGD`` without momentum."""

    lr: float
    weight_decay: float = 0.0
    code: ClassVar[int] = 0
    num_states: ClassVar[int] = 0

    def __post_init__(self) -> None:
        _check(self, lr=(0, math.inf), weight_decay=(0, math.inf))

    @property
    def hyper(self) -> tuple[float, ...]:
        """Rate and weight decay."""
        return (self.lr, self.weight_decay)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Momentum(UpdateRule):
    """SGD with momentum, Nesterov's on demand, as ``torch.optim.SGD(momentum=…, nesterov=…)``."""

    lr: float
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0
    code: ClassVar[int] = 1
    num_states: ClassVar[int] = 1

    def __post_init__(self) -> None:
        _check(self, lr=(0, math.inf), momentum=(0, 1), weight_decay=(0, math.inf))
        if not isinstance(self.nesterov, bool):
            raise UsageError(f"Momentum(nesterov={self.nesterov!r}): expected True or False")

    @property
    def hyper(self) -> tuple[float, ...]:
        """Rate, weight decay, momentum, whether Nesterov's."""
        return (self.lr, self.weight_decay, self.momentum, float(self.nesterov))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adagrad(UpdateRule):
    """Adagrad (Duchi et al., JMLR 2011), as ``torch.optim.Adagrad`` with lr_decay=0."""

    lr: float
    eps: float = 1e-10
    initial_accumulator: float = 0.0
    weight_decay: float = 0.0
    code: ClassVar[int] = 2
    num_states: ClassVar[int] = 1

    def __post_init__(self) -> None:
        _check(
            self,
            lr=(0, math.inf),
            eps=(0, math.inf),
            initial_accumulator=(0, math.inf),
            weight_decay=(0, math.inf),
        )

    @property
    def hyper(self) -> tuple[float, ...]:
        """Rate, weight decay, epsilon, initial accumulator."""
        return (self.lr, self.weight_decay, self.eps, self.initial_accumulator)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RMSprop(UpdateRule):
    """RMSprop (Hinton, lecture 6e), as ``torch.optim.RMSprop`` without momentum or centering."""

    lr: float
    alpha: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0
    code: ClassVar[int] = 3
    num_states: ClassVar[int] = 1

    def __post_init__(self) -> None:
        _check(self, lr=(0, math.inf), alpha=(0, 1), eps=(0, math.inf), weight_decay=(0, math.inf))

    @property
    def hyper(self) -> tuple[float, ...]:
        """Rate, weight decay, epsilon, smoothing."""
        return (self.lr, self.weight_decay, self.eps, self.alpha)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adam(UpdateRule):
    """Adam (Kingma & Ba, ICLR 2015), as ``torch.optim.Adam``; the step count is each row's own."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    code: ClassVar[int] = 4
    num_states: ClassVar[int] = 2
    has_count: ClassVar[bool] = True

    def __post_init__(self) -> None:
        betas: Any = self.betas
        if isinstance(betas, list):  # as JSON and msgpack have it
            betas = tuple(betas)
            object.__setattr__(self, "betas", betas)
        _check(self, lr=(0, math.inf), eps=(0, math.inf), weight_decay=(0, math.inf))
        is_pair = isinstance(betas, tuple) and len(betas) == 2
        if not is_pair or not all(isinstance(beta, (int, float)) and 0 <= beta < 1 for beta in betas):
            raise UsageError(f"{type(self).__name__}(betas={betas!r}): expected two numbers in [0, 1)")

    @property
    def hyper(self) -> tuple[float, ...]:
        """Rate, weight decay, epsilon, the two betas."""
        return (self.lr, self.weight_decay, self.eps, *self.betas)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov & Hutter, ICLR 2019), as ``torch.optim.AdamW``."""

    weight_decay: float = 0.01
    code: ClassVar[int] = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class FTRL(UpdateRule):
    """FTRL-proximal with per-coordinate rates (McMahan et al., KDD 2013, algorithm 1).

    ``l1`` makes weights exactly 0 until there is evidence for them; ``l2`` shrinks them.
    """

    alpha: float = 0.05
    beta: float = 1.0
    l1: float = 0.0
    l2: float = 0.0
    code: ClassVar[int] = 6
    num_states: ClassVar[int] = 2

    def __post_init__(self) -> None:
        _check(self, alpha=(_TINY, math.inf), beta=(_TINY, math.inf), l1=(0, math.inf), l2=(0, math.inf))

    @property
    def hyper(self) -> tuple[float, ...]:
        """Alpha, beta, L1, L2."""
        return (self.alpha, self.beta, self.l1, self.l2)


class Initializer(ABC):
    """What a parameter is before its first update: a function of key, element and the table's seed."""

    code: ClassVar[int]

    @property
    @abstractmethod
    def arguments(self) -> tuple[float, float]:
        """The two numbers the kernel wants."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Zeros(Initializer):
    """Every element starts at 0."""

    code: ClassVar[int] = 0

    @property
    def arguments(self) -> tuple[float, float]:
        """Nothing."""
        return (0.0, 0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constant(Initializer):
    """Every element starts at ``value``."""

    value: float
    code: ClassVar[int] = 1

    def __post_init__(self) -> None:
        _check(self, value=(-math.inf, math.inf))

    @property
    def arguments(self) -> tuple[float, float]:
        """The value."""
        return (self.value, 0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Uniform(Initializer):
    """Elements start uniform in [low, high] (float32)."""

    low: float = -0.01
    high: float = 0.01
    code: ClassVar[int] = 2

    def __post_init__(self) -> None:
        _check(self, high=(-math.inf, math.inf))
        _check(self, low=(-math.inf, self.high))

    @property
    def arguments(self) -> tuple[float, float]:
        """The bounds."""
        return (self.low, self.high)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Normal(Initializer):
    """Elements start normal with the given mean and standard deviation."""

    mean: float = 0.0
    std: float = 0.01
    code: ClassVar[int] = 3

    def __post_init__(self) -> None:
        _check(self, mean=(-math.inf, math.inf), std=(0, math.inf))

    @property
    def arguments(self) -> tuple[float, float]:
        """Mean and standard deviation."""
        return (self.mean, self.std)


RULES: dict[str, type[UpdateRule]] = {
    rule.__name__: rule for rule in (SGD, Momentum, Adagrad, RMSprop, Adam, AdamW, FTRL)
}
INITIALIZERS: dict[str, type[Initializer]] = {kind.__name__: kind for kind in (Zeros, Constant, Uniform, Normal)}

_Kind = TypeVar("_Kind")


def to_fields(configuration: UpdateRule | Initializer) -> dict[str, Any]:
    """Return a rule or initializer as a dictionary of its class name and fields, fit for JSON and msgpack."""
    return {"kind": type(configuration).__name__, **dataclasses.asdict(configuration)}  # type: ignore[call-overload]


def from_fields(kinds: dict[str, type[_Kind]], fields: dict[str, Any]) -> _Kind:
    """Return the rule or initializer that :func:`to_fields` described."""
    arguments = dict(fields)
    name = arguments.pop("kind", None)
    if not isinstance(name, str) or name not in kinds:
        raise UsageError(f"unknown kind {name!r}: expected one of {', '.join(sorted(kinds))}")
    try:
        return kinds[name](**arguments)
    except TypeError as error:
        raise UsageError(f"{name} does not take these settings: {error}") from None
