"""Kernels that scale the numbers of columns (see :mod:`paceline.data.scales.scaling`)."""

from __future__ import annotations

import numpy as np

from paceline.kernels.jit import njit

MOST_DEVIATIONS = 1000.0
"""The largest distance of a scaled value from the mean; values farther away are clipped."""


@njit()
def centre_number(value, centre):  # type: ignore[no-untyped-def]
    """Return `value` minus `centre` as float64, rounded to float32."""
    return np.float64(np.float32(value - centre))


@njit()
def scale_number(number, unit, mean, deviation, centre):  # type: ignore[no-untyped-def]
    """Return (value - mean) / deviation (float64); if `unit` is not 0, sign(x) log(1 + |x| / unit) replaces the value.

    `number` is the value returned by :func:`centre_number`, and does not change if `deviation` is 0.
    """
    if deviation == 0.0:
        return number
    value = number + centre
    if unit != 0.0:
        value = np.copysign(np.log1p(abs(value) / unit), value)
    value = (value - mean) / deviation
    return min(max(value, -MOST_DEVIATIONS), MOST_DEVIATIONS)


@njit(cache=True, nogil=True)
def scale_numbers(values, scale, out):  # type: ignore[no-untyped-def]
    """Scale `values` (float64 [n]) into `out` (float32 [n]).

    `scale` is float64 [4]: unit (0: no logarithms), mean, deviation, centre.
    """
    for i in range(len(values)):
        out[i] = scale_number(centre_number(values[i], scale[3]), scale[0], scale[1], scale[2], scale[3])


@njit(cache=True, nogil=True)
def scale_columns(indptr, keys, values, seeds, offsets, scales):  # type: ignore[no-untyped-def]
    """Scale the numeric features of rows in place: the last pairs of each row, in the order of `seeds`, some missing.

    `indptr` int64 [rows + 1], `keys` uint64 [pairs], `values` float32 [pairs]; `seeds` uint64 [n] are the keys of the
    numeric columns. `offsets` float64 [n] were subtracted from their values. `scales` float64 [4, n] has the unit,
    mean, deviation and centre for :func:`scale_number`.
    """
    units, means, deviations, centres = scales[0], scales[1], scales[2], scales[3]
    for row in range(indptr.shape[0] - 1):
        at, column = indptr[row + 1] - 1, seeds.shape[0] - 1
        while at >= indptr[row] and column >= 0:
            if keys[at] == seeds[column]:
                number, centre = np.float64(values[at]), centres[column]
                if offsets[column] != centre:
                    number = centre_number(number + offsets[column], centre)
                values[at] = scale_number(number, units[column], means[column], deviations[column], centre)
                at -= 1
            column -= 1


@njit(cache=True, nogil=True)
def bin_columns(indptr, keys, values, fields, hashes, num_categorical, seeds, firsts, edges, bins):  # type: ignore[no-untyped-def]
    """Replace numbers of some columns in place by their bins, which are categories with value 1.

    `indptr` int64 [rows + 1], `keys` uint64 [pairs], `values` float32 [pairs] and `fields` uint32 [pairs] describe
    rows. A row has a pair for each of `num_categorical` columns, then pairs of numeric columns, with keys in the order
    of `seeds` (uint64 [n]); some may be missing. `hashes` uint32 [num_categorical + n] are written to `fields`. Column
    c has bins if ``firsts[c] < firsts[c + 1]`` (int64 [n + 1]). Its first bin lies below its first edge, and another
    bin starts at each of its `edges` (float32, ascending). `bins` uint64 has the keys of the bins, one more per column
    than edges.
    """
    for row in range(indptr.shape[0] - 1):
        at, stop = indptr[row], indptr[row + 1]
        for column in range(num_categorical):
            if at < stop:
                fields[at] = hashes[column]
                at += 1
        column = 0
        for i in range(at, stop):
            found = column
            while found < seeds.shape[0] and seeds[found] != keys[i]:
                found += 1
            if found == seeds.shape[0]:
                continue  # a key of a list, which lies between categories and numbers
            column = found + 1
            fields[i] = hashes[num_categorical + found]
            low, high = firsts[found], firsts[found + 1]
            if low == high:
                continue
            first = low
            while low < high:
                middle = (low + high) // 2
                if edges[middle] <= values[i]:
                    low = middle + 1
                else:
                    high = middle
            keys[i] = bins[first + found + (low - first)]
            values[i] = np.float32(1)


KERNELS = (scale_numbers, scale_columns, bin_columns)


def compile_kernels() -> None:
    """Compile the kernels for the signatures of the real calls, or load them from Numba's cache."""
    values, keys, indptr = np.zeros(1, np.float32), np.zeros(1, np.uint64), np.zeros(1, np.int64)
    scale_numbers(np.zeros(1), np.ones(4), values)
    scale_columns(indptr, keys, values, keys, np.ones(1), np.ones((4, 1)))
    numbers = np.zeros(1, np.uint32)
    bin_columns(indptr, keys, values, numbers, numbers, 0, keys, np.zeros(2, np.int64), values, keys)
