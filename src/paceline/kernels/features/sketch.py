"""Kernels of a count-min sketch in blocks (see :mod:`paceline.models.features.counting`).

A block has :data:`BLOCK` adjacent cells, and :data:`DEPTH` cells of one block count a feature. A hash of the feature
determines the block, and a second hash the cells, as an index of :data:`MASKS`.
"""

from __future__ import annotations

from itertools import combinations
from typing import Final

import numpy as np

from paceline.kernels.index import mix
from paceline.kernels.jit import njit

BLOCK: Final = 8
DEPTH: Final = 3
MASKS: Final = np.array([sum(1 << cell for cell in cells) for cells in combinations(range(BLOCK), DEPTH)], np.uint8)
"""Every choice of DEPTH cells of a block, with a bit for each cell."""

_SECOND_HASH = np.uint64(0x9E3779B97F4A7C15)
_NUM_MASKS = np.uint64(len(MASKS))
_U32 = np.uint64(32)
_INFINITY = np.float32(np.inf)


@njit(cache=True, nogil=True)
def place_features(features, num_blocks, frequent, chosen, blocks, masks):  # type: ignore[no-untyped-def]
    """Write the features to look up and the cells that count each feature; return the number of features.

    `features` uint64 [n]; `num_blocks` uint64. `frequent` uint64 [a power of two] has features that need no look-up,
    each at the index that its hash gives. Out: `chosen` int64, `blocks` uint64 and `masks` uint8, all [n].
    """
    last, count = np.uint64(len(frequent) - 1), np.int64(0)
    for i in range(len(features)):
        hashed = mix(features[i])
        chosen[count] = i  # overwritten later if frequent, because a branch would be mispredicted
        blocks[count] = hashed % num_blocks
        masks[count] = MASKS[np.int64(((mix(hashed + _SECOND_HASH) >> _U32) * _NUM_MASKS) >> _U32)]
        count += np.int64(frequent[np.int64(hashed & last)] != features[i])
    return count


@njit(cache=True, nogil=True)
def least_counts(rows, places, masks, out):  # type: ignore[no-untyped-def]
    """Write the minimum of each feature's cells to `out` (float32 [n]).

    `rows` float32 [blocks * BLOCK]; the cells of feature i are the cells ``masks[i]`` (uint8 [n]) in the row
    ``places[i]`` (int32 [n]).
    """
    for i in range(len(places)):
        at, mask, least = np.int64(places[i]) * BLOCK, masks[i], _INFINITY
        for cell in range(BLOCK):
            if mask >> cell & 1:
                least = min(least, rows[at + cell])
        out[i] = least


@njit(cache=True, nogil=True)
def add_counts(occurrences, chosen, rows, places, masks, enough, out, is_written):  # type: ignore[no-untyped-def]
    """Add occurrences of features to the cells that count them, except cells that have reached `enough` (float32).

    `occurrences` int64 are of all features, and `chosen` int64 [n] selects some; for `rows`, `places` and `masks` see
    :func:`least_counts`. `out` float32 [blocks * BLOCK] is added to `rows`; `is_written` uint8 [blocks] is 1 for
    changed rows.
    """
    out[:] = np.float32(0)
    is_written[:] = 0
    for i in range(len(places)):
        at, mask, times = np.int64(places[i]) * BLOCK, masks[i], np.float32(occurrences[chosen[i]])
        for cell in range(BLOCK):
            if mask >> cell & 1 and rows[at + cell] < enough:
                out[at + cell] += times
                is_written[places[i]] |= times > np.float32(0)


@njit(cache=True, nogil=True)
def note_frequent(features, chosen, is_frequent, frequent):  # type: ignore[no-untyped-def]
    """Write features that are now frequent to `frequent`, the table of :func:`place_features`.

    Each overwrites the feature at the index that its hash gives. The features are those of `features` (uint64) at the
    positions ``chosen[is_frequent]`` (int64 [n], bool [n]).
    """
    last = np.uint64(len(frequent) - 1)
    for i in range(len(chosen)):
        if is_frequent[i]:
            feature = features[chosen[i]]
            frequent[np.int64(mix(feature) & last)] = feature


@njit(cache=True, nogil=True)
def count_occurrences(indices, out):  # type: ignore[no-untyped-def]
    """Write the number of occurrences in `indices` (int32) of each number below ``len(out)`` to `out` (int64)."""
    out[:] = 0
    for i in range(len(indices)):
        out[indices[i]] += 1


KERNELS: Final = (place_features, least_counts, add_counts, note_frequent, count_occurrences)


def compile_kernels() -> None:
    """Compile the kernels for the signatures of the real calls, or load them from Numba's cache."""
    keys, numbers, masks = np.zeros(1, np.uint64), np.zeros(1, np.int64), np.ones(1, np.uint8)
    rows, places = np.zeros(BLOCK, np.float32), np.zeros(1, np.int32)
    place_features(keys, np.uint64(1), keys.copy(), numbers, keys.copy(), masks)
    least_counts(rows, places, masks, np.empty(1, np.float32))
    add_counts(numbers, numbers, rows, places, masks, np.float32(1), rows.copy(), masks.copy())
    note_frequent(keys, numbers, np.zeros(1, np.bool_), keys.copy())
    count_occurrences(places, numbers)
