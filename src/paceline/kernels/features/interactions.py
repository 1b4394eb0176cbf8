"""Kernels that add crosses (features that combine two or three columns) to rows.

:mod:`paceline.models.features.interactions` calls them.
"""

from __future__ import annotations

import numpy as np

from paceline.kernels.index import mix
from paceline.kernels.jit import njit

MAX_ORDER = 3
"""The maximum number of columns in a cross."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@njit(inline="always")
def cross_keys(one, other):  # type: ignore[no-untyped-def]
    """Return the key of the cross of two features. The key depends on their order."""
    return mix(mix(one) + other * _GOLDEN)


@njit(cache=True, nogil=True)
def cross_features(  # type: ignore[no-untyped-def]
    indptr, keys, values, num_categorical, numeric, terms, out_indptr, out_keys, out_values
):
    """Write the pairs (key, value) of each row, followed by the pairs of its crosses. Return the number of pairs.

    The rows are `indptr` int64 [rows + 1], `keys` uint64 [pairs] and `values` float32 [pairs]. `values` has length 0 if
    all values are 1. A row has a pair for each of `num_categorical` columns, then a pair for each numeric column that
    is not missing. The keys of numeric columns are `numeric` (uint64 [n]). `terms` int64 [crosses, 3] has the numbers
    of the columns of each cross; the third number is -1 in a cross of two columns.

    The key of a cross combines the keys of its columns in order, and its value is the product of their values. If a row
    lacks one of the columns, it does not get the cross. `out_indptr` is int64 [rows + 1]. `out_keys` and `out_values`
    must have room for all crosses of all rows. `out_values` is not written if all values are 1.
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


@njit(cache=True, nogil=True)
def group_fields(indptr, keys, fields, are_sorted, starts, order):  # type: ignore[no-untyped-def]
    """Sort the pairs (key, value) of each row by field, and write their positions.

    `fields` int32 [pairs] has the field of each pair. The results are `order` and `starts`. `order` int64 [pairs] has
    the positions of a row's pairs in the order of fields. Within field f, the pairs have the order of keys if
    ``are_sorted[f]`` (uint8 [fields]) is 1. `starts` int64 [rows, fields + 1] has the start of each field in `order`.
    """
    num_fields = are_sorted.shape[0]
    for row in range(indptr.shape[0] - 1):
        own = starts[row]
        own[:] = 0
        for i in range(indptr[row], indptr[row + 1]):
            own[fields[i] + 1] += 1
        own[0] = indptr[row]
        for field in range(num_fields):
            own[field + 1] += own[field]
        for i in range(indptr[row], indptr[row + 1]):
            order[own[fields[i]]] = i
            own[fields[i]] += 1
        for field in range(num_fields - 1, -1, -1):
            own[field + 1] = own[field]
        own[0] = indptr[row]
        for field in range(num_fields):
            first, stop = own[field], own[field + 1]
            if are_sorted[field] == 1 and stop - first > 1:
                by_key = np.argsort(keys[order[first:stop]])
                order[first:stop] = order[first:stop][by_key]


@njit(cache=True, nogil=True)
def count_crosses(starts, terms):  # type: ignore[no-untyped-def]
    """Return the number of pairs that :func:`cross_fields` adds for these `starts` and `terms`."""
    total = np.int64(0)
    for row in range(starts.shape[0]):
        for t in range(terms.shape[0]):
            one, other, third = terms[t, 0], terms[t, 1], terms[t, 2]
            n = starts[row, one + 1] - starts[row, one]
            m = starts[row, other + 1] - starts[row, other]
            if third < 0:
                total += n * (n - 1) // 2 if one == other else n * m
                continue
            k = starts[row, third + 1] - starts[row, third]
            if one == third:
                total += n * (n - 1) * (n - 2) // 6
            elif one == other:
                total += n * (n - 1) // 2 * k
            elif other == third:
                total += n * (m * (m - 1) // 2)
            else:
                total += n * m * k
    return total


@njit(cache=True, nogil=True)
def cross_fields(indptr, keys, values, starts, order, terms, out_indptr, out_keys, out_values):  # type: ignore[no-untyped-def]
    """Write the pairs (key, value) of each row, followed by the pairs of its crosses. A field may have several pairs.

    :func:`group_fields` writes `starts` and `order`. `terms` has the numbers of the fields of each cross, in ascending
    order. :func:`cross_features` describes the other arguments. A cross combines each choice of one pair from each of
    its fields. If a cross has a field twice, it combines every two of its pairs.
    """
    has_values = values.shape[0] > 0
    to = np.int64(0)
    out_indptr[0] = 0
    for row in range(indptr.shape[0] - 1):
        for i in range(indptr[row], indptr[row + 1]):
            out_keys[to] = keys[i]
            if has_values:
                out_values[to] = values[i]
            to += 1
        for t in range(terms.shape[0]):
            one, other, third = terms[t, 0], terms[t, 1], terms[t, 2]
            for i in range(starts[row, one], starts[row, one + 1]):
                a = order[i]
                for j in range(i + 1 if other == one else starts[row, other], starts[row, other + 1]):
                    b = order[j]
                    key = cross_keys(keys[a], keys[b])
                    value = values[a] * values[b] if has_values else np.float32(1)
                    if third < 0:
                        out_keys[to] = key
                        if has_values:
                            out_values[to] = value
                        to += 1
                        continue
                    for k in range(j + 1 if third == other else starts[row, third], starts[row, third + 1]):
                        out_keys[to] = cross_keys(key, keys[order[k]])
                        if has_values:
                            out_values[to] = value * values[order[k]]
                        to += 1
        out_indptr[row + 1] = to
    return to


KERNELS = (cross_features, group_fields, count_crosses, cross_fields)


def compile_kernels() -> None:
    """Compile the kernels for the argument types of their callers, or load them from Numba's cache."""
    indptr, keys, values = np.zeros(1, np.int64), np.zeros(1, np.uint64), np.zeros(1, np.float32)
    terms, starts = np.zeros((1, MAX_ORDER), np.int64), np.zeros((0, 2), np.int64)
    cross_features(indptr, keys, values, 1, keys, terms, indptr, keys, values)
    group_fields(indptr, keys, np.zeros(1, np.int32), np.zeros(1, np.uint8), starts, indptr)
    count_crosses(starts, terms)
    cross_fields(indptr, keys, values, starts, indptr, terms, indptr, keys, values)
