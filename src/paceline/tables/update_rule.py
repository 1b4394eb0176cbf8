"""What every update rule is, and the checks of what a user gives one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from paceline.errors import UsageError

MAX_FLOAT32 = 3.4028234e38  # kernels have float32


def check_bounds(rule: object, **bounds: tuple[float, float]) -> None:
    """Raise unless every named field is a finite number, as a float32 too, within its closed bounds."""
    for name, (low, high) in bounds.items():
        value = getattr(rule, name)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not abs(value) <= MAX_FLOAT32 or not low <= value <= high:
            raise UsageError(
                f"{type(rule).__name__}({name}={value!r}): expected a finite number from {low:g} to {high:g}"
            )


def check_flags(rule: object, *names: str) -> None:
    """Raise unless every named field is True or False."""
    for name in names:
        if not isinstance(getattr(rule, name), bool):
            raise UsageError(f"{type(rule).__name__}({name}={getattr(rule, name)!r}): expected True or False")


def check_pair(rule: object, name: str, low: float, high: float, expected: str) -> None:
    """Take a pair of numbers from low to below high, which may be a list, as JSON and msgpack have it."""
    pair: Any = getattr(rule, name)
    if isinstance(pair, list):
        pair = tuple(pair)
        object.__setattr__(rule, name, pair)
    is_pair = isinstance(pair, tuple) and len(pair) == 2
    if not is_pair or not all(isinstance(each, (int, float)) and low <= each < high for each in pair):
        raise UsageError(f"{type(rule).__name__}({name}={pair!r}): expected two numbers {expected}")


TINY = 5e-324  # the least positive float: an open lower bound
_NUM_NUMBERS = 7


class UpdateRule(ABC):
    """What a server does with a gradient. Abstract: use one of the final classes below.

    Those with ``maximize`` ascend if it is True, as ``torch.optim`` does.
    """

    code: ClassVar[int]

    @property
    @abstractmethod
    def numbers(self) -> tuple[float, ...]:
        """The hyperparameters in the kernel's order, at most 7."""

    @property
    def hyper(self) -> tuple[float, ...]:
        """What the kernel gets: :attr:`numbers`, zeros, and as the eighth whether the rule ascends."""
        rest = (0.0,) * (_NUM_NUMBERS - len(self.numbers))
        return (*self.numbers, *rest, float(getattr(self, "maximize", False)))

    @property
    def states(self) -> tuple[str, ...]:
        """The names of the state planes beside the values, each as long as they are; torch's where it has the rule."""
        return ()

    @property
    def has_count(self) -> bool:
        """Whether a step count lies behind the planes."""
        return False

    @property
    def num_states(self) -> int:
        """How many state planes there are."""
        return len(self.states)

    @property
    def state_names(self) -> str:
        """All that its state is, for people."""
        return ", ".join([*self.states, "step"] if self.has_count else self.states)

    def check_follows(self, other: UpdateRule, what: str) -> None:
        """Raise UsageError if it cannot go on from the state of `other`, which has updated `what`: it has another."""
        name, former = type(self).__name__, type(other).__name__
        if (name, self.state_names) == (former, other.state_names):
            return
        if name == former:
            name += f" with the state {self.state_names or 'nothing'} instead of {other.state_names or 'nothing'}"
        raise UsageError(f"{what} is updated by {former}, and its state is of that rule: it cannot become {name}")
