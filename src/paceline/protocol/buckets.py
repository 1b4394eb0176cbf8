"""Sets of buckets as integers: bit b of a mask stands for bucket b.

A union is ``a | b``, an intersection ``a & b``, a difference ``a & ~b``. A set operation on 512 buckets takes less than
0.1 µs; with ``frozenset`` it takes 3 to 5 µs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, TypeAlias

from paceline.errors import ProtocolError
from paceline.protocol.placement import NUM_BUCKETS

Buckets: TypeAlias = int
ALL: Final[Buckets] = (1 << NUM_BUCKETS) - 1
NUM_BYTES: Final = NUM_BUCKETS // 8


def bucket_set(buckets: Iterable[int]) -> Buckets:
    """Return the set of these buckets; NumPy integers are accepted.

    >>> bucket_set([0, 3])
    9
    """
    mask = 0
    for bucket in buckets:
        mask |= 1 << int(bucket)
    return mask


def buckets_in(mask: Buckets) -> Iterator[int]:
    """Yield the buckets of a set, ascending.

    >>> list(buckets_in(9))
    [0, 3]
    """
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def to_bytes(mask: Buckets) -> bytes:
    """Encode a set of buckets below NUM_BUCKETS as 64 bytes. Bucket 0 is the lowest bit of the first byte."""
    return mask.to_bytes(NUM_BYTES, "little")


def from_bytes(data: bytes | bytearray | memoryview) -> Buckets:
    """Decode the result of :func:`to_bytes`. Raises ProtocolError if the length is not 64 bytes."""
    if len(data) != NUM_BYTES:
        raise ProtocolError(f"A set of buckets has {NUM_BYTES} bytes on the wire, got {len(data)}.")
    return int.from_bytes(data, "little")
