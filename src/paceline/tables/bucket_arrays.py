"""Sets of buckets as arrays for kernels. :mod:`paceline.protocol.buckets` represents a set of buckets as an integer."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from functools import lru_cache
from operator import itemgetter

import numpy as np
import numpy.typing as npt

from paceline.kernels import index
from paceline.kernels.dedup import select
from paceline.protocol import NUM_BUCKETS
from paceline.protocol.buckets import NUM_BYTES, Buckets, buckets_in, to_bytes
from paceline.tables.spec import TableSpec


def bucket_bounds(size: int, bucket: int) -> tuple[int, int]:
    """Return the range [start, stop) of a dense table's elements in a bucket."""
    width = bucket_width(size)
    return min(bucket * width, size), min((bucket + 1) * width, size)


def bucket_width(size: int) -> int:
    """Return the number of elements in a bucket of a dense table of `size` elements.

    The last buckets may have fewer.
    """
    return max(1, -(-size // NUM_BUCKETS))


def owned_runs(size: int, buckets: Iterable[int]) -> list[tuple[int, int]]:
    """Return the elements of `buckets` (in ascending order) as the fewest possible ranges [start, stop)."""
    runs: list[tuple[int, int]] = []
    for bucket in buckets:
        start, stop = bucket_bounds(size, bucket)
        if start == stop:
            continue
        if runs and runs[-1][1] == start:
            runs[-1] = (runs[-1][0], stop)
        else:
            runs.append((start, stop))
    return runs


@lru_cache(maxsize=64)
def runs_in(size: int, buckets: Buckets) -> Sequence[tuple[int, int]]:
    """Return the elements of `buckets` as the fewest possible ranges [start, stop). Recent results are cached."""
    return tuple(owned_runs(size, buckets_in(buckets)))


def clip_runs(runs: Sequence[tuple[int, int]], start: int, stop: int) -> list[tuple[int, int]]:
    """Return the parts of `runs` (ascending, without overlaps) within [start, stop)."""
    first, end = bisect_right(runs, start, key=itemgetter(1)), bisect_left(runs, stop, key=itemgetter(0))
    found = list(runs[first:end])
    if found:
        found[0] = max(found[0][0], start), found[0][1]
        found[-1] = found[-1][0], min(found[-1][1], stop)
    return found


def range_buckets(size: int, start: int, stop: int) -> Buckets:
    if start >= stop:
        return 0
    width = bucket_width(size)
    return (1 << -(-stop // width)) - (1 << start // width)


_NUM_WORDS = NUM_BYTES // 8


def to_words(buckets: Buckets) -> npt.NDArray[np.uint64]:
    """Return a set of buckets as bits (uint64 [8])."""
    return np.frombuffer(to_bytes(buckets), "<u8").astype(np.uint64)


def to_flags(buckets: Buckets) -> npt.NDArray[np.bool_]:
    """Return a set of buckets as one flag per bucket (bool [512])."""
    return np.unpackbits(np.frombuffer(to_bytes(buckets), np.uint8), bitorder="little").view(np.bool_)


def from_flags(flags: npt.NDArray[np.bool_]) -> Buckets:
    return int.from_bytes(np.packbits(flags, bitorder="little").tobytes(), "little")


def buckets_of_keys(keys: npt.NDArray[np.uint64]) -> Buckets:
    """Return the set of buckets that contain `keys` (uint64 [n]) of a sparse table."""
    words = np.empty(_NUM_WORDS, "<u8")
    index.bucket_words(keys, words)
    return int.from_bytes(words.tobytes(), "little")


def dense_buckets(size: int, keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """Return the bucket number (int64 [n]) of each key of a dense table."""
    return (keys // np.uint64(bucket_width(size))).astype(np.int64)


def positions_in(spec: TableSpec, keys: npt.NDArray[np.uint64], buckets: Buckets) -> npt.NDArray[np.int64]:
    """Return the positions of those `keys` (uint64 [n]) of a table that are in `buckets`, in ascending order."""
    if spec.kind == "dense":
        return np.flatnonzero(to_flags(buckets)[dense_buckets(spec.size, keys)])
    chosen = np.empty(len(keys), np.int64)
    return chosen[: select(keys, to_words(buckets), chosen)]
