"""Kernels for minibatches as CSR matrices: products with vectors and rows, factor interactions, logistic loss."""

from __future__ import annotations

import numpy as np

from .jit import njit


@njit(cache=True, nogil=True)
def csr_dot(indptr, indices, values, vector, out):  # type: ignore[no-untyped-def]
    """Write matrix times `vector` to `out`.

    The arrays of the CSR matrix are `indptr` int64 [n + 1], `indices` int32 [nnz] and `values` float32 [nnz]. `values`
    has length 0 if every value is 1. `vector` is float32 and `out` float32 [n]. Sums are computed in float64.
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
    """Write the transposed matrix times `vector` (float32 [n]) to `out` (float32 [columns]). See :func:`csr_dot`."""
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
def csr_dot_rows(indptr, indices, values, rows, out):  # type: ignore[no-untyped-def]
    """Write the matrix times `rows` (float32 [columns, dim]) to `out` (float32 [n, dim]).

    Sums are computed in float32.
    """
    ones, dim = len(values) == 0, rows.shape[1]
    for i in range(len(out)):
        for j in range(dim):
            out[i, j] = np.float32(0)
        for k in range(indptr[i], indptr[i + 1]):
            row = rows[indices[k]]
            value = np.float32(1) if ones else values[k]
            for j in range(dim):
                out[i, j] += value * row[j]


@njit(cache=True, nogil=True)
def csr_transposed_dot_rows(indptr, indices, values, rows, out):  # type: ignore[no-untyped-def]
    """Write the transposed matrix times `rows` (float32 [n, dim]) to `out` (float32 [columns, dim])."""
    ones, dim = len(values) == 0, rows.shape[1]
    out[:] = np.float32(0)
    for i in range(len(rows)):
        for k in range(indptr[i], indptr[i + 1]):
            row = out[indices[k]]
            value = np.float32(1) if ones else values[k]
            for j in range(dim):
                row[j] += value * rows[i, j]


@njit(cache=True, nogil=True)
def add_interactions(indptr, indices, values, factors, sums, margins):  # type: ignore[no-untyped-def]
    """Add the interactions of a factorization machine to the margin of each row (`margins`, float32 [n]).

    The interactions of a row are ½ Σ_f ((Σ_k v_kf x_k)² − Σ_k (v_kf x_k)²), where x_k are the row's values, and v_kf
    the `factors` (float32 [columns, dim]). `indptr`, `indices` and `values` are the CSR matrix. See :func:`csr_dot`.
    The kernel also writes the inner sums Σ_k v_kf x_k to `sums` (float32 [n, dim]).
    """
    ones, dim = len(values) == 0, factors.shape[1]
    for i in range(len(margins)):
        own = sums[i]
        own[:] = np.float32(0)
        squares = np.float32(0)
        for k in range(indptr[i], indptr[i + 1]):
            row = factors[indices[k]]
            value = np.float32(1) if ones else values[k]
            for f in range(dim):
                product = value * row[f]
                own[f] += product
                squares += product * product
        total = np.float32(0)
        for f in range(dim):
            total += own[f] * own[f]
        margins[i] += np.float32(0.5) * (total - squares)


@njit(cache=True, nogil=True)
def interaction_gradients(indptr, indices, values, factors, sums, residuals, out):  # type: ignore[no-untyped-def]
    """Write the gradient with respect to `factors`, Σ_i r_i x_k (sums_if − v_kf x_k), to `out`.

    `residuals` r (float32 [n]) are the derivatives of the loss with respect to the margins. `out` is float32
    [columns, dim]. :func:`add_interactions` describes the other arguments.
    """
    ones, dim = len(values) == 0, factors.shape[1]
    out[:] = np.float32(0)
    for i in range(len(residuals)):
        own = sums[i]
        for k in range(indptr[i], indptr[i + 1]):
            at = indices[k]
            row, target = factors[at], out[at]
            value = np.float32(1) if ones else values[k]
            scale = residuals[i] * value
            for f in range(dim):
                target[f] += scale * (own[f] - value * row[f])


@njit(cache=True, nogil=True)
def add_field_interactions(indptr, indices, values, fields, active, factors, width, margins):  # type: ignore[no-untyped-def]
    """Add the interactions of a field-aware factorization machine to the margin of each row (`margins`, float32 [n]).

    The interactions of a row are Σ_{a<b} ⟨v_a(field of b), v_b(field of a)⟩ x_a x_b, summed over its entries a and b.
    `indptr`, `indices` and `values` are the CSR matrix. See :func:`csr_dot`. `fields` int32 [nnz] has the field of each
    entry. `factors` float32 [columns, fields * width] has a vector v of `width` numbers for each column and field.
    `active` uint8 [columns] is 1 for columns with interactions, and 0 for other columns.
    """
    ones = len(values) == 0
    for i in range(len(margins)):
        total = np.float32(0)
        for a in range(indptr[i], indptr[i + 1]):
            if not active[indices[a]]:
                continue
            value = np.float32(1) if ones else values[a]
            own, own_at = factors[indices[a]], fields[a] * width
            for b in range(a + 1, indptr[i + 1]):
                if not active[indices[b]]:
                    continue
                other, other_at = factors[indices[b]], fields[b] * width
                product = np.float32(0)
                for f in range(width):
                    product += own[other_at + f] * other[own_at + f]
                total += product * (value if ones else value * values[b])
        margins[i] += total


@njit(cache=True, nogil=True)
def field_interaction_gradients(  # type: ignore[no-untyped-def]
    indptr, indices, values, fields, active, factors, width, residuals, out
):
    """Write the gradient of the loss with respect to `factors` to `out` (float32 [columns, fields * width]).

    `residuals` (float32 [n]) are the derivatives of the loss with respect to the margins.
    :func:`add_field_interactions` describes the other arguments.
    """
    ones = len(values) == 0
    out[:] = np.float32(0)
    for i in range(len(residuals)):
        for a in range(indptr[i], indptr[i + 1]):
            if not active[indices[a]]:
                continue
            scale = residuals[i] * (np.float32(1) if ones else values[a])
            own, own_out, own_at = factors[indices[a]], out[indices[a]], fields[a] * width
            for b in range(a + 1, indptr[i + 1]):
                if not active[indices[b]]:
                    continue
                other, other_out, other_at = factors[indices[b]], out[indices[b]], fields[b] * width
                slope = scale if ones else scale * values[b]
                for f in range(width):
                    own_out[other_at + f] += slope * other[own_at + f]
                    other_out[own_at + f] += slope * own[other_at + f]


@njit(cache=True, nogil=True)
def logistic(margins, labels, probabilities, residuals):  # type: ignore[no-untyped-def]
    """Write the probabilities p = 1/(1 + exp(−margin)) and the residuals p − label.

    Return the sum of the log losses (float64), computed without overflow.
    """
    loss = 0.0
    for i in range(len(margins)):
        margin = np.float64(margins[i])
        small = np.exp(-abs(margin))
        p = 1.0 / (1.0 + small) if margin >= 0.0 else small / (1.0 + small)
        probabilities[i] = np.float32(p)
        residuals[i] = np.float32(p - labels[i])
        loss += np.log1p(small) + (max(margin, 0.0) - margin * labels[i])
    return loss
