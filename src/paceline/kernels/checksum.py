"""The checksum XXH64. Its computation is faster than memory (Collet, "xxHash fast digest algorithm", 0.1.1)."""

from __future__ import annotations

import numpy as np

from paceline.kernels.jit import njit

PRIMES = (11400714785074694791, 14029467366897019727, 1609587929392839161, 9650029242287828579, 2870177450012600261)
_MASK = (1 << 64) - 1

_P1, _P2, _P3, _P4, _P5 = map(np.uint64, PRIMES)
_STARTS = tuple(np.uint64(each & _MASK) for each in (PRIMES[0] + PRIMES[1], PRIMES[1], 0, -PRIMES[0]))


@njit()
def _rotated(x, count):  # type: ignore[no-untyped-def]
    return (x << np.uint64(count)) | (x >> np.uint64(64 - count))


@njit()
def _round(lane, word):  # type: ignore[no-untyped-def]
    return _rotated(lane + word * _P2, 31) * _P1


@njit(cache=True, nogil=True)
def xxh64(words):  # type: ignore[no-untyped-def]
    """Return the checksum (uint64) of `words` with seed 0.

    `words` is uint64 [n], where n is a positive multiple of 4.
    """
    a, b, c, d = _STARTS
    for at in range(0, words.shape[0], 4):
        a, b = _round(a, words[at]), _round(b, words[at + 1])
        c, d = _round(c, words[at + 2]), _round(d, words[at + 3])
    h = _rotated(a, 1) + _rotated(b, 7) + _rotated(c, 12) + _rotated(d, 18)
    for lane in (a, b, c, d):
        h = (h ^ _round(np.uint64(0), lane)) * _P1 + _P4
    h += np.uint64(words.shape[0] * 8)
    h = (h ^ (h >> np.uint64(33))) * _P2
    h = (h ^ (h >> np.uint64(29))) * _P3
    return h ^ (h >> np.uint64(32))


KERNELS = (xxh64,)


def compile_kernels() -> None:
    """Compile the kernel for the argument types of its callers, or load it from Numba's cache."""
    xxh64(np.zeros(4, np.uint64))
