"""The base of update rules: a frozen dataclass with a kernel, a reference in NumPy, and cases for tests.

A rule is one file of this package, found here by :data:`RULES` as soon as its class exists. It works on one *record*: a
float32 array that holds the values first (element `j` at ``record[j]``), then the state planes (``record[dim + j]``,
``record[2 * dim + j]``), each `dim` long, and a step count last where the rule has one. A sparse row is a record of its
own; a dense table is a single long one, updated on ``[start, stop)``. All arithmetic is float32, in the order of
``torch.optim``'s single-tensor code, so that results agree to 1e-6 over 100 steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Final, Literal, NamedTuple

import numpy as np

from paceline.errors import UsageError
from paceline.kernels.jit import Unaliased, inlined
from paceline.kernels.parameters import NUM_HYPER
from paceline.tables.rules.growth import UNKNOWN, Bounds
from paceline.tables.types import Doubles, Floats

RULES: Final[dict[str, type[UpdateRule]]] = {}
"""Every update rule by the name of its class, which messages and saved models use."""

rule_kernel: Final = inlined(error_model="numpy", pipeline_class=Unaliased)
"""Decorator of a rule's kernels. They are compiled into the loops over rows that call them, and cached there."""

_NUM_NUMBERS: Final = NUM_HYPER - 2


class RuleCase(NamedTuple):
    """Settings with which tests compare kernel and twin, and the benchmark times them."""

    rule: UpdateRule
    is_rare: bool = True
    """Whether it is run on few elements only: its time is of no great interest."""


class UpdateRule(ABC):
    """The update of a row by a gradient. Abstract: use one of the final classes of this package.

    Those with ``maximize`` ascend if it is True, as ``torch.optim`` does.
    """

    code: ClassVar[int]
    """The number by which the kernels know the rule, which no other one has."""
    counts: ClassVar[Literal["never", "always", "by settings"]] = "never"
    """Whether records hold a step count: ``by settings`` if :attr:`has_count` decides."""
    narrow_words: ClassVar[int] = 0
    """Words of a record of one value without a step count, if a loop over such rows is compiled for this rule alone."""
    wide_loop: ClassVar[bool] = False
    """Whether a loop over wide rows is compiled for this rule alone."""
    squares: ClassVar[int] = 0
    """The plane, counted from the values, whose root is taken, if any."""
    row_dim: ClassVar[int | None] = None
    """The `dim` of the tables that it is for, sparse ones all, if it updates the values of a row together."""
    logistic_rate: ClassVar[float | None] = None
    """The learning rate that suits sparse logistic regression: makes the rule a choice of ``paceline train``."""

    def __init_subclass__(cls, is_abstract: bool = False) -> None:
        if is_abstract:
            return
        for rule in RULES.values():
            if cls.__name__ == rule.__name__:
                raise UsageError(f"there is an update rule {cls.__name__} already: give this one another name")
            if cls.code == rule.code:
                raise UsageError(f"{rule.__name__} is update rule {cls.code} already: give {cls.__name__} another code")
        RULES[cls.__name__] = cls

    @property
    @abstractmethod
    def numbers(self) -> tuple[float, ...]:
        """The hyperparameters in the kernel's order, at most 8."""

    @property
    def states(self) -> tuple[str, ...]:
        """The names of the state planes, each as long as the values; torch's names if it has the rule."""
        return ()

    @property
    def has_count(self) -> bool:
        """Whether a step count follows the planes."""
        return self.counts == "always"

    # The kernel, for a run of elements that have had the same number of updates, and its twin.

    @staticmethod
    @abstractmethod
    def update(
        record: Floats,
        dim: int,
        start: int,
        stop: int,
        grads: Floats,
        at: int,
        hyper: Doubles,
        sign: np.float32,
        step: float,
    ) -> None:
        """Apply the gradients ``grads[at : at + stop - start]`` to elements ``[start, stop)`` of a record.

        A kernel (:data:`rule_kernel`). `hyper` begins with :attr:`numbers`, as float64, so that 1 - beta**step is
        exact. `sign` is -1 where the rule ascends. `step` counts this update too; 1 where steps are not counted.
        """

    @staticmethod
    @abstractmethod
    def reference(w: Floats, states: list[Floats], g: Floats, steps: Doubles, hyper: Doubles) -> None:
        """Update values and states in place as :meth:`update` does, in NumPy: readable and slow.

        `g` is a copy of the gradients, with their sign; `steps` has the step of each element.
        """

    initialize: ClassVar[Any] = None
    """A kernel ``(record, dim, start, stop, hyper)`` that sets state planes which do not start at zero."""
    initialize_reference: ClassVar[Any] = None
    """Its twin ``(w, states, hyper)``."""

    @classmethod
    @abstractmethod
    def cases(cls) -> dict[str, RuleCase]:
        """Return the cases of tests and benchmark, by their names; ``""`` is the plain one."""

    # How large records become.

    def initial_bounds(self, largest: float) -> Bounds:
        """Return the bounds of records that have had no push, and whose values are at most `largest`."""
        return Bounds(largest)

    def grown(self, at: Bounds, formed: Bounds, gradient: float, num: int) -> tuple[Bounds, float]:
        """Return bounds of the records after `num` pushes, and of the intermediate values.

        `at` are the current bounds, `formed` the bounds of records from other hyperparameters, `gradient` is
        the greatest. A rule without bounds has every push tried on a copy of its rows first, which takes twice as long.
        """
        return UNKNOWN, np.inf

    def ratio_of(self, planes: list[Floats]) -> float:
        """Return what :attr:`Bounds.ratio` bounds, of the planes of records."""
        return 0.0

    @classmethod
    def has_bounds(cls) -> bool:
        """Return whether the rule has bounds of its records."""
        return cls.grown is not UpdateRule.grown

    # Derived values.

    @property
    def hyper(self) -> tuple[float, ...]:
        """The kernel's arguments: :attr:`numbers`, zeros, whether the rule ascends, the plane of the step count."""
        padding = (0.0,) * (_NUM_NUMBERS - len(self.numbers))
        count = float(1 + self.num_states) if self.has_count else 0.0
        return (*self.numbers, *padding, float(getattr(self, "maximize", False)), count)

    @property
    def num_states(self) -> int:
        """How many state planes there are."""
        return len(self.states)

    @property
    def state_names(self) -> str:
        """The names of the state, for messages."""
        return ", ".join([*self.states, "step"] if self.has_count else self.states)

    def check_follows(self, other: UpdateRule, subject: str) -> None:
        """Raise UsageError if it cannot continue from the state of `other`, the former rule of `subject`."""
        name, former = type(self).__name__, type(other).__name__
        if (name, self.state_names) == (former, other.state_names):
            return
        if name == former:
            name += f" with the state {self.state_names or 'nothing'} instead of {other.state_names or 'nothing'}"
        raise UsageError(
            f"{subject} is updated by {former}, and its state belongs to that rule: it cannot become {name}"
        )


def decayed(w: Floats, g: Floats, hyper: Doubles) -> Floats:
    """Return gradients with weight decay, the second number of most rules."""
    result: Floats = g + np.float32(hyper[1]) * w
    return result
