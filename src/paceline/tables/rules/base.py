"""The base class of update rules. A rule is a frozen dataclass. Its kernel updates parameters.

Each rule has a file in this package, and the definition of its class adds the rule to :data:`RULES`. A rule updates a
*record*, a float32 array. The record contains `dim` values (element `j` is ``record[j]``), then the *state planes* of
`dim` numbers each (``record[dim + j]``, ``record[2 * dim + j]``), and finally a step count if the rule counts steps.
Each row of a sparse table is a record. A dense table is a single long record. A push updates its elements ``[start,
stop)``. All arithmetic is float32, in the order of the single-tensor code of ``torch.optim``, so that results agree to
1e-6 over 100 steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Final, Literal

import numpy as np

from paceline.errors import UsageError
from paceline.kernels.jit import Unaliased, inlined
from paceline.kernels.parameters import NUM_HYPER
from paceline.tables.rules.growth import UNKNOWN, Bounds
from paceline.tables.types import Doubles, Floats

RULES: Final[dict[str, type[UpdateRule]]] = {}
"""All update rules by the name of their class. Messages and saved models contain this name."""

rule_kernel: Final = inlined(error_model="numpy", pipeline_class=Unaliased)
"""The decorator of a rule's kernels. Loops over rows inline these kernels, and are cached together with them."""

_NUM_NUMBERS: Final = NUM_HYPER - 2


class UpdateRule(ABC):
    """A rule that updates a row by a gradient. This class is abstract; this package has a class for each rule.

    If the field ``maximize`` of a rule is True, the rule maximizes the objective, as in ``torch.optim``.
    """

    code: ClassVar[int]
    """The unique number that identifies the rule in kernels."""
    counts: ClassVar[Literal["never", "always", "by settings"]] = "never"
    """Whether records have a step count. If ``by settings``, :attr:`has_count` depends on the rule's settings."""
    narrow_words: ClassVar[int] = 0
    """0, or the number of float32 in a record with one value and no step count. It is not 0 if this rule has its own
    compiled loop over rows with one value.
    """
    wide_loop: ClassVar[bool] = False
    """Whether this rule has its own compiled loop over rows with several values."""
    squares: ClassVar[int] = 0
    """The number, from 1, of the state plane whose square root the rule computes; 0 if there is none."""
    row_dim: ClassVar[int | None] = None
    """None, or the number of values that a row must have, because the rule updates a row's values together. Such a rule
    updates sparse tables only.
    """
    logistic_rate: ClassVar[float | None] = None
    """The learning rate for sparse logistic regression; None if ``paceline train`` does not offer the rule."""

    def __init_subclass__(cls, is_abstract: bool = False) -> None:
        if is_abstract:
            return
        for rule in RULES.values():
            if cls.__name__ == rule.__name__:
                raise UsageError(f"an update rule {cls.__name__} exists already. Give this rule another name")
            if cls.code == rule.code:
                raise UsageError(f"{rule.__name__} has the code {cls.code} already. Give {cls.__name__} another code")
        RULES[cls.__name__] = cls

    @property
    @abstractmethod
    def numbers(self) -> tuple[float, ...]:
        """The hyperparameters (at most 8), in the order in which the kernel expects them."""

    @property
    def states(self) -> tuple[str, ...]:
        """The names of the state planes. They are PyTorch's names if PyTorch has the rule."""
        return ()

    @property
    def has_count(self) -> bool:
        """Whether records have a step count after their state planes."""
        return self.counts == "always"

    # The kernel, for elements with equal numbers of updates. Reference implementations in NumPy are in
    # tests/reference/update_rules.py.

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

        The method is a kernel (see :data:`rule_kernel`). `hyper` begins with :attr:`numbers` as float64, because
        float32 would be too inexact for 1 - beta**step. `sign` is -1 if the rule maximizes the objective, otherwise 1.
        `step` is the number of updates including this one, or 1 if the rule does not count steps.
        """

    initialize: ClassVar[Any] = None
    """A kernel ``(record, dim, start, stop, hyper)`` that sets the initial state. None if the state begins at zero."""
    initialize_reference: ClassVar[Any] = None
    """The reference implementation ``(w, states, hyper)`` of :attr:`initialize` in NumPy."""

    # The following methods compute bounds of the numbers in records (see `paceline.tables.magnitudes`).

    def initial_bounds(self, largest: float) -> Bounds:
        """Return the bounds of records before their first push. `largest` is the largest magnitude of a value."""
        return Bounds(largest)

    def grown(self, at: Bounds, formed: Bounds, gradient: float, num: int) -> tuple[Bounds, float]:
        """Return bounds of the records after `num` pushes, and an upper bound of the intermediate values.

        `at` are the current bounds, `formed` the bounds of the records that were written with other hyperparameters,
        and `gradient` is the largest magnitude of a gradient. If a rule has no bounds, every push is first tried on a
        copy of its rows. So a push takes twice as long.
        """
        return UNKNOWN, np.inf

    def ratio_of(self, planes: list[Floats]) -> float:
        """Return the largest ratio in records, for :attr:`Bounds.ratio`. `planes` are the values and state planes."""
        return 0.0

    @classmethod
    def has_bounds(cls) -> bool:
        """Return whether the rule can compute bounds of the numbers in its records."""
        return cls.grown is not UpdateRule.grown

    # The following values are derived from the methods above.

    @property
    def hyper(self) -> tuple[float, ...]:
        """The argument `hyper` of the kernel: :attr:`numbers`, zeros, whether the rule maximizes the objective, and the
        position of the step count.
        """
        padding = (0.0,) * (_NUM_NUMBERS - len(self.numbers))
        count = float(1 + self.num_states) if self.has_count else 0.0
        return (*self.numbers, *padding, float(getattr(self, "maximize", False)), count)

    @property
    def num_states(self) -> int:
        """The number of state planes."""
        return len(self.states)

    @property
    def state_names(self) -> str:
        """The names of the state, for messages."""
        return ", ".join([*self.states, "step"] if self.has_count else self.states)

    def check_follows(self, other: UpdateRule, subject: str) -> None:
        """Raise UsageError if this rule cannot use the state of `other`: the previous rule of the table `subject`."""
        name, former = type(self).__name__, type(other).__name__
        if (name, self.state_names) == (former, other.state_names):
            return
        if name == former:
            name += f" with the state {self.state_names or 'nothing'} instead of {other.state_names or 'nothing'}"
        raise UsageError(
            f"{subject} is updated by {former}, and its state belongs to that rule: it cannot become {name}"
        )
