"""References of the kernels in NumPy and plain Python: readable and slow.

A reference takes its kernel's arguments and writes the same outputs, so that tests and the benchmark can pass the same
case to both (see :mod:`tests.reference.kernel_cases`). The references of the update rules' kernels are in
:mod:`tests.reference.rules`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise

import numpy as np
import numpy.typing as npt

from paceline.kernels.hashing import FIRST_FINAL_MULTIPLIER, MASK, WORD_MULTIPLIER, mix
from paceline.kernels.index import NUM_BUCKETS
from paceline.kernels.initializers import CONSTANT, UNIFORM, ZEROS

Keys = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Rows = npt.NDArray[np.int32]


_GOLDEN = 0x9E3779B97F4A7C15


def unmix(hashes: npt.ArrayLike) -> Keys:
    """Return the keys that have these hashes: the inverse of :func:`mix`, for tests with colliding keys."""
    h: Keys = np.atleast_1d(np.asarray(hashes, np.uint64)).copy()
    h = h ^ (h >> np.uint64(31)) ^ (h >> np.uint64(62))
    h = h * np.uint64(pow(FIRST_FINAL_MULTIPLIER, -1, 1 << 64))
    h = h ^ (h >> np.uint64(27)) ^ (h >> np.uint64(54))
    h = h * np.uint64(pow(WORD_MULTIPLIER, -1, 1 << 64))
    h ^= (h >> np.uint64(30)) ^ (h >> np.uint64(60))
    return h


def bucket_of(keys: npt.ArrayLike) -> npt.NDArray[np.uint16]:
    """Return the bucket of each key."""
    return (mix(keys) >> np.uint64(55)).astype(np.uint16)


def buckets_of(keys: Keys, out: npt.NDArray[np.uint16]) -> None:
    """Write the bucket of each key."""
    out[:] = bucket_of(keys)


def bucket_words(keys: Keys, out: Keys) -> None:
    """Write the set of the keys' buckets as bits."""
    is_present = np.zeros(NUM_BUCKETS, bool)
    is_present[bucket_of(keys)] = True
    out[:] = np.packbits(is_present, bitorder="little").view("<u8")


def initial_values(kind: int, seed: int, keys: Keys, dim: int, a: float, b: float) -> Floats:
    """Return the initial values of rows (float32 [n, dim])."""
    shape = (len(keys), dim)
    if kind == ZEROS:
        return np.zeros(shape, np.float32)
    if kind == CONSTANT:
        return np.full(shape, a, np.float32)
    if kind == UNIFORM:
        return (a + (b - a) * _uniform(seed, keys[:, None], 2 * np.arange(dim, dtype=np.uint64))).astype(np.float32)
    pairs = np.arange(0, dim, 2, dtype=np.uint64)
    radius = b * np.sqrt(-2.0 * np.log(_uniform(seed, keys[:, None], pairs)))
    angle = 2.0 * np.pi * _uniform(seed, keys[:, None], pairs + np.uint64(1))
    both = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=2).reshape(len(keys), -1)
    return (a + both[:, :dim]).astype(np.float32)


def _uniform(seed: int, keys: Keys, counters: Keys) -> Doubles:
    rows = mix(keys ^ mix(np.uint64(seed + _GOLDEN & MASK)))
    bits = mix(rows + counters * np.uint64(_GOLDEN)) >> np.uint64(11)
    result: Doubles = (bits.astype(np.float64) + 0.5) * 2.0**-53
    return result


def dense_pull(record: Floats, start: int, stop: int, out: Floats, at: int) -> None:
    """Write the values of elements ``[start, stop)`` to ``out[at:]``."""
    out[at : at + stop - start] = record[start:stop]


def largest(array: Floats) -> float:
    """Return the greatest magnitude in an array: NaN before Inf before numbers; 0 for an empty array."""
    return float(np.abs(array).max(initial=0))


def dedup(keys: Keys, scratch: npt.NDArray[np.int32], unique: Keys, inverse: npt.NDArray[np.int32]) -> int:
    """Write the distinct keys in order of first appearance, and the position of each key; return their number."""
    found, first, places = np.unique(keys, return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    unique[: len(found)] = found[order]
    inverse[:] = rank[places.reshape(-1)]
    return len(found)


def sum_rows(inverse: npt.NDArray[np.int32], rows: Floats, dim: int, out: Floats) -> None:
    """Sum the rows of equal keys, in their order."""
    out[:] = 0
    np.add.at(out.reshape(-1, dim), inverse, rows.reshape(-1, dim))


def split(keys: Keys, owners: npt.NDArray[np.int32], starts: Integers, order: Integers) -> None:
    """Group keys by the server that owns their bucket. Keys of one server keep their order."""
    owner = owners[bucket_of(keys)]
    order[:] = np.argsort(owner, kind="stable")
    starts[:] = np.searchsorted(owner[order], np.arange(len(starts)))


def select(keys: Keys, words: Keys, chosen: Integers) -> int:
    """Write the positions of the keys whose bucket is in a set, in order; return their number."""
    is_present = np.unpackbits(words.astype("<u8").view(np.uint8), bitorder="little").astype(bool)
    found = np.flatnonzero(is_present[bucket_of(keys)])
    chosen[: len(found)] = found
    chosen[len(found) : len(found) + 1] = 0
    return len(found)


def take_keys(keys: Keys, order: Integers, out: Keys) -> None:
    """Write ``keys[order]`` to `out`."""
    np.take(keys, order, out=out)


def take_rows(rows: Floats, order: Integers, dim: int, out: Floats) -> None:
    """Write the rows ``rows[order]`` to `out`."""
    out.reshape(-1, dim)[:] = rows.reshape(-1, dim)[order]


def put_rows(rows: Floats, order: Integers, dim: int, out: Floats) -> None:
    """Write the rows to the places `order` of `out`."""
    out.reshape(-1, dim)[order] = rows.reshape(-1, dim)


def csr_dot(indptr: Integers, indices: npt.NDArray[np.int32], values: Floats, vector: Floats, out: Floats) -> None:
    """Write matrix times `vector` to `out`."""
    products = vector[indices].astype(np.float64) * (values if len(values) else 1.0)
    out[:] = np.bincount(_row_numbers(indptr), products, len(out))


def csr_transposed_dot(
    indptr: Integers, indices: npt.NDArray[np.int32], values: Floats, vector: Floats, out: Floats
) -> None:
    """Write the transposed matrix times `vector` to `out`."""
    products = vector[_row_numbers(indptr)].astype(np.float64) * (values if len(values) else 1.0)
    out[:] = np.bincount(indices, products, len(out))


def csr_dot_rows(indptr: Integers, indices: npt.NDArray[np.int32], values: Floats, rows: Floats, out: Floats) -> None:
    """Write matrix times `rows` to `out`."""
    for j in range(rows.shape[1]):
        csr_dot(indptr, indices, values, rows[:, j], out[:, j])


def csr_transposed_dot_rows(
    indptr: Integers, indices: npt.NDArray[np.int32], values: Floats, rows: Floats, out: Floats
) -> None:
    """Write the transposed matrix times `rows` to `out`."""
    for j in range(rows.shape[1]):
        csr_transposed_dot(indptr, indices, values, rows[:, j], out[:, j])


def add_interactions(
    indptr: Integers, indices: npt.NDArray[np.int32], values: Floats, factors: Floats, sums: Floats, margins: Floats
) -> None:
    """Add the pairwise part to `margins`."""
    for i, (start, stop) in enumerate(pairwise(indptr)):
        rows = factors[indices[start:stop]].astype(np.float64)
        rows *= values[start:stop, np.newaxis] if len(values) else 1.0
        sums[i] = rows.sum(axis=0)
        products = rows @ rows.T
        margins[i] += np.triu(products, 1).sum()


def interaction_gradients(
    indptr: Integers, indices: npt.NDArray[np.int32], values: Floats, factors: Floats, sums: Floats, residuals: Floats,
    out: Floats,
) -> None:  # fmt: skip
    """Write the gradient of the pairwise part by `factors` to `out`."""
    wide = np.zeros(out.shape)
    for i, (start, stop) in enumerate(pairwise(indptr)):
        own, x = indices[start:stop], values[start:stop, np.newaxis] if len(values) else np.ones((stop - start, 1))
        np.add.at(wide, own, residuals[i] * x * (sums[i] - x * factors[own]))
    out[:] = wide


def add_field_interactions(
    indptr: Integers, indices: npt.NDArray[np.int32], values: Floats, fields: npt.NDArray[np.int32],
    active: npt.NDArray[np.uint8], factors: Floats, width: int, margins: Floats,
) -> None:  # fmt: skip
    """Add the pairwise part of field-aware factors to `margins`."""
    for i, a, b, scale in _field_pairs(indptr, indices, values, active):
        own, other = (factors[indices[at]].reshape(-1, width).astype(np.float64) for at in (a, b))
        margins[i] += own[fields[b]] @ other[fields[a]] * scale


def field_interaction_gradients(
    indptr: Integers, indices: npt.NDArray[np.int32], values: Floats, fields: npt.NDArray[np.int32],
    active: npt.NDArray[np.uint8], factors: Floats, width: int, residuals: Floats, out: Floats,
) -> None:  # fmt: skip
    """Write the gradient of the field-aware part by `factors` to `out`."""
    wide = np.zeros((len(out), out.shape[1] // width, width))
    rows = factors.reshape(wide.shape)
    for i, a, b, scale in _field_pairs(indptr, indices, values, active):
        wide[indices[a], fields[b]] += residuals[i] * scale * rows[indices[b], fields[a]]
        wide[indices[b], fields[a]] += residuals[i] * scale * rows[indices[a], fields[b]]
    out[:] = wide.reshape(out.shape)


def _field_pairs(
    indptr: Integers, indices: npt.NDArray[np.int32], values: Floats, active: npt.NDArray[np.uint8]
) -> Iterator[tuple[int, int, int, float]]:
    """Yield each row's pairs of active columns, and the product of their values."""
    for i, (start, stop) in enumerate(pairwise(indptr.tolist())):
        x = values[start:stop].astype(np.float64) if len(values) else np.ones(stop - start)
        for a, b in combinations(range(start, stop), 2):
            if active[indices[a]] and active[indices[b]]:
                yield i, a, b, float(x[a - start] * x[b - start])


def _row_numbers(indptr: Integers) -> Integers:
    return np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))


def logistic(margins: Floats, labels: Floats, probabilities: Floats, residuals: Floats) -> float:
    """Write p = 1/(1 + exp(−margin)) and p − label; return the summed log loss."""
    wide = margins.astype(np.float64)
    p = np.exp(-np.logaddexp(0.0, -wide))
    probabilities[:] = p
    residuals[:] = p - labels
    return float((np.logaddexp(0.0, wide) - wide * labels).sum())


def count_entries(indptr: Integers, rows: Rows, columns: Integers, step: int, counts: Rows) -> None:
    """Add `step` to `counts` of each example for each of its entries in `columns`."""
    for column in columns:
        np.add.at(counts, rows[indptr[column] : indptr[column + 1]], step)


def column_gradients(
    indptr: Integers, rows: Rows, values: Floats, columns: Integers, radii: Floats, counts: Rows, weights: Floats,
    residuals: Floats, curvatures: Floats, out: Floats,
) -> None:  # fmt: skip
    """Write gradient and bound of the second derivative of each of `columns` to `out`."""
    most = 0.25 * weights.astype(np.float64) if len(weights) else np.full(len(residuals), 0.25)
    for at, column in enumerate(columns):
        entries = slice(indptr[column], indptr[column + 1])
        i, x = rows[entries], values[entries].astype(np.float64) if len(values) else 1.0
        with np.errstate(over="ignore", invalid="ignore"):  # 0 times infinity gives no bound
            grown = curvatures[i] * np.exp(counts[i] * np.abs(x) * np.float64(radii[column]))
        bounds = np.maximum(np.fmin(grown, most[i]), 1e-12)
        out[at] = (residuals[i] * x).sum(), (counts[i] * x * x * bounds).sum()


def move_columns(
    indptr: Integers, rows: Rows, values: Floats, columns: Integers, steps: Doubles, labels: Floats, weights: Floats,
    margins: Doubles, residuals: Floats, curvatures: Floats, touched: npt.NDArray[np.uint8],
) -> None:  # fmt: skip
    """Add the changes `steps` of weights to margins, and update the derived values."""
    for column, step in zip(columns, steps, strict=True):
        entries = slice(indptr[column], indptr[column + 1])
        if step:
            np.add.at(margins, rows[entries], step * values[entries] if len(values) else step)
            touched[rows[entries]] = 1
    i = np.flatnonzero(touched)
    touched[:] = 0
    p, weight = np.exp(-np.logaddexp(0.0, -margins[i])), weights[i] if len(weights) else 1.0
    residuals[i] = weight * np.where(labels[i] > 0, -np.exp(-np.logaddexp(0.0, margins[i])), p)
    curvatures[i] = weight * p * np.exp(-np.logaddexp(0.0, margins[i]))


def summed_loss(labels: Floats, weights: Floats, margins: Doubles) -> float:
    """Return the summed log loss."""
    losses = np.logaddexp(0.0, np.where(labels > 0, -margins, margins))
    return float((losses * weights if len(weights) else losses).sum())


def sort_entries(
    columns: Rows, first: Integers, values: Floats, ends: Integers, rows: Rows, sorted_values: Floats
) -> None:
    """Write entries of examples into their columns."""
    for k, (column, row) in enumerate(zip(columns, _row_numbers(first), strict=True)):
        if len(values) and values[k] == 0:
            continue
        rows[ends[column]] = row
        if len(values):
            sorted_values[ends[column]] = values[k]
        ends[column] += 1
