"""Learning-rate schedules: the factor that multiplies an update rule's rate after a number of passes.

A schedule is a class in this module, registered in :data:`SCHEDULES`. Workers or the driver change the rates in the
servers' tables (:meth:`paceline.ps.SparseTable.set_update`). The update rule must have a rate `lr` that multiplies its
steps. FTRL has no such rate: it computes weights from the sums of all gradients, in proportion to alpha. A change of
alpha would rescale all that was learned before.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Final

from typing_extensions import override

from paceline.errors import UsageError
from paceline.protocol import Consistency, Sequential
from paceline.tables.rules import UpdateRule

SCHEDULES: Final[dict[str, type[RateSchedule]]] = {}

LEAST: Final = 1e-3
"""The smallest factor. A factor of 0 would stop learning."""


@dataclasses.dataclass(frozen=True)
class RateSchedule(ABC):
    """A learning-rate schedule. Its text, such as ``step:2:0.5``, has the name and the subclass's fields."""

    name: ClassVar[str]

    def __init_subclass__(cls) -> None:
        SCHEDULES[cls.name] = cls

    @abstractmethod
    def share(self, passes: float, most: int) -> float:
        """Return the factor of the rate after `passes` of at most `most` passes."""

    def __str__(self) -> str:
        return ":".join([self.name, *(f"{value:g}" for value in dataclasses.astuple(self))])

    def _check(self, **bounds: tuple[float, float]) -> None:
        for name, (low, high) in bounds.items():
            value = getattr(self, name)
            if not low < value <= high:
                raise UsageError(f"--schedule {self}: expected {name} above {low:g} and at most {high:g}")


@dataclasses.dataclass(frozen=True)
class ConstantRate(RateSchedule):
    """A constant rate."""

    name: ClassVar[str] = "constant"

    @override
    def share(self, passes: float, most: int) -> float:
        return 1.0


@dataclasses.dataclass(frozen=True)
class LinearRate(RateSchedule):
    """A linear decay to 0."""

    name: ClassVar[str] = "linear"

    @override
    def share(self, passes: float, most: int) -> float:
        return 1 - passes / most


@dataclasses.dataclass(frozen=True)
class InverseSqrtRate(RateSchedule):
    """1 / sqrt(1 + passes). With this rate, stochastic gradients converge (Robbins and Monro, 1951)."""

    name: ClassVar[str] = "inverse-sqrt"

    @override
    def share(self, passes: float, most: int) -> float:
        return 1 / math.sqrt(1 + passes)


@dataclasses.dataclass(frozen=True)
class ExponentialRate(RateSchedule):
    """A rate that is multiplied by `factor` after each pass."""

    name: ClassVar[str] = "exponential"
    factor: float = 0.5

    def __post_init__(self) -> None:
        self._check(factor=(0, 1))

    @override
    def share(self, passes: float, most: int) -> float:
        return float(self.factor**passes)


@dataclasses.dataclass(frozen=True)
class StepRate(RateSchedule):
    """A rate that is multiplied by `factor` after every `passes` passes."""

    name: ClassVar[str] = "step"
    passes: float = 1
    factor: float = 0.5

    def __post_init__(self) -> None:
        self._check(passes=(0, math.inf), factor=(0, 1))

    @override
    def share(self, passes: float, most: int) -> float:
        return float(self.factor ** math.floor(passes / self.passes))


@dataclasses.dataclass(frozen=True)
class CosineRate(RateSchedule):
    """Half a cosine that falls to 0 (Loshchilov and Hutter, SGDR, ICLR 2017, without restarts)."""

    name: ClassVar[str] = "cosine"

    @override
    def share(self, passes: float, most: int) -> float:
        return (1 + math.cos(math.pi * passes / most)) / 2


def parse_schedule(text: str) -> RateSchedule:
    name, *numbers = text.split(":")
    kind: Any = SCHEDULES.get(name)
    if kind is None:
        raise UsageError(f"--schedule {text}: expected one of {', '.join(SCHEDULES)}")
    fields = [field.name for field in dataclasses.fields(kind)]
    try:
        values = [float(number) for number in numbers]
    except ValueError:
        values = [math.nan]
    if len(values) > len(fields) or any(map(math.isnan, values)):
        places = "".join(f"[:{field}]" for field in fields)
        expected = f"{places}, each field a number" if fields else " without numbers"
        raise UsageError(f"--schedule {text}: expected {name}{expected}")
    schedule: RateSchedule = kind(*values)
    return schedule


@dataclasses.dataclass(frozen=True, kw_only=True)
class RatePlan:
    """A schedule and its warmup. Raises UsageError."""

    schedule: RateSchedule = ConstantRate()
    warmup: float = 0.0
    """The rate rises linearly from 0 during this number of passes, which may be a fraction."""

    def __post_init__(self) -> None:
        if not 0 <= self.warmup < math.inf:
            raise UsageError(f"--warmup {self.warmup:g}: expected a number of passes of 0 or more")

    @property
    def is_constant(self) -> bool:
        return self.warmup == 0 and isinstance(self.schedule, ConstantRate)

    def share(self, passes: float, most: int) -> float:
        rising = min(passes / self.warmup, 1.0) if self.warmup else 1.0
        return max(rising * self.schedule.share(min(passes, most), most), LEAST)

    def share_of_pass(self, number: int, most: int) -> float:
        """Return the factor for the whole pass `number`, counted from 1.

        The decay is that of the pass's start. The warmup is that of its end, so that the first rate is not 0.
        """
        rising = min(number / self.warmup, 1.0) if self.warmup else 1.0
        return max(rising * self.schedule.share(min(number - 1, most), most), LEAST)

    def check_consistency(self, consistency: Consistency) -> None:
        """Raise UsageError if the warmup has no effect, because the rates change only between passes."""
        if isinstance(consistency, Sequential) and 0 < self.warmup <= 1:
            raise UsageError(
                f"--warmup {self.warmup:g}: under sequential consistency rates change only between passes, so a warmup "
                "of at most 1 pass has no effect. Pass more than 1, or another --consistency"
            )

    def check(self, rule: UpdateRule) -> None:
        if not self.is_constant and not hasattr(rule, "lr"):
            name = type(rule).__name__.lower()
            raise UsageError(
                f"--schedule and --warmup change a rate that multiplies steps, but {name} has no such rate. Leave the "
                "options out, or pass another --update such as adagrad"
            )

    def settings(self) -> dict[str, Any]:
        return {"schedule": str(self.schedule), "warmup": self.warmup}

    def rule(self, rule: UpdateRule, share: float) -> UpdateRule:
        changed: UpdateRule = dataclasses.replace(rule, lr=rule.lr * share)  # type: ignore[type-var, attr-defined]
        return changed
