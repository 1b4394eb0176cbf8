"""Initial values of parameters: a function of seed, key and element alone.

So they do not depend on the order in which rows appear, on the server that holds them or on the number of
servers, and a row that was never pushed reads the same on every pull without being stored. The generator is
counter-based in the manner of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), with
splitmix64's finalizer.
"""

from __future__ import annotations

import numpy as np

from .index import mix
from .jit import njit

ZEROS, CONSTANT, UNIFORM, NORMAL = range(4)

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_S11 = np.uint64(11)
_STEP = 1.0 / (1 << 53)
_U1 = np.uint64(1)


@njit(cache=True, nogil=True)
def _uniform(seed, key, counter):  # type: ignore[no-untyped-def]
    """Return a float64 in (0, 1)."""
    bits = mix(mix(key ^ mix(seed + _GOLDEN)) + counter * _GOLDEN)
    return (np.float64(bits >> _S11) + 0.5) * _STEP


@njit(cache=True, nogil=True, error_model="numpy")
def initial_value(kind, seed, key, element, a, b):  # type: ignore[no-untyped-def]
    """Return one element's initial value (float32): kind ZEROS, CONSTANT(a), UNIFORM[a, b], NORMAL(a, b²)."""
    if kind == ZEROS:
        return np.float32(0)
    if kind == CONSTANT:
        return np.float32(a)
    counter = np.uint64(element) * np.uint64(2)
    first = _uniform(seed, key, counter)
    if kind == UNIFORM:
        return np.float32(a + (b - a) * first)
    second = _uniform(seed, key, counter + _U1)  # Box and Muller, 1958
    return np.float32(a + b * np.sqrt(-2.0 * np.log(first)) * np.cos(2.0 * np.pi * second))
