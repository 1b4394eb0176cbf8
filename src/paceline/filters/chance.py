"""Draw random numbers from a seed, so that a message has the same content in every run and on every host."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from paceline.kernels.hashing import MASK, mix
from paceline.tables.types import Keys

_GOLDEN, _M1, _M2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def seed_of(*numbers: int) -> int:
    seed = 0
    for number in numbers:
        seed = (seed + number + _GOLDEN) & MASK
        seed = ((seed ^ (seed >> 30)) * _M1) & MASK
        seed = ((seed ^ (seed >> 27)) * _M2) & MASK
        seed ^= seed >> 31
    return seed


def chances(keys: Keys, seed: int) -> npt.NDArray[np.float64]:
    """Return a uniform random number in [0, 1) for each key."""
    return (mix(keys ^ np.uint64(seed)) >> np.uint64(11)).astype(np.float64) * 2.0**-53
