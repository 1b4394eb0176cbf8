"""The reference of :mod:`paceline.kernels.checksum` in plain Python."""

from __future__ import annotations

from paceline.kernels.checksum import PRIMES
from paceline.kernels.hashing import MASK


def reference_xxh64(data: bytes) -> int:
    """Return the checksum of any number of bytes."""
    p1, p2, p3, p4, p5 = PRIMES

    def rotated(x: int, count: int) -> int:
        return (x << count | x >> (64 - count)) & MASK

    def mixed(lane: int, word: int) -> int:
        return rotated((lane + word * p2) & MASK, 31) * p1 & MASK

    whole = len(data) // 32 * 32
    h = p5
    if whole:
        lanes = [(p1 + p2) & MASK, p2, 0, -p1 & MASK]
        for at in range(0, whole, 8):
            lanes[at // 8 % 4] = mixed(lanes[at // 8 % 4], int.from_bytes(data[at : at + 8], "little"))
        h = sum(rotated(lane, count) for lane, count in zip(lanes, (1, 7, 12, 18), strict=True)) & MASK
        for lane in lanes:
            h = ((h ^ mixed(0, lane)) * p1 + p4) & MASK
    h, tail = (h + len(data)) & MASK, data[whole:]
    while len(tail) >= 8:
        h, tail = rotated(h ^ mixed(0, int.from_bytes(tail[:8], "little")), 27) * p1 + p4 & MASK, tail[8:]
    if len(tail) >= 4:
        h, tail = (rotated(h ^ int.from_bytes(tail[:4], "little") * p1 & MASK, 23) * p2 + p3) & MASK, tail[4:]
    for byte in tail:
        h = rotated(h ^ byte * p5 & MASK, 11) * p1 & MASK
    for shift, prime in ((33, p2), (29, p3), (32, 1)):
        h = (h ^ h >> shift) * prime & MASK
    return h
