"""How large the records of a table part can be: whether a push may make infinities or NaN, told without looking at one.

The finite gradients of a push can overflow in the update rule: a square in Adagrad's, a product with a large rate. To
look at every record after every push would cost more than the push. So a part keeps an upper bound of the magnitudes in
each plane of its records, and raises it with every push by what the rule can add to any record, given the greatest
magnitude of the gradients, which is found by the pass that looks for NaN anyway. While the bounds stay far below the
greatest float32 nothing can have overflowed, on the way neither. Else, and where a rule has no bounds here, the push is
tried on a copy of its records first (:meth:`paceline.tables.part.TablePart.trial`).

The bounds hold for pushes in which no key stands twice, as clients send them.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from paceline.tables.initializers import Initializer
from paceline.tables.rules import UpdateRule
from paceline.tables.rules.growth import UNKNOWN, Bounds

_SAFE: Final = 1e37
"""Bounds up to this are far enough below the greatest float32, 3.4e38, for what rounding adds."""
_AHEAD: Final = 64
"""So many pushes are looked ahead, with gradients up to `_MARGIN` times those of the first: the next need no look."""
_MARGIN: Final = 4.0


class Magnitudes:
    """The bounds of one part's records."""

    def __init__(self, rule: UpdateRule, initializer: Initializer, dim: int) -> None:
        self._dim = dim
        self._rule = rule
        self._has_bounds = rule.has_bounds()
        self._initial = rule.initial_bounds(initializer.largest)
        self.bounds = self._formed = self._initial
        self._left = 0  # so many more pushes, of gradients up to the top, are accounted for in the bounds
        self._top = 0.0
        self._num_tried = 0

    def set_rule(self, rule: UpdateRule) -> None:
        """Take other hyperparameters: no record there was formed by them."""
        self._rule = rule
        self._formed = self.bounds
        self._left = 0

    def take(self, gradient: float) -> bool:
        """Take note of a push with gradients up to `gradient`; return False, and do not, if it may overflow."""
        if self._left and gradient <= self._top:
            self._left -= 1
            return True
        return self._look_ahead(gradient * _MARGIN, _AHEAD) or self._look_ahead(gradient, 1)

    def _look_ahead(self, gradient: float, num: int) -> bool:
        if not self._has_bounds or not self.bounds.values <= _SAFE:
            return False
        bounds, peak = self._rule.grown(self.bounds, self._formed, gradient, num)
        bounds |= self.bounds  # rows without a gradient stay
        is_safe = peak <= _SAFE and all(bound <= _SAFE for bound in bounds)  # not where one of them is NaN
        if is_safe:
            self.bounds, self._top, self._left = bounds, gradient, num - 1
        return is_safe

    def take_unseen(self, gradient: float) -> None:
        """Take note of a push that another server has looked at."""
        if not self.take(gradient):
            self.bounds = UNKNOWN
            self._left = 0

    def widen(self, records: npt.NDArray[np.float32]) -> None:
        """Take note of records (float32 [n, words]) that are written, loaded, or the outcome of a trial."""
        if len(records) and self._has_bounds:
            found = self._bounds_of(records)
            self.bounds |= found
            self._formed |= found
            self._left = 0

    def is_loose(self, num_tried: int, num_rows: int) -> bool:
        """Count the rows of a trial; return whether there were so many that to look at all rows costs little."""
        self._num_tried += num_tried
        return self._has_bounds and self._num_tried >= num_rows

    def begin_anew(self) -> None:
        """Forget the bounds: all records are going to be looked at."""
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
