"""Initial values of parameters. They depend only on the seed, the key and the number of the element.

The values do not depend on the order in which rows are created, on the server of a row, or on the number of servers.
A row is stored at its first push. Until then, each pull computes the row's initial values again, with the same result.
The random numbers are hashes of seed, key and counter, computed with the final step of splitmix64 (a counter-based
generator, Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
"""

from __future__ import annotations

import numpy as np

from .index import mix
from .jit import njit

ZEROS, CONSTANT, UNIFORM, NORMAL = range(4)

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_S11 = np.uint64(11)
_STEP = 1.0 / (1 << 53)


@njit(cache=True, nogil=True)
def _uniform(seed, key, counter):  # type: ignore[no-untyped-def]
    """Return a random float64 in (0, 1), which depends only on `seed`, `key` and `counter`."""
    bits = mix(mix(key ^ mix(seed + _GOLDEN)) + counter * _GOLDEN)
    return (np.float64(bits >> _S11) + 0.5) * _STEP


@njit(cache=True, nogil=True, error_model="numpy")
def initial_row(kind, seed, key, out, at, dim, a, b):  # type: ignore[no-untyped-def]
    """Write a row's initial values (float32) to ``out[at : at + dim]``.

    `kind` is ZEROS, CONSTANT (the value a), UNIFORM (between a and b) or NORMAL (mean a and standard deviation b).
    Normal numbers are computed in pairs (Box and Muller, 1958).
    """
    if kind == UNIFORM:
        for j in range(dim):
            out[at + j] = np.float32(a + (b - a) * _uniform(seed, key, np.uint64(2 * j)))
    elif kind == NORMAL:
        for j in range(0, dim, 2):
            radius = b * np.sqrt(-2.0 * np.log(_uniform(seed, key, np.uint64(j))))
            angle = 2.0 * np.pi * _uniform(seed, key, np.uint64(j + 1))
            out[at + j] = np.float32(a + radius * np.cos(angle))
            if j + 1 < dim:
                out[at + j + 1] = np.float32(a + radius * np.sin(angle))
    else:
        for j in range(dim):
            out[at + j] = np.float32(a) if kind == CONSTANT else np.float32(0)
