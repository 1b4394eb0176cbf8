"""The elements of a dense table in each bucket: rules that servers and clients share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

from paceline.protocol import NUM_BUCKETS
from paceline.protocol.buckets import Buckets, buckets_in


def bucket_bounds(size: int, bucket: int) -> tuple[int, int]:
    """Return the range [start, stop) of a dense table's elements in a bucket."""
    width = bucket_width(size)
    return min(bucket * width, size), min((bucket + 1) * width, size)


def bucket_width(size: int) -> int:
    """Return the number of elements in a bucket of a dense table of `size` elements (the last buckets have fewer)."""
    return max(1, -(-size // NUM_BUCKETS))


def owned_runs(size: int, buckets: Iterable[int]) -> list[tuple[int, int]]:
    """Return the elements of rising `buckets` of a dense table as the fewest ranges [start, stop)."""
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
    """Return the elements of a set of buckets as :func:`owned_runs` does, with a cache of recent sets."""
    return tuple(owned_runs(size, buckets_in(buckets)))


def clip_runs(runs: Sequence[tuple[int, int]], start: int, stop: int) -> list[tuple[int, int]]:
    """Return the parts of `runs` within [start, stop)."""
    return [(max(a, start), min(b, stop)) for a, b in runs if a < stop and b > start]


def range_buckets(size: int, start: int, stop: int) -> Buckets:
    """Return the buckets that hold the elements [start, stop) of a dense table."""
    if start >= stop:
        return 0
    width = bucket_width(size)
    return (1 << -(-stop // width)) - (1 << start // width)
