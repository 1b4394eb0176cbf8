"""Formulas of delayed block proximal gradient that each worker computes: active columns, violations, radii.

All workers read the same weights and gradients from the servers, so their results agree without communication.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from paceline.errors import UsageError
from paceline.tables.rules.proximal import LEAST, MOST
from paceline.tables.settings import TINY, check_number
from paceline.tables.types import Doubles, Floats

Flags = npt.NDArray[np.bool_]
Positions = npt.NDArray[np.int64]
"""Column numbers."""
THRESHOLD_RATIO: Final = 10.0
"""Ratio between the KKT filter's threshold and the largest violation per example."""


class ProximalBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of ``--solver proximal-blocks``. Raises UsageError for numbers out of range."""

    l1: float = 1.0
    """Weight of Σ|w|, added to the summed loss."""
    l2: float = 0.0
    """Weight of Σw²/2."""
    max_delay: int = 0
    """A block waits for all earlier blocks except the last `max_delay`."""
    block_ratio: float = 4.0
    """The number of blocks, as a multiple of the mean number of nonzero values per example."""
    tolerance: float = 1e-9
    """Training ends if a pass over all columns changes the objective by less than this fraction."""
    max_passes: int = 5000

    def __post_init__(self) -> None:
        for name, value in (("l1", self.l1), ("l2", self.l2)):
            check_number(f"--{name} {value:g}", value, 0)
        if self.max_delay < 0:
            raise UsageError(f"--max-delay {self.max_delay}: expected a whole number of 0 or more")
        check_number(f"--block-ratio {self.block_ratio:g}", self.block_ratio, TINY)
        if not 0 < self.tolerance < 1:
            raise UsageError(f"--tolerance {self.tolerance:g}: expected a number greater than 0 and less than 1")

    def settings(self) -> dict[str, Any]:
        return {"solver": "proximal-blocks", **msgspec.structs.asdict(self)}


def violations(weights: Doubles, gradients: Doubles, l1: Doubles, l2: Doubles) -> Doubles:
    """Return the violation of each weight's optimality condition: the smallest magnitude of a subgradient.

    `gradients` are the gradients of the loss without the penalties. The violation is 0 if the weight is optimal, given
    the other weights.
    """
    at_zero = np.maximum(np.abs(gradients) - l1, 0.0)
    found: Doubles = np.where(weights == 0, at_zero, np.abs(gradients + l2 * weights + l1 * np.sign(weights)))
    return found


def stay_active(weights: Doubles, gradients: Doubles, l1: Doubles, thresholds: Doubles | Floats) -> Flags:
    """Return a mask of the columns that the KKT filter keeps.

    The filter drops weights of 0 with |gradient| below l1 − threshold. It drops no weight whose l1 is 0, and no weight
    if the threshold is infinite.
    """
    left: Flags = (weights != 0) | (np.abs(gradients) >= l1 - thresholds)
    return left


def filter_threshold(violation: float, num_examples: int) -> float:
    """Return the KKT filter's threshold for a pass, given the largest violation in the previous pass."""
    return THRESHOLD_RATIO * violation / max(num_examples, 1)


def next_radii(changes: Doubles, units: Floats) -> Floats:
    """Return the radii of the trust regions after steps: the same values that the servers' update rule computes."""
    radii: Floats = np.minimum(np.float32(MOST) * units, 2 * np.abs(changes).astype(np.float32) + LEAST * units)
    return radii.astype(np.float32)


def penalties(weights: Doubles, l1: Doubles, l2: Doubles) -> Doubles:
    """Return each weight's penalty in the objective."""
    found: Doubles = l1 * np.abs(weights) + l2 * weights * weights / 2
    return found
