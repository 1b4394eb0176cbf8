"""Count features in little memory with a count-min sketch, whose blocks are rows of a table on servers.

Each feature has three cells, and its count is at most the smallest of them (Cormode and Muthukrishnan, "An improved
data stream summary: the count-min sketch and its applications", J. Algorithms 2005). The estimate is never too low. It
is too high only if other features share all three cells. The three cells lie in one block of eight, which is one row
(as in the blocked Bloom filters of Putze, Sanders and Singler, "Cache-, hash- and space-efficient Bloom filters", WEA
2007). So a feature needs one lookup, and one key in a message.

Blocks are rows of a sparse table, so they are replicated, moved and snapshotted. Servers add the workers' pushes.
Counts never decrease and stop at the limit, so a worker reads the count of a frequent feature only once. The worker
caches the most recent frequent features (:class:`FrequentFeatures`).
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from paceline.data.key_scaling import distinct_keys
from paceline.errors import UsageError
from paceline.kernels.features.sketch import BLOCK, add_counts, least_counts, note_frequent, place_features
from paceline.kernels.hashing import mix
from paceline.tables.types import Floats, Keys

MOST_COUNTED: Final = 1 << 23  # float32 is exact up to this number
_MOST_CELLS: Final = 1 << 40
_NUM_REMEMBERED: Final = 1 << 17


def check_counting(min_count: int, count_cells: int) -> None:
    if not 1 <= min_count <= MOST_COUNTED:
        raise UsageError(f"--min-count {min_count}: expected 1 to {MOST_COUNTED:,}")
    if not 1 <= count_cells <= _MOST_CELLS:
        raise UsageError(f"--count-cells {count_cells}: expected 1 to {_MOST_CELLS:,}")


class FrequentFeatures:
    """A cache (1 MiB) of the features that this worker most recently found frequent."""

    def __init__(self) -> None:
        self.places = np.zeros(_NUM_REMEMBERED, np.uint64)
        """Keys, each at the index of its hash; an empty position has a key with another hash."""
        last = np.uint64(_NUM_REMEMBERED - 1)
        of_zero = int(mix(0)[0] & last)
        self.places[of_zero] = next(key for key in range(1, 3) if int(mix(key)[0] & last) != of_zero)


class FeatureCounts:
    """The counts of a minibatch's features in a sketch of `num_cells` cells, except features known to be frequent.

    `features` uint64 [n]; `blocks` uint64 [m] are the distinct keys of their rows in the table.
    """

    def __init__(self, features: Keys, num_cells: int, frequent: FrequentFeatures) -> None:
        self._features, self._frequent = features, frequent
        chosen, blocks = np.empty(len(features), np.int64), np.empty(len(features), np.uint64)
        masks = np.empty(len(features), np.uint8)
        num_blocks = np.uint64(-(-num_cells // BLOCK))
        count = place_features(features, num_blocks, frequent.places, chosen, blocks, masks)
        self._chosen, self._masks = chosen[:count], masks[:count]
        self.blocks, self._places = distinct_keys(blocks[:count])

    def have_occurred(self, rows: Floats, occurrences: npt.NDArray[np.int64], times: int) -> npt.NDArray[np.bool_]:
        """Return whether each feature's estimated count is at least `times` (bool [n]), and cache these features.

        `rows` float32 [m, BLOCK] are the blocks' counts, to which `occurrences` (int64 [n]) are added.
        """
        found = np.ones(len(self._features), np.bool_)
        least = np.empty(len(self._chosen), np.float32)
        least_counts(rows.reshape(-1), self._places, self._masks, least)
        are_frequent = least + occurrences[self._chosen] >= times
        note_frequent(self._features, self._chosen, are_frequent, self._frequent.places)
        found[self._chosen] = are_frequent
        return found

    def added(self, rows: Floats, occurrences: npt.NDArray[np.int64], times: int) -> tuple[Keys, Floats]:
        """Return the blocks with a cell below `times`, and their increments (float32 [k, BLOCK])."""
        added, is_written = np.empty(rows.size, np.float32), np.empty(len(self.blocks), np.uint8)
        arguments = self._chosen, rows.reshape(-1), self._places, self._masks, np.float32(times)
        add_counts(occurrences, *arguments, added, is_written)
        written = is_written.view(np.bool_)
        return self.blocks[written], added.reshape(-1, BLOCK)[written]
