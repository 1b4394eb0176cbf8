"""Kernels of logistic regression that process a few columns (features) of the examples at a time.

They compute gradients of the logistic loss and upper bounds of its second derivatives. A sparse matrix of examples is
stored by column, in three arrays: `indptr` int64 [columns + 1], `rows` int32 [nnz] and `values` float32 [nnz]. `values`
has length 0 if every value is 1. Four arrays have an element for each of n examples: the margin (float64), the weight c
(float32, or length 0 if all weights are 1), the residual c·(p − y) and the curvature c·p·(1 − p) (both float32). Here p
is the predicted probability and y the label.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from .jit import njit

_MOST_GROWTH: Final = 80.0
"""`column_gradients` computes exp() up to this exponent. Above it, the bound of the curvature is c/4."""
_LEAST_CURVATURE: Final = 1e-12


@njit(cache=True, nogil=True)
def count_entries(indptr, rows, columns, step, counts):  # type: ignore[no-untyped-def]
    """Add `step` to ``counts[i]`` for each entry of example i in `columns` (int64). `counts` is int32 [n]."""
    for at in range(len(columns)):
        for k in range(indptr[columns[at]], indptr[columns[at] + 1]):
            counts[rows[k]] += step


@njit(cache=True, nogil=True, error_model="numpy")
def column_gradients(indptr, rows, values, columns, radii, counts, weights, residuals, curvatures, out):  # type: ignore[no-untyped-def]
    """Write the gradient and an upper bound of the second derivative for each of `columns` to `out` (float32 [columns,
    2]).

    The bounds are valid if several weights change at the same time and the weight of column j changes by at most
    ``radii[j]`` (float32 [all columns]). ``counts[i]`` (int32 [n]) is m: the number of example i's entries in the
    columns that change. A column's bound is Σ m·x²·min(c·p·(1 − p)·exp(m·|x|·radius), c/4), summed over its entries x.
    For m = 1 this is the bound of Li et al., OSDI'14. For larger m, the bound follows from Jensen's inequality. If an
    example has m entries x whose weights change by d each, its loss at the margin + Σ x·d is at most the mean of its
    losses at the margins + m·x·d.
    """
    ones = len(values) == 0
    for at in range(len(columns)):
        column = columns[at]
        radius = np.float64(radii[column])
        alone = np.exp(min(radius, _MOST_GROWTH))
        gradient, bound = 0.0, 0.0
        for k in range(indptr[column], indptr[column + 1]):
            i = rows[k]
            x = 1.0 if ones else np.float64(values[k])
            gradient += residuals[i] * x
            moving = counts[i]
            most = 0.25 if len(weights) == 0 else 0.25 * weights[i]
            if ones and moving == 1:
                growth, is_known = alone, radius <= _MOST_GROWTH
            else:
                exponent = moving * abs(x) * radius
                growth, is_known = np.exp(min(exponent, _MOST_GROWTH)), exponent <= _MOST_GROWTH
            curvature = min(curvatures[i] * growth, most) if is_known else most
            bound += moving * x * x * max(curvature, _LEAST_CURVATURE)
        out[at, 0] = np.float32(gradient)
        out[at, 1] = np.float32(bound)


@njit(cache=True, nogil=True)
def move_columns(indptr, rows, values, columns, steps, labels, weights, margins, residuals, curvatures, touched):  # type: ignore[no-untyped-def]
    """Change the weights of `columns` by `steps` (float64 [columns]): update margins, residuals and curvatures.

    `touched` is scratch memory, uint8 [n]. It must be zero before the call, and is zero after the call.
    """
    ones = len(values) == 0
    size = 0
    for at in range(len(columns)):
        if steps[at] != 0.0:
            size += indptr[columns[at] + 1] - indptr[columns[at]]
    seen = np.empty(min(size, len(margins)), np.int32)
    num_seen = 0
    for at in range(len(columns)):
        step = steps[at]
        if step == 0.0:
            continue
        for k in range(indptr[columns[at]], indptr[columns[at] + 1]):
            i = rows[k]
            margins[i] += step if ones else step * values[k]
            if not touched[i]:
                touched[i] = 1
                seen[num_seen] = i
                num_seen += 1
    for at in range(num_seen):
        i = seen[at]
        touched[i] = 0
        small = np.exp(-abs(margins[i]))
        near = small / (1.0 + small)  # the probability of the less likely label
        is_wrong = (margins[i] > 0.0) != (labels[i] > np.float32(0))
        error = 1.0 / (1.0 + small) if is_wrong else near
        weight = 1.0 if len(weights) == 0 else np.float64(weights[i])
        residuals[i] = np.float32(weight * (error if labels[i] == np.float32(0) else -error))
        curvatures[i] = np.float32(weight * near / (1.0 + small))


@njit(cache=True, nogil=True)
def summed_loss(labels, weights, margins):  # type: ignore[no-untyped-def]
    """Return the sum of the examples' log losses (float64), computed without overflow. `labels` is float32 [n]."""
    loss = 0.0
    for i in range(len(margins)):
        margin = margins[i] if labels[i] > np.float32(0) else -margins[i]
        one = np.log1p(np.exp(-abs(margin))) + max(-margin, 0.0)
        loss += one if len(weights) == 0 else one * weights[i]
    return loss


@njit(cache=True, nogil=True)
def sort_entries(columns, first, values, ends, rows, sorted_values):  # type: ignore[no-untyped-def]
    """Sort the entries of examples by column, and write them to `rows` and `sorted_values`.

    `columns` int32 [nnz] has the column of each entry, in the order of examples. The entries of example i begin at
    ``first[i]`` (int64 [n + 1]). ``ends[c]`` (int64 [columns]) is the position at which the next entry of column c is
    written, and is increased by each entry. Entries with value 0 are skipped.
    """
    ones = len(values) == 0
    for i in range(len(first) - 1):
        for k in range(first[i], first[i + 1]):
            if ones or values[k] != np.float32(0):
                place = ends[columns[k]]
                rows[place] = i
                if not ones:
                    sorted_values[place] = values[k]
                ends[columns[k]] = place + 1


def compile_kernels() -> None:
    """Compile the kernels, or load them from Numba's cache."""
    indptr, rows, column = np.zeros(2, np.int64), np.zeros(1, np.int32), np.zeros(1, np.int64)
    floats, wide, counts = np.zeros(1, np.float32), np.zeros(1, np.float64), np.zeros(1, np.int32)
    count_entries(indptr, rows, column, 1, counts)
    out = np.zeros((1, 2), np.float32)
    column_gradients(indptr, rows, floats, column, floats, counts, floats, floats, floats, out)
    touched = np.zeros(1, np.uint8)
    move_columns(indptr, rows, floats, column, wide, floats, floats, wide, floats, floats, touched)
    summed_loss(floats, floats, wide)
    sort_entries(rows, indptr, floats, column, rows, floats)


KERNELS: Final = (column_gradients, count_entries, move_columns, sort_entries, summed_loss)
