"""Numbers of a column on a scale on which columns are alike: mean 0, standard deviation 1, perhaps of logarithms."""

from __future__ import annotations

import numpy as np

from paceline.kernels.jit import njit

MOST_DEVIATIONS = 1000.0
"""A value farther from the mean counts as one that is so far: no sample has shown anything like it."""


@njit()
def scale_number(value, log, mean, deviation):  # type: ignore[no-untyped-def]
    """(value - mean) / deviation, of the signed logarithm sign(x) log(1 + |x|) where `log` is not 0; float64."""
    if log != 0.0:
        value = np.copysign(np.log1p(abs(value)), value)
    value = (value - mean) / deviation
    return min(max(value, -MOST_DEVIATIONS), MOST_DEVIATIONS)


@njit(cache=True, nogil=True)
def scale_numbers(values, scale):  # type: ignore[no-untyped-def]
    """Scale `values` (float32 [n]) in place; `scale` is float64 [3]: log (0 or 1), mean, deviation."""
    for i in range(len(values)):
        values[i] = scale_number(np.float64(values[i]), scale[0], scale[1], scale[2])
