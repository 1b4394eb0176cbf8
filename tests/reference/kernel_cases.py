"""The cases of the kernels. Tests compare each kernel with its reference, and the benchmark measures both.

The cases are the same in every run, because the seed of a case is made from its name.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from tests.reference import kernels as reference
from tests.reference.kernels import Floats, Keys

from paceline.kernels import columns, csr, dedup, dense, index, sparse
from paceline.kernels.hashing import mix

SMALL, MIDDLE, LARGE = 100, 10_000, 160_000


@dataclass(frozen=True)
class ArrayCase:
    """A kernel whose arguments are arrays, and one set of arguments."""

    kernel: Any
    twin: Callable[..., Any]
    name: str
    num_items: int
    make: Callable[[np.random.Generator], tuple[Any, ...]]
    outputs: tuple[int, ...]
    """Positions of the written arguments, which must be equal."""
    tolerance: float = 0.0
    """Allowed relative and absolute difference. It is 0 if the reference computes in the same order."""

    @property
    def label(self) -> str:
        """The name of the kernel and the name of the case."""
        return f"{self.kernel.__name__} {self.name}"

    def arguments(self) -> tuple[Any, ...]:
        """Return new arguments, the same at every call."""
        return self.make(generator_of(self.label))


def generator_of(name: str) -> np.random.Generator:
    """Return the generator of a case, the same at every call."""
    return np.random.default_rng(zlib.crc32(name.encode()))


def random_keys(generator: np.random.Generator, count: int, distinct: int = 1 << 64) -> Keys:
    """Return keys (uint64 [count]), spread over all 64 bits; `distinct` bounds how many differ."""
    high = min(distinct, 1 << 63)
    return mix(generator.integers(0, high, count, dtype=np.uint64))


def floats(generator: np.random.Generator, count: int) -> Floats:
    """Return normal numbers (float32 [count])."""
    return generator.standard_normal(count).astype(np.float32)


def _dedup(count: int, distinct: int) -> Callable[[np.random.Generator], tuple[Any, ...]]:
    def make(generator: np.random.Generator) -> tuple[Any, ...]:
        keys = random_keys(generator, count, distinct)
        scratch = np.empty(dedup.scratch_size(count), np.int32)
        return keys, scratch, np.zeros(count, np.uint64), np.zeros(count, np.int32)

    return make


def _sum_rows(count: int, dim: int) -> Callable[[np.random.Generator], tuple[Any, ...]]:
    def make(generator: np.random.Generator) -> tuple[Any, ...]:
        num_unique = max(1, count // 3)
        inverse = generator.integers(0, num_unique, count).astype(np.int32)
        return inverse, floats(generator, count * dim), dim, np.zeros(num_unique * dim, np.float32)

    return make


def _split(count: int, num_servers: int) -> Callable[[np.random.Generator], tuple[Any, ...]]:
    def make(generator: np.random.Generator) -> tuple[Any, ...]:
        owners = generator.integers(0, num_servers, index.NUM_BUCKETS).astype(np.int32)
        starts, order = np.empty(num_servers + 1, np.int64), np.empty(count, np.int64)
        return random_keys(generator, count), owners, starts, order

    return make


def _rows(count: int, dim: int) -> Callable[[np.random.Generator], tuple[Any, ...]]:
    def make(generator: np.random.Generator) -> tuple[Any, ...]:
        rows, out = floats(generator, count * dim), np.zeros(count * dim, np.float32)
        return rows, generator.permutation(count).astype(np.int64), dim, out

    return make


def _take_keys(count: int) -> Callable[[np.random.Generator], tuple[Any, ...]]:
    def make(generator: np.random.Generator) -> tuple[Any, ...]:
        order = generator.permutation(count).astype(np.int64)
        return random_keys(generator, count), order, np.zeros(count, np.uint64)

    return make


def _csr(
    num_rows: int, width: int, *, ones: bool, transposed: bool, dim: int | None = None
) -> Callable[[np.random.Generator], tuple[Any, ...]]:
    def make(generator: np.random.Generator) -> tuple[Any, ...]:
        lengths = generator.integers(0, 2 * width + 1, num_rows)
        lengths[::7] = 0
        indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        num_pairs, num_columns = int(indptr[-1]), max(1, num_rows * width // 4)
        indices = generator.integers(0, num_columns, num_pairs).astype(np.int32)
        values = floats(generator, 0 if ones else num_pairs)
        sizes = (num_rows, num_columns) if transposed else (num_columns, num_rows)
        if dim is not None:
            rows = floats(generator, sizes[0] * dim).reshape(-1, dim)
            return indptr, indices, values, rows, np.zeros((sizes[1], dim), np.float32)
        return indptr, indices, values, floats(generator, sizes[0]), np.zeros(sizes[1], np.float32)

    return make


def _interactions(
    num_rows: int, dim: int, *, ones: bool, backward: bool
) -> Callable[[np.random.Generator], tuple[Any, ...]]:
    def make(generator: np.random.Generator) -> tuple[Any, ...]:
        indptr, indices, values, factors, sums = _csr(num_rows, 39, ones=ones, transposed=False, dim=dim)(generator)
        per_row = floats(generator, num_rows)
        if not backward:
            return indptr, indices, values, factors, sums, per_row
        sums[:] = floats(generator, sums.size).reshape(sums.shape)
        return indptr, indices, values, factors, sums, per_row, np.zeros_like(factors)

    return make


def _field_interactions(
    num_rows: int, *, ones: bool, backward: bool
) -> Callable[[np.random.Generator], tuple[Any, ...]]:
    num_fields, width = 13, 4

    def make(generator: np.random.Generator) -> tuple[Any, ...]:
        indptr, indices, values, factors, _ = _csr(
            num_rows, num_fields, ones=ones, transposed=False, dim=num_fields * width
        )(generator)
        fields = (np.arange(len(indices)) % num_fields).astype(np.int32)
        active = (generator.random(len(factors)) < 0.8).astype(np.uint8)
        per_row = floats(generator, num_rows)
        if not backward:
            return indptr, indices, values, fields, active, factors, width, per_row
        return indptr, indices, values, fields, active, factors, width, per_row, np.zeros_like(factors)

    return make


def _logistic(count: int) -> Callable[[np.random.Generator], tuple[Any, ...]]:
    def make(generator: np.random.Generator) -> tuple[Any, ...]:
        margins = floats(generator, count) * np.float32(10)
        extremes = np.array([0, -0.0, 20, -20, 104, -104, 1e5, -1e5, 3e38, -3e38], np.float32)
        margins[: len(extremes)] = extremes[:count]
        labels = (generator.random(count) < 0.3).astype(np.float32)
        return margins, labels, np.zeros(count, np.float32), np.zeros(count, np.float32)

    return make


def _dense_pull(size: int) -> Callable[[np.random.Generator], tuple[Any, ...]]:
    def make(generator: np.random.Generator) -> tuple[Any, ...]:
        start, stop = size // 5, size - size // 7
        return floats(generator, 2 * size), start, stop, np.zeros(stop - start + 8, np.float32), 3

    return make


def _largest(count: int) -> Callable[[np.random.Generator], tuple[Any, ...]]:
    return lambda generator: (floats(generator, count),)


def _buckets_of(count: int) -> Callable[[np.random.Generator], tuple[Any, ...]]:
    return lambda generator: (random_keys(generator, count), np.zeros(count, np.uint16))


def _bucket_words(count: int, num_buckets: int) -> Callable[[np.random.Generator], tuple[Any, ...]]:
    def make(generator: np.random.Generator) -> tuple[Any, ...]:
        keys = _keys_in(generator, count, num_buckets)
        return keys, np.full(index.NUM_BUCKETS // 64, 7, np.uint64)

    return make


def _select(count: int, num_buckets: int) -> Callable[[np.random.Generator], tuple[Any, ...]]:
    def make(generator: np.random.Generator) -> tuple[Any, ...]:
        words = np.zeros(index.NUM_BUCKETS // 64, np.uint64)
        reference.bucket_words(_keys_in(generator, 2000, num_buckets), words)
        return random_keys(generator, count), words, np.zeros(count, np.int64)

    return make


def _keys_in(generator: np.random.Generator, count: int, num_buckets: int) -> Keys:
    """Return keys of at most `num_buckets` buckets."""
    buckets = generator.choice(index.NUM_BUCKETS, num_buckets, replace=False).astype(np.uint64)
    hashes = (buckets[generator.integers(0, num_buckets, count)] << np.uint64(55)) | (
        generator.integers(0, 1 << 55, count, dtype=np.uint64)
    )
    return reference.unmix(hashes)


def _columns(generator: np.random.Generator, num: int, *, ones: bool) -> tuple[Any, ...]:
    """Return `num` examples by column: indptr, rows, values, some columns, weights of examples."""
    num_columns = max(2, num // 3)
    indptr = np.concatenate([[0], np.cumsum(generator.integers(0, 9, num_columns))]).astype(np.int64)
    rows = generator.integers(0, num, int(indptr[-1])).astype(np.int32)
    chosen = np.sort(generator.permutation(num_columns)[: num_columns // 2 + 1]).astype(np.int64)
    weights = floats(generator, 0) if ones else np.abs(floats(generator, num))
    return indptr, rows, floats(generator, 0 if ones else len(rows)), chosen, weights


def _count_entries(num: int) -> Callable[[np.random.Generator], tuple[Any, ...]]:
    def make(generator: np.random.Generator) -> tuple[Any, ...]:
        indptr, rows, _, chosen, _ = _columns(generator, num, ones=True)
        return indptr, rows, chosen, -1, generator.integers(0, 9, num).astype(np.int32)

    return make


def _column_gradients(num: int, *, ones: bool) -> Callable[[np.random.Generator], tuple[Any, ...]]:
    def make(generator: np.random.Generator) -> tuple[Any, ...]:
        indptr, rows, values, chosen, weights = _columns(generator, num, ones=ones)
        radii = np.abs(floats(generator, len(indptr) - 1)) * generator.choice(np.array([1, 1e4], np.float32))
        counts, curvatures = generator.integers(1, 4, num).astype(np.int32), np.abs(floats(generator, num)) / 4
        out = np.zeros((len(chosen), 2), np.float32)
        return indptr, rows, values, chosen, radii, counts, weights, floats(generator, num), curvatures, out

    return make


def _move_columns(num: int, *, ones: bool) -> Callable[[np.random.Generator], tuple[Any, ...]]:
    def make(generator: np.random.Generator) -> tuple[Any, ...]:
        indptr, rows, values, chosen, weights = _columns(generator, num, ones=ones)
        steps = generator.normal(0, 3, len(chosen)) * (generator.random(len(chosen)) < 0.8)
        labels, margins = generator.integers(0, 2, num).astype(np.float32), generator.normal(0, 5, num)
        state = floats(generator, num), floats(generator, num), np.zeros(num, np.uint8)
        return indptr, rows, values, chosen, steps, labels, weights, margins, *state

    return make


def _summed_loss(num: int, *, ones: bool) -> Callable[[np.random.Generator], tuple[Any, ...]]:
    def make(generator: np.random.Generator) -> tuple[Any, ...]:
        weights = floats(generator, 0) if ones else np.abs(floats(generator, num))
        return generator.integers(0, 2, num).astype(np.float32), weights, generator.normal(0, 5, num)

    return make


def _sort_entries(num: int, *, ones: bool) -> Callable[[np.random.Generator], tuple[Any, ...]]:
    def make(generator: np.random.Generator) -> tuple[Any, ...]:
        indptr, numbers, values, _, _ = _columns(generator, num, ones=ones)
        values[::5] = 0
        counts = np.bincount(numbers if ones else numbers[values != 0], minlength=num)
        ends = np.concatenate([[0], np.cumsum(counts)])[:-1].astype(np.int64)
        return numbers, indptr, values, ends, np.zeros(len(numbers), np.int32), np.zeros(len(values), np.float32)

    return make


def _column_cases() -> Iterator[ArrayCase]:
    for n in (100, 100_000):
        yield ArrayCase(columns.count_entries, reference.count_entries, f"{n}", n, _count_entries(n), (4,))
        for ones in (True, False):
            name = f"{n} {'ones' if ones else 'values'}"
            make = _column_gradients(n, ones=ones)
            yield ArrayCase(columns.column_gradients, reference.column_gradients, name, n, make, (9,), 1e-5)
            make = _move_columns(n, ones=ones)
            yield ArrayCase(columns.move_columns, reference.move_columns, name, n, make, (7, 8, 9), 1e-5)
            make = _summed_loss(n, ones=ones)
            yield ArrayCase(columns.summed_loss, reference.summed_loss, name, n, make, (), 1e-9)
            make = _sort_entries(n, ones=ones)
            yield ArrayCase(columns.sort_entries, reference.sort_entries, name, n, make, (3, 4, 5))


def _array_cases() -> Iterator[ArrayCase]:
    for n in (1, SMALL, MIDDLE, LARGE):
        for name, distinct in (("distinct", 1 << 64), ("of a third", max(1, n // 3)), ("one key", 1)):
            make = _dedup(n, distinct)
            yield ArrayCase(dedup.dedup, reference.dedup, f"{n} {name}", n, make, (2, 3))
        for dim in (1, 16):
            rows, sums = _rows(n, dim), _sum_rows(n, dim)
            yield ArrayCase(dedup.sum_rows, reference.sum_rows, f"{n}x{dim}", n, sums, (3,))
            yield ArrayCase(dedup.take_rows, reference.take_rows, f"{n}x{dim}", n, rows, (3,))
            yield ArrayCase(dedup.put_rows, reference.put_rows, f"{n}x{dim}", n, rows, (3,))
        yield ArrayCase(dedup.take_keys, reference.take_keys, f"{n}", n, _take_keys(n), (2,))
        for servers in (1, 3, 40):
            make = _split(n, servers)
            yield ArrayCase(dedup.split, reference.split, f"{n} to {servers}", n, make, (2, 3))
        yield ArrayCase(index.buckets_of, reference.buckets_of, f"{n}", n, _buckets_of(n), (1,))
        for buckets in (1, 200, index.NUM_BUCKETS):
            label, words, selected = f"{n} in {buckets} buckets", _bucket_words(n, buckets), _select(n, buckets)
            yield ArrayCase(index.bucket_words, reference.bucket_words, label, n, words, (1,))
            yield ArrayCase(dedup.select, reference.select, label, n, selected, (2,))
        yield ArrayCase(sparse.largest, reference.largest, f"{n}", n, _largest(n), ())
        yield ArrayCase(csr.logistic, reference.logistic, f"{n}", n, _logistic(n), (2, 3), 1e-6)
    for n in (1, 8, 256, 4096):
        for ones in (True, False):
            name, items = f"{n}x39 {'ones' if ones else 'values'}", n * 39
            make = _csr(n, 39, ones=ones, transposed=False)
            yield ArrayCase(csr.csr_dot, reference.csr_dot, name, items, make, (4,), 1e-5)
            make = _csr(n, 39, ones=ones, transposed=True)
            yield ArrayCase(csr.csr_transposed_dot, reference.csr_transposed_dot, name, items, make, (4,), 1e-5)
            make = _csr(n, 39, ones=ones, transposed=False, dim=5)
            yield ArrayCase(csr.csr_dot_rows, reference.csr_dot_rows, name, items, make, (4,), 1e-4)
            make = _csr(n, 39, ones=ones, transposed=True, dim=5)
            yield ArrayCase(
                csr.csr_transposed_dot_rows, reference.csr_transposed_dot_rows, name, items, make, (4,), 1e-4
            )
            make, backward = (_interactions(n, 8, ones=ones, backward=is_backward) for is_backward in (False, True))
            kernels, twins = csr, reference
            yield ArrayCase(kernels.add_interactions, twins.add_interactions, name, items, make, (4, 5), 1e-3)
            yield ArrayCase(
                kernels.interaction_gradients, twins.interaction_gradients, name, items, backward, (6,), 1e-3
            )
    for n, ones in ((1, True), (100, False)):
        name, items = f"{n}{' of ones' if ones else ''}", n * 13
        make, backward = (_field_interactions(n, ones=ones, backward=is_backward) for is_backward in (False, True))
        yield ArrayCase(csr.add_field_interactions, reference.add_field_interactions, name, items, make, (7,), 1e-3)
        yield ArrayCase(
            csr.field_interaction_gradients, reference.field_interaction_gradients, name, items, backward, (8,), 1e-3
        )
    for n in (1, 1000, 1_000_000):
        yield ArrayCase(dense.dense_pull, reference.dense_pull, f"{n}", n, _dense_pull(n), (3,))


ARRAY_CASES: Final = (*_array_cases(), *_column_cases())
