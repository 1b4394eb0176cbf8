"""Sets of buckets as kernels take them: the integers of :mod:`paceline.protocol.buckets` as arrays, and back."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from paceline.kernels import index
from paceline.protocol.buckets import NUM_BYTES, Buckets, to_bytes

_NUM_WORDS = NUM_BYTES // 8


def to_words(buckets: Buckets) -> npt.NDArray[np.uint64]:
    """Return a set as bits (uint64 [8])."""
    return np.frombuffer(to_bytes(buckets), "<u8").astype(np.uint64)


def to_flags(buckets: Buckets) -> npt.NDArray[np.bool_]:
    """Return a set as one flag for each bucket (bool [512])."""
    return np.unpackbits(np.frombuffer(to_bytes(buckets), np.uint8), bitorder="little").view(np.bool_)


def from_flags(flags: npt.NDArray[np.bool_]) -> Buckets:
    """Return the set that :func:`to_flags` made an array of."""
    return int.from_bytes(np.packbits(flags, bitorder="little").tobytes(), "little")


def buckets_of_keys(keys: npt.NDArray[np.uint64]) -> Buckets:
    """Return the buckets of a sparse table's keys (uint64 [n])."""
    words = np.empty(_NUM_WORDS, np.uint64)
    index.bucket_words(keys, words)
    return int.from_bytes(words.astype("<u8").tobytes(), "little")
