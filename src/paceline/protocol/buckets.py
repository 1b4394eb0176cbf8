"""Sets of buckets as integers: bit b of a mask stands for bucket b.

A union is ``a | b``, an intersection ``a & b``, a difference ``a & ~b``; 0 is the empty set. All 512 buckets fit
into one integer of 64 bytes, so a set operation takes less than 0.1 µs; with ``frozenset`` it takes 3 to 5.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, TypeAlias

from paceline.errors import ProtocolError
from paceline.protocol.placement import NUM_BUCKETS

Buckets: TypeAlias = int
"""A set of buckets; a non-negative integer."""

ALL: Final[Buckets] = (1 << NUM_BUCKETS) - 1
"""Every bucket of a table."""

NUM_BYTES: Final = NUM_BUCKETS // 8
"""The size of a set on the wire, in bytes."""


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


def count(mask: Buckets) -> int:
    """Return the number of buckets in a set."""
    return mask.bit_count()


def to_bytes(mask: Buckets) -> bytes:
    """Encode a set of buckets below NUM_BUCKETS for the wire: 64 bytes, bucket 0 in the lowest bit of the first."""
    return mask.to_bytes(NUM_BYTES, "little")


def from_bytes(data: bytes | bytearray | memoryview) -> Buckets:
    """Decode a set that :func:`to_bytes` encoded.

    Raises:
        ProtocolError: the length is not 64 bytes.
    """
    if len(data) != NUM_BYTES:
        raise ProtocolError(f"A set of buckets has {NUM_BYTES} bytes on the wire, got {len(data)}.")
    return int.from_bytes(data, "little")
