"""A checksum that costs less than reading the memory: XXH64 (Collet, "xxHash fast digest algorithm", 0.1.1)."""

from __future__ import annotations

import numpy as np

from paceline.kernels.jit import njit

PRIMES = (11400714785074694791, 14029467366897019727, 1609587929392839161, 9650029242287828579, 2870177450012600261)
STRIPE_BYTES = 32
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
    """The checksum, with seed 0, of `words` (uint64 [n], n a positive multiple of 4), as a uint64."""
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


def reference_xxh64(data: bytes) -> int:
    """The same in plain Python, of any number of bytes."""
    p1, p2, p3, p4, p5 = PRIMES

    def rotated(x: int, count: int) -> int:
        return (x << count | x >> (64 - count)) & _MASK

    def mixed(lane: int, word: int) -> int:
        return rotated((lane + word * p2) & _MASK, 31) * p1 & _MASK

    whole = len(data) // STRIPE_BYTES * STRIPE_BYTES
    h = p5
    if whole:
        lanes = [int(each) for each in _STARTS]
        for at in range(0, whole, 8):
            lanes[at // 8 % 4] = mixed(lanes[at // 8 % 4], int.from_bytes(data[at : at + 8], "little"))
        h = sum(rotated(lane, count) for lane, count in zip(lanes, (1, 7, 12, 18), strict=True)) & _MASK
        for lane in lanes:
            h = ((h ^ mixed(0, lane)) * p1 + p4) & _MASK
    h, rest = (h + len(data)) & _MASK, data[whole:]
    while len(rest) >= 8:
        h, rest = rotated(h ^ mixed(0, int.from_bytes(rest[:8], "little")), 27) * p1 + p4 & _MASK, rest[8:]
    if len(rest) >= 4:
        h, rest = (rotated(h ^ int.from_bytes(rest[:4], "little") * p1 & _MASK, 23) * p2 + p3) & _MASK, rest[4:]
    for byte in rest:
        h = rotated(h ^ byte * p5 & _MASK, 11) * p1 & _MASK
    for shift, prime in ((33, p2), (29, p3), (32, 1)):
        h = (h ^ h >> shift) * prime & _MASK
    return h


KERNELS = (xxh64,)


def compile_kernels() -> None:
    """Compile the kernel, or load it from Numba's cache, for the one signature that real calls have."""
    xxh64(np.zeros(4, np.uint64))
