"""The base class of update rules: a frozen dataclass with a kernel.

Each rule is a file of this package, and the definition of its class adds the rule to :data:`RULES`. A rule works on one
*record*: a float32 array with the values (element `j` at ``record[j]``), then the state planes (``record[dim + j]``,
``record[2 * dim + j]``) of `dim` elements each, and finally a step count if the rule counts steps. Each row of a sparse
table is a record; a dense table is a single long record, of which a push updates the elements ``[start, stop)``. All
arithmetic is float32, in the order of ``torch.optim``'s single-tensor code, so that results agree to 1e-6 over 100
steps.
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
"""Every update rule by the name of its class, which messages and saved models use."""

rule_kernel: Final = inlined(error_model="numpy", pipeline_class=Unaliased)
"""Decorator of a rule's kernels, which are compiled into, and cached with, the loops over rows that call them."""

_NUM_NUMBERS: Final = NUM_HYPER - 2


class UpdateRule(ABC):
    """The update of a row by a gradient. Abstract: use one of the final classes of this package.

    Rules with the field ``maximize`` ascend if it is True, as in ``torch.optim``.
    """

    code: ClassVar[int]
    """The unique number that identifies the rule in kernels."""
    counts: ClassVar[Literal["never", "always", "by settings"]] = "never"
    """Whether records have a step count; ``by settings`` means that :attr:`has_count` decides."""
    narrow_words: ClassVar[int] = 0
    """The words of a record with one value and no step count, if this rule has its own compiled loop over such rows."""
    wide_loop: ClassVar[bool] = False
    """Whether this rule has its own compiled loop over wide rows."""
    squares: ClassVar[int] = 0
    """The number of the plane whose square root the rule computes; 0 for none. The values are plane 0."""
    row_dim: ClassVar[int | None] = None
    """If the rule updates the values of a row together: the required `dim` of its tables, which must be sparse."""
    logistic_rate: ClassVar[float | None] = None
    """The learning rate for sparse logistic regression; None if ``paceline train`` does not offer the rule."""

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
        """The names of the state planes; PyTorch's names if PyTorch has the rule."""
        return ()

    @property
    def has_count(self) -> bool:
        """Whether a step count follows the planes."""
        return self.counts == "always"

    # The kernel, for elements with the same number of updates. tests/reference/update_rules.py has references in NumPy.

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

        The method is a kernel (:data:`rule_kernel`). `hyper` begins with :attr:`numbers`, as float64, so that 1 -
        beta**step is exact. `sign` is -1 if the rule ascends. `step` includes this update; it is 1 if the rule does not
        count steps.
        """

    initialize: ClassVar[Any] = None
    """A kernel ``(record, dim, start, stop, hyper)`` that sets state planes with initial values other than zero."""
    initialize_reference: ClassVar[Any] = None
    """The reference ``(w, states, hyper)`` of :attr:`initialize` in NumPy."""

    # How large records become.

    def initial_bounds(self, largest: float) -> Bounds:
        """Return the bounds of records that no push has changed yet; `largest` is the largest magnitude of a value."""
        return Bounds(largest)

    def grown(self, at: Bounds, formed: Bounds, gradient: float, num: int) -> tuple[Bounds, float]:
        """Return bounds of the records after `num` pushes, and of the intermediate values.

        `at` are the current bounds, `formed` the bounds of records that other hyperparameters have formed, and
        `gradient` is the largest magnitude of a gradient. If a rule has no bounds, every push is first tried on a copy
        of its rows, which takes twice as long.
        """
        return UNKNOWN, np.inf

    def ratio_of(self, planes: list[Floats]) -> float:
        """Return the ratio that :attr:`Bounds.ratio` bounds, given the planes of records."""
        return 0.0

    @classmethod
    def has_bounds(cls) -> bool:
        """Return whether the rule can bound its records."""
        return cls.grown is not UpdateRule.grown

    # Derived values.

    @property
    def hyper(self) -> tuple[float, ...]:
        """The kernel's `hyper`: :attr:`numbers`, zeros, whether the rule ascends, and the plane of the step count."""
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
        """Raise UsageError if this rule cannot continue from the state of `other`, the former rule of `subject`."""
        name, former = type(self).__name__, type(other).__name__
        if (name, self.state_names) == (former, other.state_names):
            return
        if name == former:
            name += f" with the state {self.state_names or 'nothing'} instead of {other.state_names or 'nothing'}"
        raise UsageError(
            f"{subject} is updated by {former}, and its state belongs to that rule: it cannot become {name}"
        )
