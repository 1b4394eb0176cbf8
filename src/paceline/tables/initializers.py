"""Initializers: they determine the values of parameters before the first update."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from typing import ClassVar, Final

from typing_extensions import override

from paceline.errors import UsageError
from paceline.kernels.initializers import CONSTANT, NORMAL, UNIFORM, ZEROS
from paceline.tables.settings import MAX_FLOAT32, check_bounds

__all__ = ["INITIALIZERS", "Constant", "Initializer", "Normal", "Uniform", "Zeros"]

_MOST_DEVIATIONS: Final = 10.0  # upper limit: normal numbers from 53 random bits reach 8.6 standard deviations


class Initializer(ABC):
    """A function that computes a value before its first update, given its key, its element and the table's seed."""

    code: ClassVar[int]

    @property
    def arguments(self) -> tuple[float, float]:
        """The two numbers that kernels receive: the initializer's fields, followed by zeros."""
        first, second, *_ = (*(getattr(self, field.name) for field in dataclasses.fields(self)), 0.0, 0.0)  # type: ignore[arg-type]
        return first, second

    @property
    @abstractmethod
    def largest(self) -> float: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Zeros(Initializer):
    """Every element starts at 0."""

    code: ClassVar[int] = ZEROS

    @property
    @override
    def largest(self) -> float:
        return 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constant(Initializer):
    """Every element starts at ``value``."""

    value: float
    code: ClassVar[int] = CONSTANT

    def __post_init__(self) -> None:
        check_bounds(self, value=(-math.inf, math.inf))

    @property
    @override
    def largest(self) -> float:
        return abs(self.value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Uniform(Initializer):
    """Elements start with a uniform distribution in [low, high] (float32)."""

    low: float = -0.01
    high: float = 0.01
    code: ClassVar[int] = UNIFORM

    def __post_init__(self) -> None:
        check_bounds(self, high=(-math.inf, math.inf))
        check_bounds(self, low=(-math.inf, self.high))

    @property
    @override
    def largest(self) -> float:
        return max(abs(self.low), abs(self.high))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Normal(Initializer):
    """Elements start with a normal distribution of the given mean and standard deviation."""

    mean: float = 0.0
    std: float = 0.01
    code: ClassVar[int] = NORMAL

    def __post_init__(self) -> None:
        check_bounds(self, mean=(-math.inf, math.inf), std=(0, math.inf))
        if not self.largest <= MAX_FLOAT32:
            raise UsageError(f"{self!r}: values may exceed the greatest float32, {MAX_FLOAT32:g}")

    @property
    @override
    def largest(self) -> float:
        return abs(self.mean) + _MOST_DEVIATIONS * self.std


INITIALIZERS: Final[dict[str, type[Initializer]]] = {kind.__name__: kind for kind in (Zeros, Constant, Uniform, Normal)}
