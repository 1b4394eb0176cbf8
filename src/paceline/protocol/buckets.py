"""Sets of buckets as integers: bit b of a mask stands for bucket b.

A union is ``a | b``, an intersection ``a & b``, a difference ``a & ~b``; 0 is the empty set. All 512 buckets fit
into one integer of 64 bytes, so a set operation takes less than 0.1 µs, where a ``frozenset`` takes 3 to 5.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, TypeAlias

from paceline.errors import ProtocolError
from paceline.protocol.placement import NUM_BUCKETS

Buckets: TypeAlias = int
"""A set of buckets; never negative."""

ALL: Final[Buckets] = (1 << NUM_BUCKETS) - 1
"""Every bucket of a table."""

NUM_BYTES: Final = NUM_BUCKETS // 8
"""What a set takes on the wire, in bytes."""


def bucket_set(buckets: Iterable[int]) -> Buckets:
    """The set of these buckets; NumPy's integers are taken too.

    >>> bucket_set([0, 3])
    9
    """
    mask = 0
    for bucket in buckets:
        mask |= 1 << int(bucket)
    return mask


def buckets_in(mask: Buckets) -> Iterator[int]:
    """The buckets of a set, ascending.

    >>> list(buckets_in(9))
    [0, 3]
    """
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def count(mask: Buckets) -> int:
    """How many buckets are in a set."""
    return mask.bit_count()


def to_bytes(mask: Buckets) -> bytes:
    """A set of buckets below NUM_BUCKETS as it travels: 64 bytes, bucket 0 in the lowest bit of the first."""
    return mask.to_bytes(NUM_BYTES, "little")


def from_bytes(data: bytes | bytearray | memoryview) -> Buckets:
    """The set that :func:`to_bytes` wrote.

    Raises:
        ProtocolError: it has not 64 bytes.
    """
    if len(data) != NUM_BYTES:
        raise ProtocolError(f"A set of buckets has {NUM_BYTES} bytes on the wire, {len(data)} were got.")
    return int.from_bytes(data, "little")
