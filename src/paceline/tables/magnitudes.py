"""Bound the numbers in a server's part of a table, so that most pushes need no check for overflow.

Finite gradients can overflow in the update rule, for example in Adagrad's square. A check of every record (values and
state) after every push would cost more than the push. Therefore each part of a table keeps upper bounds: one for the
magnitudes of all values, and one for each number of the update rule's state. A push raises the bounds by the largest
change that the rule can make with the push's largest gradient. (The check for NaN computes the largest gradient
anyway.)

While the bounds are far below the largest float32, no result and no intermediate value can overflow. If the bounds are
higher, or if the rule has no bounds, a push is first tried on a copy of its records
(:meth:`paceline.tables.part.TablePart.trial`).

The bounds hold for pushes without duplicate keys. Clients send no duplicate keys.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from paceline.tables.initializers import Initializer
from paceline.tables.rules import UpdateRule
from paceline.tables.rules.growth import UNKNOWN, Bounds

_SAFE: Final = 1e37
"""The largest safe bound. Its distance to the largest float32 (3.4e38) is enough for all rounding errors."""
_AHEAD: Final = 64
"""The bounds are raised for this number of pushes in one step. The gradients of these pushes may be up to `_MARGIN`
times as large as those of the first push.
"""
_MARGIN: Final = 4.0


class Magnitudes:
    """Upper bounds of the numbers in the records of one server's part of a table."""

    def __init__(self, rule: UpdateRule, initializer: Initializer, dim: int) -> None:
        self._dim = dim
        self._rule = rule
        self._has_bounds = rule.has_bounds()
        self._initial = rule.initial_bounds(initializer.largest)
        self.bounds = self._formed = self._initial
        self._left = 0  # the number of later pushes for which the bounds are already raised
        self._top = 0.0
        self._num_tried = 0

    def set_rule(self, rule: UpdateRule) -> None:
        """Set a rule with new hyperparameters. `_formed` keeps the bounds of records written with the old ones."""
        self._rule = rule
        self._formed = self.bounds
        self._left = 0

    def take(self, gradient: float) -> bool:
        """Raise the bounds for a push whose largest gradient is `gradient`. Return whether the push cannot overflow.

        If the push may overflow, change nothing and return False.
        """
        if self._left and gradient <= self._top:
            self._left -= 1
            return True
        return self._account_ahead(gradient * _MARGIN, _AHEAD) or self._account_ahead(gradient, 1)

    def _account_ahead(self, gradient: float, num: int) -> bool:
        if not self._has_bounds or not self.bounds.values <= _SAFE:
            return False
        bounds, peak = self._rule.grown(self.bounds, self._formed, gradient, num)
        bounds |= self.bounds  # the current bounds remain valid for rows that the push does not update
        is_safe = peak <= _SAFE and all(bound <= _SAFE for bound in bounds)  # False if a bound is NaN
        if is_safe:
            self.bounds, self._top, self._left = bounds, gradient, num - 1
        return is_safe

    def take_unseen(self, gradient: float) -> None:
        """Raise the bounds for a push that another server forwarded and has already checked."""
        if not self.take(gradient):
            self.bounds = UNKNOWN
            self._left = 0

    def widen(self, records: npt.NDArray[np.float32]) -> None:
        """Raise the bounds for records (float32 [n, words]) that were written, loaded, or computed on a copy."""
        if len(records) and self._has_bounds:
            found = self._bounds_of(records)
            self.bounds |= found
            self._formed |= found
            self._left = 0

    def is_loose(self, num_tried: int, num_rows: int) -> bool:
        """Record that pushes of `num_tried` rows were first tried on a copy.

        Return whether at least `num_rows` rows in total were tried on copies so far. In this case, the caller should
        compute exact bounds.
        """
        self._num_tried += num_tried
        return self._has_bounds and self._num_tried >= num_rows

    def reset(self) -> None:
        self.bounds = self._formed = self._initial
        self._left = self._num_tried = 0

    def _bounds_of(self, records: npt.NDArray[np.float32]) -> Bounds:
        dim = self._dim
        planes = [records[:, at : at + dim] for at in range(0, dim * (1 + self._rule.num_states), dim)]
        with np.errstate(all="ignore"):
            tops = [float(np.abs(plane).max()) for plane in planes]
            squares = self._rule.squares
            has_roots = not squares or float(planes[squares].min()) >= 0.0
            counts = not self._rule.has_count or float(records[:, -1].min()) >= 0.0
            if not all(top <= _SAFE for top in tops) or not has_roots or not counts:
                return UNKNOWN
            ratio = self._rule.ratio_of(planes)
        tops += [0.0, 0.0]
        return Bounds(tops[0], tops[1], tops[2], ratio)
