"""Bound the records of a table part, so that most pushes cannot overflow and need no check of every record.

Finite gradients can overflow in the update rule, for example in Adagrad's square. Checking every record after every
push would cost more than the push. Therefore a part keeps an upper bound of the magnitudes in each plane of its
records. Every push raises the bounds by the rule's largest possible change, given the largest magnitude of the
gradients, which the check for NaN computes anyway. While the bounds are far below the largest float32, neither results
nor intermediate values can overflow. If the bounds are higher, and for rules without bounds, a push is first tried on a
copy of its records (:meth:`paceline.tables.part.TablePart.trial`).

The bounds are valid for pushes without duplicate keys, which clients guarantee.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from paceline.tables.initializers import Initializer
from paceline.tables.rules import UpdateRule
from paceline.tables.rules.growth import UNKNOWN, Bounds

_SAFE: Final = 1e37
"""Limit of safe bounds, which leaves enough room for rounding below the largest float32, 3.4e38."""
_AHEAD: Final = 64
"""The number of future pushes included in the bounds, with gradients up to `_MARGIN` times the first gradients."""
_MARGIN: Final = 4.0


class Magnitudes:
    """The bounds of a part's records."""

    def __init__(self, rule: UpdateRule, initializer: Initializer, dim: int) -> None:
        self._dim = dim
        self._rule = rule
        self._has_bounds = rule.has_bounds()
        self._initial = rule.initial_bounds(initializer.largest)
        self.bounds = self._formed = self._initial
        self._left = 0  # number of future pushes included in the bounds
        self._top = 0.0
        self._num_tried = 0

    def set_rule(self, rule: UpdateRule) -> None:
        """Set new hyperparameters. `_formed` then bounds the records that the former hyperparameters produced."""
        self._rule = rule
        self._formed = self.bounds
        self._left = 0

    def take(self, gradient: float) -> bool:
        """Include a push with gradients up to `gradient`. If the push may overflow, change nothing and return False."""
        if self._left and gradient <= self._top:
            self._left -= 1
            return True
        return self._account_ahead(gradient * _MARGIN, _AHEAD) or self._account_ahead(gradient, 1)

    def _account_ahead(self, gradient: float, num: int) -> bool:
        if not self._has_bounds or not self.bounds.values <= _SAFE:
            return False
        bounds, peak = self._rule.grown(self.bounds, self._formed, gradient, num)
        bounds |= self.bounds  # rows without a gradient do not change
        is_safe = peak <= _SAFE and all(bound <= _SAFE for bound in bounds)  # a NaN gives False
        if is_safe:
            self.bounds, self._top, self._left = bounds, gradient, num - 1
        return is_safe

    def take_unseen(self, gradient: float) -> None:
        """Include a push from another server, which has checked the push."""
        if not self.take(gradient):
            self.bounds = UNKNOWN
            self._left = 0

    def widen(self, records: npt.NDArray[np.float32]) -> None:
        """Include records (float32 [n, words]) that were written, loaded, or the result of a trial."""
        if len(records) and self._has_bounds:
            found = self._bounds_of(records)
            self.bounds |= found
            self._formed |= found
            self._left = 0

    def is_loose(self, num_tried: int, num_rows: int) -> bool:
        """Count the rows of a trial; return whether all trials together had at least `num_rows` rows."""
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
