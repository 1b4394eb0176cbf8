"""When delayed block proximal gradient is done: twice, the second time with a look at all columns."""

from __future__ import annotations

import math
from typing import Final

LOOK_AT_ALL: Final = 10
"""So often a pass is over all columns, though the KKT filter would skip some."""


class Convergence:
    """The objective from pass to pass. The first is what it is before any pass."""

    def __init__(self, objective: float, tolerance: float, max_passes: int) -> None:
        self._objective = objective
        self._tolerance = tolerance
        self._max_passes = max_passes
        self.num_passes = 0
        self.change = math.inf
        """By how much the last pass has lowered the objective, relative to what it is now."""
        self.is_over_all = True
        """Whether the next pass is over all columns."""
        self.has_converged = False

    def note_pass(self, objective: float) -> None:
        """Take note of the objective after a pass.

        Rule 1: a pass has come to rest if the change is below the tolerance. Rule 2: it is the last if it was over all
        columns; else the next one is over all, and must come to rest too: the KKT filter may have hidden a column. Rule
        3: without that, every :data:`LOOK_AT_ALL` passes one is over all.
        """
        self.num_passes += 1
        self.change = (self._objective - objective) / max(abs(objective), 1e-300)
        self._objective = objective
        is_at_rest = abs(self.change) < self._tolerance
        self.has_converged = is_at_rest and self.is_over_all
        self.is_over_all = is_at_rest or self.num_passes % LOOK_AT_ALL == 0

    @property
    def is_over(self) -> bool:
        """Whether there is no further pass."""
        return self.has_converged or self.num_passes >= self._max_passes
