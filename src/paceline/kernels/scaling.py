"""Kernels that bring the numbers of columns to a common scale (see :mod:`paceline.data.scaling`)."""

from __future__ import annotations

import numpy as np

from paceline.kernels.jit import njit

MOST_DEVIATIONS = 1000.0
"""A value farther from the mean counts as one that is so far: no sample has shown anything like it."""


@njit()
def scale_number(value, unit, mean, deviation):  # type: ignore[no-untyped-def]
    """(value - mean) / deviation, float64; of the logarithm sign(x) log(1 + |x| / unit) where `unit` is not 0."""
    if unit != 0.0:
        value = np.copysign(np.log1p(abs(value) / unit), value)
    value = (value - mean) / deviation
    return min(max(value, -MOST_DEVIATIONS), MOST_DEVIATIONS)


@njit(cache=True, nogil=True)
def scale_numbers(values, scale):  # type: ignore[no-untyped-def]
    """Scale `values` (float32 [n]) in place; `scale` is float64 [3]: unit (0: no logarithms), mean, deviation."""
    for i in range(len(values)):
        values[i] = scale_number(np.float64(values[i]), scale[0], scale[1], scale[2])


@njit(cache=True, nogil=True)
def scale_columns(indptr, keys, values, seeds, scales):  # type: ignore[no-untyped-def]
    """Scale the numeric features of rows in place: the last pairs of each, in the order of `seeds`, missing ones aside.

    `indptr` int64 [rows + 1], `keys` uint64 [pairs], `values` float32 [pairs]; `seeds` uint64 [n] are the keys of the
    numeric columns, `scales` float64 [3, n] what :func:`scale_number` takes.
    """
    units, means, deviations = scales[0], scales[1], scales[2]
    for row in range(indptr.shape[0] - 1):
        at, column = indptr[row + 1] - 1, seeds.shape[0] - 1
        while at >= indptr[row] and column >= 0:
            if keys[at] == seeds[column]:
                number = np.float64(values[at])
                values[at] = scale_number(number, units[column], means[column], deviations[column])
                at -= 1
            column -= 1


KERNELS = (scale_numbers, scale_columns)


def compile_kernels() -> None:
    """Compile the kernels, or load them from Numba's cache, for the one signature that real calls have."""
    values, keys, indptr = np.zeros(1, np.float32), np.zeros(1, np.uint64), np.zeros(1, np.int64)
    scale_numbers(values, np.ones(3))
    scale_columns(indptr, keys, values, keys, np.ones((3, 1)))
