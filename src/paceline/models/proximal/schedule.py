"""The blocks of columns, their order, the blocks in flight at the same time, and the end of training."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import numpy.typing as npt

from paceline.kernels.hashing import mix
from paceline.tables.types import Keys

_SALT: Final = np.uint64(0x626C_6F63_6B73)  # without it, a block's keys would all be on one server
_SEED: Final = 14


def places_of(keys: Keys) -> Keys:
    """Return the positions (uint64 [n]) of keys in a random order of all 2^64 keys."""
    places: Keys = mix(keys ^ _SALT)
    return places


def count_blocks(block_ratio: float, num_values: int, num_examples: int, num_columns: int) -> int:
    """Return the number of blocks: `block_ratio` times an example's mean number of values, but at most one per column.

    With this number, an example has on average 1 / `block_ratio` values in a block, so two columns of a block rarely
    share an example.
    """
    wanted = math.ceil(block_ratio * num_values / max(num_examples, 1))
    return max(1, min(wanted, num_columns))


def block_starts(places: Keys, num_blocks: int) -> npt.NDArray[np.int64]:
    """Return the starts of blocks (int64 [num_blocks + 1]) among columns with sorted `places`."""
    limits = [(number << 64) // num_blocks for number in range(1, num_blocks)]
    starts = np.searchsorted(places, np.array(limits, np.uint64))
    return np.concatenate([[0], starts, [len(places)]]).astype(np.int64)


def block_order(num_blocks: int) -> npt.NDArray[np.int64]:
    """Return a random order of blocks. It is the same for all workers and passes, so that passes are comparable."""
    return np.random.default_rng(_SEED).permutation(num_blocks)


def moving_with(step: int, num_steps: int, max_delay: int) -> range:
    """Return the steps whose blocks may change while `step` is in flight: up to `max_delay` steps before and after.

    A pass ends when all its blocks are done.
    """
    return range(max(step - max_delay, 0), min(step + max_delay + 1, num_steps))


FULL_PASS_INTERVAL: Final = 10
"""Every 10th pass covers all columns, including those that the KKT filter would skip."""


class Convergence:
    """The objective of successive passes, starting with its value before the first pass."""

    def __init__(self, objective: float, tolerance: float, max_passes: int) -> None:
        self._objective = objective
        self._tolerance = tolerance
        self._max_passes = max_passes
        self.num_passes = 0
        self.change = math.inf
        """The reduction of the objective in the last pass, as a fraction of the current objective."""
        self.is_over_all = True
        """Whether the next pass covers all columns."""
        self.has_converged = False

    def record_pass(self, objective: float) -> None:
        """Record the objective after a pass.

        A pass is steady if it changes the objective by less than the tolerance. The solver stops after a steady pass
        over all columns. After a steady pass over some columns, the next pass covers all columns, because the KKT
        filter may have skipped columns that still change. At least one in :data:`FULL_PASS_INTERVAL` passes covers all
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
