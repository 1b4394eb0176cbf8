"""The kernel that crosses the features of rows (see :mod:`paceline.models.features.interactions`)."""

from __future__ import annotations

import numpy as np

from paceline.kernels.index import mix
from paceline.kernels.jit import njit
from paceline.kernels.reference import MAX_ORDER

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@njit(inline="always")
def cross_keys(one, other):  # type: ignore[no-untyped-def]
    """The key of two features together, whose order counts."""
    return mix(mix(one) + other * _GOLDEN)


@njit(cache=True, nogil=True)
def cross_features(  # type: ignore[no-untyped-def]
    indptr, keys, values, num_categorical, numeric, terms, out_indptr, out_keys, out_values
):
    """Write each row's pairs, and behind them those of its crosses; return how many there are in all.

    `indptr` int64 [rows + 1], `keys` uint64 [pairs], `values` float32 [pairs], or [0] where all are 1. A row has a pair
    for each of `num_categorical` columns, then one for each numeric column that is not missing, whose keys are
    `numeric` (uint64 [n]). `terms` int64 [crosses, 3] are the numbers of the columns that are crossed, the last one -1
    in a cross of two. `out_indptr` int64 [rows + 1]; `out_keys` and `out_values` have room for a pair of each cross in
    each row; the values are not written where all are 1. The key of a cross is made of the columns' in their order, its
    value is the product; where a column is missing there is none.
    """
    places = np.empty(num_categorical + numeric.shape[0], np.int64)
    has_values = values.shape[0] > 0
    to = np.int64(0)
    out_indptr[0] = 0
    for row in range(indptr.shape[0] - 1):
        at, stop = indptr[row], indptr[row + 1]
        for i in range(at, stop):
            out_keys[to] = keys[i]
            if has_values:
                out_values[to] = values[i]
            to += 1
        for column in range(num_categorical):
            places[column] = at if at < stop else -1
            at += 1
        for column in range(numeric.shape[0]):
            is_there = at < stop and keys[at] == numeric[column]
            places[num_categorical + column] = at if is_there else -1
            at += is_there
        for t in range(terms.shape[0]):
            one, other = places[terms[t, 0]], places[terms[t, 1]]
            if one < 0 or other < 0:
                continue
            key = cross_keys(keys[one], keys[other])
            value = values[one] * values[other] if has_values else np.float32(1)
            if terms[t, 2] >= 0:
                third = places[terms[t, 2]]
                if third < 0:
                    continue
                key = cross_keys(key, keys[third])
                if has_values:
                    value *= values[third]
            out_keys[to] = key
            if has_values:
                out_values[to] = value
            to += 1
        out_indptr[row + 1] = to
    return to


KERNELS = (cross_features,)


def compile_kernels() -> None:
    """Compile the kernel, or load it from Numba's cache, for the one signature that real calls have."""
    indptr, keys, values = np.zeros(1, np.int64), np.zeros(1, np.uint64), np.zeros(1, np.float32)
    cross_features(indptr, keys, values, 1, keys, np.zeros((1, MAX_ORDER), np.int64), indptr, keys, values)
