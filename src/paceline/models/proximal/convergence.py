"""Convergence of delayed block proximal gradient, confirmed by a pass over all columns."""

from __future__ import annotations

import math
from typing import Final

FULL_PASS_INTERVAL: Final = 10
"""Every 10th pass is over all columns, including those that the KKT filter would skip."""


class Convergence:
    """The objective from pass to pass, starting with its value before the first pass."""

    def __init__(self, objective: float, tolerance: float, max_passes: int) -> None:
        self._objective = objective
        self._tolerance = tolerance
        self._max_passes = max_passes
        self.num_passes = 0
        self.change = math.inf
        """The last pass's reduction of the objective, relative to its current value."""
        self.is_over_all = True
        """Whether the next pass is over all columns."""
        self.has_converged = False

    def note_pass(self, objective: float) -> None:
        """Record the objective after a pass.

        A pass is steady if it changes the objective by less than the tolerance. The solver stops after a steady pass
        over all columns. After any other steady pass, the next pass is over all columns, because the KKT filter may
        have skipped columns that still change. In any case, one in :data:`FULL_PASS_INTERVAL` passes is over all
        columns.
        """
        self.num_passes += 1
        self.change = (self._objective - objective) / max(abs(objective), 1e-300)
        self._objective = objective
        is_steady = abs(self.change) < self._tolerance
        self.has_converged = is_steady and self.is_over_all
        self.is_over_all = is_steady or self.num_passes % FULL_PASS_INTERVAL == 0

    @property
    def is_over(self) -> bool:
        return self.has_converged or self.num_passes >= self._max_passes
