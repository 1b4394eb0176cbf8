"""Which columns are a block, in which order blocks go, and which of them move at the same time."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import numpy.typing as npt

from paceline.kernels.hashing import mix
from paceline.tables.types import Keys

_SALT: Final = np.uint64(0x626C_6F63_6B73)  # so that a block's keys are on all servers, which have them by their hash
_SEED: Final = 14


def places_of(keys: Keys) -> Keys:
    """Return where keys stand (uint64 [n]) among all 2^64 that there can be, in an order that says nothing of them."""
    places: Keys = mix(keys ^ _SALT)
    return places


def count_blocks(block_ratio: float, num_values: int, num_examples: int, num_columns: int) -> int:
    """Return how many blocks of columns there are: `block_ratio` for each value of a mean example, one column at least.

    So an example has 1 / `block_ratio` values in a mean block: columns of a block rarely meet.
    """
    wanted = math.ceil(block_ratio * num_values / max(num_examples, 1))
    return max(1, min(wanted, num_columns))


def block_starts(places: Keys, num_blocks: int) -> npt.NDArray[np.int64]:
    """Return where blocks begin (int64 [num_blocks + 1]) among columns whose `places` are in rising order."""
    limits = [(number << 64) // num_blocks for number in range(1, num_blocks)]
    starts = np.searchsorted(places, np.array(limits, np.uint64))
    return np.concatenate([[0], starts, [len(places)]]).astype(np.int64)


def block_order(num_blocks: int) -> npt.NDArray[np.int64]:
    """Return the order of blocks: random, and the same in all workers and passes, so that passes can be compared."""
    return np.random.default_rng(_SEED).permutation(num_blocks)


def moving_with(step: int, num_steps: int, max_delay: int) -> range:
    """Return the steps of a pass whose blocks may move while that of `step` does: up to `max_delay` before and after.

    A pass ends when all its blocks are done.
    """
    return range(max(step - max_delay, 0), min(step + max_delay + 1, num_steps))
