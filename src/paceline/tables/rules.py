"""Update rules and initializers, as a user writes them.

Each is a keyword-only frozen dataclass that knows its kernel code, its parameter vector and which state planes lie
beside the values. They travel as plain dictionaries (:func:`to_fields`, :func:`from_fields`), never pickled.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar, TypeVar

from typing_extensions import override

from paceline.errors import UsageError
from paceline.tables.counted_rules import ASGD as ASGD
from paceline.tables.counted_rules import Adam as Adam
from paceline.tables.counted_rules import Adamax as Adamax
from paceline.tables.counted_rules import AdamW as AdamW
from paceline.tables.counted_rules import NAdam as NAdam
from paceline.tables.counted_rules import RAdam as RAdam
from paceline.tables.counted_rules import Rprop as Rprop
from paceline.tables.update_rule import MAX_FLOAT32, TINY, check_bounds, check_flags
from paceline.tables.update_rule import UpdateRule as UpdateRule

_MOST_DEVIATIONS = 10.0  # what a normal number is made of has 53 bits, which reach to 8.6


@dataclasses.dataclass(frozen=True, kw_only=True)
class SGD(UpdateRule):
    """w ← w − lr·(g + weight_decay·w), as ``torch.optim.SGD`` without momentum."""

    lr: float
    weight_decay: float = 0.0
    maximize: bool = False
    code: ClassVar[int] = 0

    def __post_init__(self) -> None:
        check_bounds(self, lr=(0, math.inf), weight_decay=(0, math.inf))
        check_flags(self, "maximize")

    @property
    def numbers(self) -> tuple[float, ...]:
        """Rate and weight decay."""
        return (self.lr, self.weight_decay)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Momentum(UpdateRule):
    """SGD with momentum, Nesterov's on demand, as ``torch.optim.SGD(momentum=…, dampening=…, nesterov=…)``."""

    lr: float
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0
    dampening: float = 0.0
    maximize: bool = False
    code: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_bounds(
            self, lr=(0, math.inf), momentum=(0, 1), weight_decay=(0, math.inf), dampening=(-math.inf, math.inf)
        )
        check_flags(self, "nesterov", "maximize")

    @property
    def numbers(self) -> tuple[float, ...]:
        """Rate, weight decay, momentum, whether Nesterov's, dampening."""
        return (self.lr, self.weight_decay, self.momentum, float(self.nesterov), self.dampening)

    @property
    @override
    def states(self) -> tuple[str, ...]:
        return ("momentum_buffer",)

    @property
    @override
    def has_count(self) -> bool:
        return self.dampening != 0  # the first gradient is not dampened


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adagrad(UpdateRule):
    """Adagrad (Duchi et al., JMLR 2011), as ``torch.optim.Adagrad``."""

    lr: float
    eps: float = 1e-10
    initial_accumulator: float = 0.0
    weight_decay: float = 0.0
    lr_decay: float = 0.0
    maximize: bool = False
    code: ClassVar[int] = 2

    def __post_init__(self) -> None:
        check_bounds(
            self,
            lr=(0, math.inf),
            eps=(0, math.inf),
            initial_accumulator=(0, math.inf),
            weight_decay=(0, math.inf),
            lr_decay=(0, math.inf),
        )
        check_flags(self, "maximize")

    @property
    def numbers(self) -> tuple[float, ...]:
        """Rate, weight decay, epsilon, initial accumulator, the rate's decay."""
        return (self.lr, self.weight_decay, self.eps, self.initial_accumulator, self.lr_decay)

    @property
    @override
    def states(self) -> tuple[str, ...]:
        return ("sum",)

    @property
    @override
    def has_count(self) -> bool:
        return self.lr_decay != 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class RMSprop(UpdateRule):
    """RMSprop (Hinton, lecture 6e), as ``torch.optim.RMSprop``; centered as Graves, arXiv:1308.0850."""

    lr: float
    alpha: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0
    centered: bool = False
    maximize: bool = False
    code: ClassVar[int] = 3

    def __post_init__(self) -> None:
        everything = (0, math.inf)
        check_bounds(self, lr=everything, alpha=(0, 1), eps=everything, weight_decay=everything, momentum=everything)
        check_flags(self, "centered", "maximize")

    @property
    def numbers(self) -> tuple[float, ...]:
        """Rate, weight decay, epsilon, smoothing, momentum, whether centered."""
        return (self.lr, self.weight_decay, self.eps, self.alpha, self.momentum, float(self.centered))

    @property
    @override
    def states(self) -> tuple[str, ...]:
        velocity = ("momentum_buffer",) if self.momentum else ()
        return ("square_avg", *velocity, *(("grad_avg",) if self.centered else ()))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adadelta(UpdateRule):
    """Adadelta (Zeiler, arXiv:1212.5701), as ``torch.optim.Adadelta``."""

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
    def numbers(self) -> tuple[float, ...]:
        """Rate, weight decay, epsilon, smoothing."""
        return (self.lr, self.weight_decay, self.eps, self.rho)

    @property
    @override
    def states(self) -> tuple[str, ...]:
        return ("square_avg", "acc_delta")


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

    def __post_init__(self) -> None:
        check_bounds(self, alpha=(TINY, math.inf), beta=(TINY, math.inf), l1=(0, math.inf), l2=(0, math.inf))

    @property
    def numbers(self) -> tuple[float, ...]:
        """Alpha, beta, L1, L2."""
        return (self.alpha, self.beta, self.l1, self.l2)

    @property
    @override
    def states(self) -> tuple[str, ...]:
        return ("z", "n")


class Initializer(ABC):
    """What a parameter is before its first update: a function of key, element and the table's seed."""

    code: ClassVar[int]

    @property
    @abstractmethod
    def arguments(self) -> tuple[float, float]:
        """The two numbers the kernel wants."""

    @property
    @abstractmethod
    def largest(self) -> float:
        """No value is greater in magnitude."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Zeros(Initializer):
    """Every element starts at 0."""

    code: ClassVar[int] = 0

    @property
    def arguments(self) -> tuple[float, float]:
        """Nothing."""
        return (0.0, 0.0)

    @property
    def largest(self) -> float:
        """0."""
        return 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constant(Initializer):
    """Every element starts at ``value``."""

    value: float
    code: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_bounds(self, value=(-math.inf, math.inf))

    @property
    def arguments(self) -> tuple[float, float]:
        """The value."""
        return (self.value, 0.0)

    @property
    def largest(self) -> float:
        """The value's."""
        return abs(self.value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Uniform(Initializer):
    """Elements start uniform in [low, high] (float32)."""

    low: float = -0.01
    high: float = 0.01
    code: ClassVar[int] = 2

    def __post_init__(self) -> None:
        check_bounds(self, high=(-math.inf, math.inf))
        check_bounds(self, low=(-math.inf, self.high))

    @property
    def arguments(self) -> tuple[float, float]:
        """The bounds."""
        return (self.low, self.high)

    @property
    def largest(self) -> float:
        """That of a bound."""
        return max(abs(self.low), abs(self.high))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Normal(Initializer):
    """Elements start normal with the given mean and standard deviation."""

    mean: float = 0.0
    std: float = 0.01
    code: ClassVar[int] = 3

    def __post_init__(self) -> None:
        check_bounds(self, mean=(-math.inf, math.inf), std=(0, math.inf))
        if not self.largest <= MAX_FLOAT32:
            raise UsageError(f"{self!r}: some values are beyond the greatest float32, {MAX_FLOAT32:g}")

    @property
    def arguments(self) -> tuple[float, float]:
        """Mean and standard deviation."""
        return (self.mean, self.std)

    @property
    def largest(self) -> float:
        """No value is so many deviations from the mean."""
        return abs(self.mean) + _MOST_DEVIATIONS * self.std


RULES: dict[str, type[UpdateRule]] = {
    rule.__name__: rule
    for rule in (SGD, Momentum, Adagrad, RMSprop, Adadelta, Adam, AdamW, Adamax, NAdam, RAdam, ASGD, Rprop, FTRL)
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
