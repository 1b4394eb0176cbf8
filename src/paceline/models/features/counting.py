"""How often features have occurred, in little memory: a count-min sketch, whose cells are rows of a table on servers.

Of each feature four cells count, one in each row of the sketch, so that its count is at most the least of them
(Cormode and Muthukrishnan, "An improved data stream summary: the count-min sketch and its applications", J. Algorithms
2005). With w cells in a row and T occurrences of all features together, that is too much by more than e·T/w with a
probability of at most e^-4, 2% (their theorem 1); never too little. The four cells are made of two hashes (Kirsch and
Mitzenmacher, "Less hashing, same performance", ESA 2006).

As rows of a sparse table cells are replicated, moved and kept in snapshots as all rows are; servers add what workers
push.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from paceline.data.key_scaling import distinct_keys
from paceline.errors import UsageError
from paceline.kernels.reference import mix
from paceline.tables.types import Floats, Keys

DEPTH = 4
MOST_COUNTED = 1 << 23  # a float32 counts so far exactly
_MOST_CELLS = 1 << 40


def check_counting(min_count: int, count_cells: int) -> None:
    """Raise UsageError unless features can be counted so."""
    if not 1 <= min_count <= MOST_COUNTED:
        raise UsageError(f"--min-count {min_count}: expected 1 to {MOST_COUNTED:,}")
    if not 1 <= count_cells <= _MOST_CELLS:
        raise UsageError(f"--count-cells {count_cells}: expected 1 to {_MOST_CELLS:,}")


class FeatureCounts:
    """The cells of some features in a sketch of :data:`DEPTH` rows of `num_cells` cells.

    `cells` (uint64 [m]) are the distinct keys of the table's rows that count for `features` (uint64 [n]).
    """

    def __init__(self, features: Keys, num_cells: int) -> None:
        hashed = mix(features) if len(features) else features
        width = np.uint64(num_cells)
        first, step = hashed % width, (hashed >> np.uint64(32)) % width
        rows = [np.uint64(row) * width + (first + np.uint64(row) * step) % width for row in range(DEPTH)]
        self.cells, ids = distinct_keys(np.concatenate(rows))
        self._ids = ids.reshape(DEPTH, len(features))

    def estimates(self, counts: Floats) -> Floats:
        """Return how often each feature has occurred, or more, given its cells' counts (float32 [m])."""
        least: Floats = counts[self._ids].min(axis=0)
        return least

    def added(self, occurrences: npt.NDArray[np.int64]) -> Floats:
        """Return what is added to each cell (float32 [m]) when features occur so often more (int64 [n])."""
        repeated = np.broadcast_to(occurrences, self._ids.shape)
        return np.bincount(self._ids.reshape(-1), repeated.reshape(-1), len(self.cells)).astype(np.float32)
