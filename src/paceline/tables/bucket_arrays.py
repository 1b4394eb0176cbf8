"""Sets of buckets as arrays for kernels; :mod:`paceline.protocol.buckets` has them as integers."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from paceline.kernels import index
from paceline.kernels.dedup import select
from paceline.protocol.buckets import NUM_BYTES, Buckets, to_bytes
from paceline.tables.ranges import bucket_width
from paceline.tables.spec import TableSpec

_NUM_WORDS = NUM_BYTES // 8


def to_words(buckets: Buckets) -> npt.NDArray[np.uint64]:
    """Return a set as bits (uint64 [8])."""
    return np.frombuffer(to_bytes(buckets), "<u8").astype(np.uint64)


def to_flags(buckets: Buckets) -> npt.NDArray[np.bool_]:
    """Return a set as one flag for each bucket (bool [512])."""
    return np.unpackbits(np.frombuffer(to_bytes(buckets), np.uint8), bitorder="little").view(np.bool_)


def from_flags(flags: npt.NDArray[np.bool_]) -> Buckets:
    """Return the set for an array of :func:`to_flags`."""
    return int.from_bytes(np.packbits(flags, bitorder="little").tobytes(), "little")


def buckets_of_keys(keys: npt.NDArray[np.uint64]) -> Buckets:
    """Return the buckets of a sparse table's keys (uint64 [n])."""
    words = np.empty(_NUM_WORDS, "<u8")
    index.bucket_words(keys, words)
    return int.from_bytes(words.tobytes(), "little")


def dense_buckets(size: int, keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """Return the buckets of keys of a dense table (int64 [n])."""
    return (keys // np.uint64(bucket_width(size))).astype(np.int64)


def positions_in(spec: TableSpec, keys: npt.NDArray[np.uint64], buckets: Buckets) -> npt.NDArray[np.int64]:
    """Return the positions, in order, of the keys (uint64 [n]) of a table that belong to these buckets."""
    if spec.kind == "dense":
        return np.flatnonzero(to_flags(buckets)[dense_buckets(spec.size, keys)])
    chosen = np.empty(len(keys), np.int64)
    return chosen[: select(keys, to_words(buckets), chosen)]
