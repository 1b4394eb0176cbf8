"""Kernels of a count-min sketch, which counts features approximately (:mod:`paceline.models.features.counting`).

The sketch is divided into blocks of :data:`BLOCK` adjacent cells. Each feature is counted in :data:`DEPTH` cells of one
block. A hash of the feature determines the block. A second hash determines the cells, as an index of :data:`MASKS`.
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
"""All choices of DEPTH cells from the cells of a block. A mask has a bit for each cell of the block."""

_SECOND_HASH = np.uint64(0x9E3779B97F4A7C15)
_NUM_MASKS = np.uint64(len(MASKS))
_U32 = np.uint64(32)
_INFINITY = np.float32(np.inf)


@njit(cache=True, nogil=True)
def place_features(features, num_blocks, frequent, chosen, blocks, masks):  # type: ignore[no-untyped-def]
    """Write the features whose counts must be looked up, and the cells of each feature. Return their number.

    `features` is uint64 [n]. `frequent` (uint64, a power of two long) is a hash table of features that are known to be
    frequent, and need no look-up. The results are the positions of the other features (`chosen` int64), their blocks
    (`blocks` uint64) and the masks of their cells (`masks` uint8), all of length n.
    """
    last, count = np.uint64(len(frequent) - 1), np.int64(0)
    for i in range(len(features)):
        hashed = mix(features[i])
        chosen[count] = i  # overwritten later if the feature is frequent: a branch would often be mispredicted
        blocks[count] = hashed % num_blocks
        masks[count] = MASKS[np.int64(((mix(hashed + _SECOND_HASH) >> _U32) * _NUM_MASKS) >> _U32)]
        count += np.int64(frequent[np.int64(hashed & last)] != features[i])
    return count


@njit(cache=True, nogil=True)
def least_counts(rows, places, masks, out):  # type: ignore[no-untyped-def]
    """Write each feature's estimated count to `out` (float32 [n]). It is the minimum of the feature's cells.

    `rows` (float32 [blocks * BLOCK]) has one row of cells for each block. The cells of feature i are in row
    ``places[i]`` (int32 [n]), at the bits of ``masks[i]`` (uint8 [n]).
    """
    for i in range(len(places)):
        at, mask, least = np.int64(places[i]) * BLOCK, masks[i], _INFINITY
        for cell in range(BLOCK):
            if mask >> cell & 1:
                least = min(least, rows[at + cell])
        out[i] = least


@njit(cache=True, nogil=True)
def add_counts(occurrences, chosen, rows, places, masks, enough, out, is_written):  # type: ignore[no-untyped-def]
    """Write to `out` the number that must be added to each cell, so that the sketch counts the features' occurrences.

    Cells that have reached `enough` (float32) do not change. `occurrences` int64 has the number of occurrences of each
    feature, and `chosen` int64 [n] the positions of the features to count. :func:`least_counts` describes `rows`,
    `places` and `masks`. `out` is float32 [blocks * BLOCK]. `is_written` uint8 [blocks] is set to 1 for changed rows.
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
    """Write the features that have become frequent to `frequent`, the hash table of :func:`place_features`.

    They are the features at the positions ``chosen[is_frequent]`` (int64 [n], bool [n]) of `features` (uint64). A
    feature overwrites the previous feature at its index in the table.
    """
    last = np.uint64(len(frequent) - 1)
    for i in range(len(chosen)):
        if is_frequent[i]:
            feature = features[chosen[i]]
            frequent[np.int64(mix(feature) & last)] = feature


@njit(cache=True, nogil=True)
def count_occurrences(indices, out):  # type: ignore[no-untyped-def]
    """Write the number of occurrences of i in `indices` (int32) to ``out[i]`` (int64)."""
    out[:] = 0
    for i in range(len(indices)):
        out[indices[i]] += 1


KERNELS: Final = (place_features, least_counts, add_counts, note_frequent, count_occurrences)


def compile_kernels() -> None:
    """Compile the kernels for the argument types of their callers, or load them from Numba's cache."""
    keys, numbers, masks = np.zeros(1, np.uint64), np.zeros(1, np.int64), np.ones(1, np.uint8)
    rows, places = np.zeros(BLOCK, np.float32), np.zeros(1, np.int32)
    place_features(keys, np.uint64(1), keys.copy(), numbers, keys.copy(), masks)
    least_counts(rows, places, masks, np.empty(1, np.float32))
    add_counts(numbers, numbers, rows, places, masks, np.float32(1), rows.copy(), masks.copy())
    note_frequent(keys, numbers, np.zeros(1, np.bool_), keys.copy())
    count_occurrences(places, numbers)
