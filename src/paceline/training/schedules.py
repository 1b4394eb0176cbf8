"""Learning-rate schedules: what share of a rule's rate its steps have, by the passes that are done.

A schedule is one class of this module, found in :data:`SCHEDULES` as soon as it exists. Rates change in the servers'
tables (:meth:`paceline.ps.SparseTable.set_update`), whose update rules know no schedule. A rule that a schedule fits
has a rate `lr` that multiplies its steps. FTRL has none: its weights are formed anew from sums of all gradients, in
proportion to alpha, so another alpha would change all that was learned before by the same factor.
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
"""Every schedule by its name."""

LEAST: Final = 1e-3
"""Rates never fall below this share: a rate of nothing would teach nothing."""


@dataclasses.dataclass(frozen=True)
class RateSchedule(ABC):
    """A learning-rate schedule. Abstract: its classes' fields are numbers, written behind the name: ``step:2:0.5``."""

    name: ClassVar[str]

    def __init_subclass__(cls) -> None:
        SCHEDULES[cls.name] = cls

    @abstractmethod
    def share(self, passes: float, most: int) -> float:
        """Return the share of the rate when `passes` of at most `most` passes are done."""

    def __str__(self) -> str:
        return ":".join([self.name, *(f"{value:g}" for value in dataclasses.astuple(self))])

    def _check(self, **bounds: tuple[float, float]) -> None:
        for name, (low, high) in bounds.items():
            value = getattr(self, name)
            if not low < value <= high:
                raise UsageError(f"--schedule {self}: expected {name} above {low:g} and at most {high:g}")


@dataclasses.dataclass(frozen=True)
class ConstantRate(RateSchedule):
    """The same rate all the time."""

    name: ClassVar[str] = "constant"

    @override
    def share(self, passes: float, most: int) -> float:
        return 1.0


@dataclasses.dataclass(frozen=True)
class LinearRate(RateSchedule):
    """Down to nothing in a straight line."""

    name: ClassVar[str] = "linear"

    @override
    def share(self, passes: float, most: int) -> float:
        return 1 - passes / most


@dataclasses.dataclass(frozen=True)
class InverseSqrtRate(RateSchedule):
    """1 / sqrt(1 + passes): among the rates with which stochastic gradients converge (Robbins and Monro, 1951)."""

    name: ClassVar[str] = "inverse-sqrt"

    @override
    def share(self, passes: float, most: int) -> float:
        return 1 / math.sqrt(1 + passes)


@dataclasses.dataclass(frozen=True)
class ExponentialRate(RateSchedule):
    """Times `factor` with each pass."""

    name: ClassVar[str] = "exponential"
    factor: float = 0.5

    def __post_init__(self) -> None:
        self._check(factor=(0, 1))

    @override
    def share(self, passes: float, most: int) -> float:
        return float(self.factor**passes)


@dataclasses.dataclass(frozen=True)
class StepRate(RateSchedule):
    """Times `factor` after every so many passes."""

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
    """Half a cosine down to nothing (Loshchilov and Hutter, SGDR, ICLR 2017, without restarts)."""

    name: ClassVar[str] = "cosine"

    @override
    def share(self, passes: float, most: int) -> float:
        return (1 + math.cos(math.pi * passes / most)) / 2


def parse_schedule(text: str) -> RateSchedule:
    """Return the schedule that ``cosine``, ``exponential:0.5`` or ``step:2:0.1`` means. Raises UsageError."""
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
        expected = "".join(f"[:{field}]" for field in fields)
        raise UsageError(f"--schedule {text}: expected {name}{expected}, with numbers")
    schedule: RateSchedule = kind(*values)
    return schedule


@dataclasses.dataclass(frozen=True, kw_only=True)
class RatePlan:
    """A schedule, and how the rate rises before. Raises UsageError."""

    schedule: RateSchedule = ConstantRate()
    warmup: float = 0.0
    """Passes, or a part of the first one, in which the rate rises from nothing in a straight line."""

    def __post_init__(self) -> None:
        if not 0 <= self.warmup < math.inf:
            raise UsageError(f"--warmup {self.warmup:g}: expected the number of passes, from 0 up")

    @property
    def is_constant(self) -> bool:
        """Whether the rate is always the same."""
        return self.warmup == 0 and isinstance(self.schedule, ConstantRate)

    def share(self, passes: float, most: int) -> float:
        """Return the share of the rate when so many of at most so many passes are done."""
        rising = min(passes / self.warmup, 1.0) if self.warmup else 1.0
        return max(rising * self.schedule.share(min(passes, most), most), LEAST)

    def share_of_pass(self, number: int, most: int) -> float:
        """Return the share of the rate that the whole of a pass has (`number` from 1), where parts of one do not count.

        The schedule's is that of the pass's begin; the rate has risen as far as it does by the pass's end, so that
        the first pass teaches.
        """
        rising = min(number / self.warmup, 1.0) if self.warmup else 1.0
        return max(rising * self.schedule.share(min(number - 1, most), most), LEAST)

    def check_consistency(self, consistency: Consistency) -> None:
        """Raise UsageError for what cannot come about where rates change between passes only."""
        if isinstance(consistency, Sequential) and 0 < self.warmup <= 1:
            raise UsageError(
                f"--warmup {self.warmup:g}: under sequential consistency rates change between passes only, so that one "
                "that has risen by the end of the first has never been smaller: give more than 1 pass, or another "
                "--consistency"
            )

    def check(self, rule: UpdateRule) -> None:
        """Raise UsageError unless rates of this update rule can change."""
        if not self.is_constant and not hasattr(rule, "lr"):
            name = type(rule).__name__.lower()
            raise UsageError(
                f"--schedule and --warmup change a rate that multiplies steps, and {name} has none: its weights are "
                "formed anew from the sums of all gradients; leave them out, or take another --update, such as adagrad"
            )

    def settings(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {"schedule": str(self.schedule), "warmup": self.warmup}

    def rule(self, rule: UpdateRule, share: float) -> UpdateRule:
        """Return the update rule with this share of its rate."""
        changed: UpdateRule = dataclasses.replace(rule, lr=rule.lr * share)  # type: ignore[type-var, attr-defined]
        return changed
