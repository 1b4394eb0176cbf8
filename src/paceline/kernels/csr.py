"""Sparse minibatches as CSR matrices: times a vector, transposed times a vector, logistic loss between."""

from __future__ import annotations

import numpy as np

from .jit import njit


@njit(cache=True, nogil=True)
def csr_dot(indptr, indices, values, vector, out):  # type: ignore[no-untyped-def]
    """Write matrix times `vector` to `out`.

    `indptr` int64 [n + 1]; `indices` int32 [nnz]; `values` float32 [nnz], or of length 0 where every value is
    1; `vector` float32; `out` float32 [n]. Sums are taken in float64.
    """
    ones = len(values) == 0
    for i in range(len(out)):
        total = 0.0
        if ones:
            for k in range(indptr[i], indptr[i + 1]):
                total += vector[indices[k]]
        else:
            for k in range(indptr[i], indptr[i + 1]):
                total += np.float64(values[k]) * vector[indices[k]]
        out[i] = np.float32(total)


@njit(cache=True, nogil=True)
def csr_transposed_dot(indptr, indices, values, vector, out):  # type: ignore[no-untyped-def]
    """Write the transposed matrix times `vector` (float32 [n]) to `out` (float32 [columns]); as `csr_dot`."""
    out[:] = np.float32(0)
    ones = len(values) == 0
    for i in range(len(vector)):
        if ones:
            for k in range(indptr[i], indptr[i + 1]):
                out[indices[k]] += vector[i]
        else:
            for k in range(indptr[i], indptr[i + 1]):
                out[indices[k]] += values[k] * vector[i]


@njit(cache=True, nogil=True)
def logistic(margins, labels, probabilities, residuals):  # type: ignore[no-untyped-def]
    """Write p = 1/(1 + exp(−margin)) and p − label; return the summed log loss (float64), stable."""
    loss = 0.0
    for i in range(len(margins)):
        margin = np.float64(margins[i])
        small = np.exp(-abs(margin))
        p = 1.0 / (1.0 + small) if margin >= 0.0 else small / (1.0 + small)
        probabilities[i] = np.float32(p)
        residuals[i] = np.float32(p - labels[i])
        loss += np.log1p(small) + (max(margin, 0.0) - margin * labels[i])
    return loss
