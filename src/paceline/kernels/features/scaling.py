"""Kernels that scale the numbers of columns, for :mod:`paceline.data.scales.scaling`."""

from __future__ import annotations

import numpy as np

from paceline.kernels.jit import njit

MOST_DEVIATIONS = 1000.0
"""The largest distance of a scaled value from the mean, in standard deviations. Values beyond it are clipped."""


@njit()
def centre_number(value, centre):  # type: ignore[no-untyped-def]
    """Return `value` minus `centre`, rounded to the precision of float32, as float64."""
    return np.float64(np.float32(value - centre))


@njit()
def scale_number(number, unit, mean, deviation, centre):  # type: ignore[no-untyped-def]
    """Return the scaled number (x - mean) / deviation as float64.

    `number` is the result of :func:`centre_number`. If `unit` is not 0, x is sign(v) log(1 + |v| / unit), where v is
    the original value. If `deviation` is 0, the number is returned unchanged.
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

    `scale` (float64 [4]) has the arguments of :func:`scale_number`: unit (0 for no logarithm), mean, deviation, centre.
    """
    for i in range(len(values)):
        out[i] = scale_number(centre_number(values[i], scale[3]), scale[0], scale[1], scale[2], scale[3])


@njit(cache=True, nogil=True)
def scale_columns(indptr, keys, values, seeds, offsets, scales):  # type: ignore[no-untyped-def]
    """Scale the values of the numeric columns of rows in place.

    The rows are `indptr` int64 [rows + 1], `keys` uint64 [pairs] and `values` float32 [pairs]. The numeric columns are
    the last pairs of each row, in the order of `seeds` (uint64 [n], their keys); some may be missing. `offsets` float64
    [n] were subtracted from the columns' values before. `scales` float64 [4, n] has the unit, mean, deviation and
    centre of each column for :func:`scale_number`.
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
    """Replace the numbers of some columns in place by their bins (intervals). A bin is a category with value 1.

    The rows are `indptr` int64 [rows + 1], `keys` uint64 [pairs], `values` float32 [pairs] and `fields` uint32 [pairs].
    A row has a pair for each of `num_categorical` columns, then the pairs of the numeric columns, in the order of
    `seeds` (uint64 [n], their keys); some may be missing. The kernel writes the numbers of the fields, `hashes` uint32
    [num_categorical + n], to `fields`.

    The edges of numeric column c are ``edges[firsts[c]:firsts[c + 1]]`` (float32, ascending). A column without edges
    has no bins. The first bin lies below the first edge, and a further bin starts at each edge. So a column has one bin
    more than edges. `bins` uint64 has the keys of all bins.
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
                continue  # a key of a list, which comes after the categories
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
    """Compile the kernels for the argument types of their callers, or load them from Numba's cache."""
    values, keys, indptr = np.zeros(1, np.float32), np.zeros(1, np.uint64), np.zeros(1, np.int64)
    scale_numbers(np.zeros(1), np.ones(4), values)
    scale_columns(indptr, keys, values, keys, np.ones(1), np.ones((4, 1)))
    numbers = np.zeros(1, np.uint32)
    bin_columns(indptr, keys, values, numbers, numbers, 0, keys, np.zeros(2, np.int64), values, keys)
