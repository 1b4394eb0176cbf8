"""One table of cases for the kernels: the tests run each against its twin, the benchmark times both.

Nothing here is random between runs: a case is made from its own name.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from . import csr, dedup, dense, index, initializers, reference, rules, sparse
from .reference import Doubles, Floats, Keys

SMALL, MIDDLE, LARGE = 100, 10_000, 160_000


@dataclass(frozen=True)
class ArrayCase:
    """A kernel that works on arrays alone, and one set of arguments."""

    kernel: Any
    twin: Callable[..., Any]
    name: str
    num_items: int
    make: Callable[[np.random.Generator], tuple[Any, ...]]
    outputs: tuple[int, ...]
    """Positions of the arguments that are written and must agree."""
    tolerance: float = 0.0
    """Allowed difference, relative and absolute; 0 where the twin computes in the same order."""

    @property
    def label(self) -> str:
        """The kernel's name and the case's."""
        return f"{self.kernel.__name__} {self.name}"

    def arguments(self) -> tuple[Any, ...]:
        """Return new arguments, the same at every call."""
        return self.make(_generator(self.label))


class RuleCase(NamedTuple):
    """A rule with hyperparameters, and the state that it keeps with these."""

    code: int
    hyper: tuple[float, ...]
    num_states: int = 0
    has_count: bool = False
    is_rare: bool = False
    """Whether it is run on few elements only: its time is of no great interest."""


RULE_CASES: Final[dict[str, RuleCase]] = {
    "SGD": RuleCase(rules.SGD, (0.1, 0.01)),
    "SGD maximize": RuleCase(rules.SGD, (0.1, 0.01, 0, 0, 0, 0, 0, 1), is_rare=True),
    "Momentum": RuleCase(rules.MOMENTUM, (0.1, 0.01, 0.9, 1.0), 1),
    "Momentum dampening": RuleCase(rules.MOMENTUM, (0.1, 0.01, 0.9, 0.0, 0.5), 1, True, True),
    "Adagrad": RuleCase(rules.ADAGRAD, (0.1, 0.01, 1e-10, 0.1), 1),
    "Adagrad lr_decay": RuleCase(rules.ADAGRAD, (0.1, 0.01, 1e-10, 0.1, 0.2), 1, True, True),
    "RMSprop": RuleCase(rules.RMSPROP, (0.01, 0.01, 1e-8, 0.99), 1),
    "RMSprop momentum": RuleCase(rules.RMSPROP, (0.01, 0.01, 1e-8, 0.99, 0.9), 2, is_rare=True),
    "RMSprop centered": RuleCase(rules.RMSPROP, (0.01, 0.01, 1e-8, 0.99, 0.0, 1.0), 2, is_rare=True),
    "RMSprop both": RuleCase(rules.RMSPROP, (0.01, 0.01, 1e-8, 0.99, 0.9, 1.0, 0, 1), 3, is_rare=True),
    "Adadelta": RuleCase(rules.ADADELTA, (1.0, 0.01, 1e-6, 0.9), 2, is_rare=True),
    "Adam": RuleCase(rules.ADAM, (0.01, 0.01, 1e-8, 0.9, 0.999), 2, True),
    "Adam amsgrad": RuleCase(rules.ADAM, (0.01, 0.01, 1e-8, 0.9, 0.999, 1.0, 0, 1), 3, True, True),
    "AdamW": RuleCase(rules.ADAMW, (0.01, 0.01, 1e-8, 0.9, 0.999), 2, True),
    "Adamax": RuleCase(rules.ADAMAX, (0.01, 0.01, 1e-8, 0.9, 0.999), 2, True, True),
    "NAdam": RuleCase(rules.NADAM, (0.01, 0.01, 1e-8, 0.9, 0.999, 4e-3), 3, True, True),
    "NAdam decoupled": RuleCase(rules.NADAM, (0.01, 0.01, 1e-8, 0.9, 0.999, 4e-3, 1.0, 1), 3, True, True),
    "RAdam": RuleCase(rules.RADAM, (0.01, 0.01, 1e-8, 0.9, 0.999), 2, True, True),
    "RAdam decoupled": RuleCase(rules.RADAM, (0.01, 0.01, 1e-8, 0.9, 0.999, 1.0, 0, 1), 2, True, True),
    "ASGD": RuleCase(rules.ASGD, (0.1, 0.01, 1e-2, 0.75, 2.0), 2, True, True),
    "Rprop": RuleCase(rules.RPROP, (0.01, 0.5, 1.2, 1e-6, 50.0), 2, True, True),
    "FTRL": RuleCase(rules.FTRL, (0.05, 1.0, 0.1, 0.2), 2),
}


@dataclass(frozen=True)
class SparseCase:
    """A sparse table of `num_rows` rows, and a batch of `num_keys` keys, most of which are in it."""

    name: str
    dim: int
    rule: RuleCase
    num_rows: int
    num_keys: int
    initializer: int = initializers.ZEROS
    initial: tuple[float, float] = (0.0, 0.0)

    @property
    def label(self) -> str:
        """The case's name."""
        return f"table {self.name}"

    @property
    def row_words(self) -> int:
        """Length of a record."""
        return self.dim * (1 + self.rule.num_states) + self.rule.has_count

    def parameters(self) -> Doubles:
        """Return the kernels' parameter array."""
        return parameters(self.rule.hyper, self.initial)

    def twin(self) -> reference.SparseTable:
        """Return an empty reference table."""
        return reference.SparseTable(
            self.dim, self.row_words, self.rule.code, self.parameters(), self.initializer, seed=7
        )

    def batches(self) -> tuple[Keys, Keys, Floats]:
        """Return the table's keys, the batch's keys (a tenth absent from the table) and its gradients."""
        generator = _generator(self.label)
        keys = random_keys(generator, self.num_rows)
        picked = keys[generator.integers(0, self.num_rows, self.num_keys)]
        absent = generator.random(self.num_keys) < 0.1
        picked[absent] = random_keys(generator, int(absent.sum()))
        grads = generator.standard_normal(self.num_keys * self.dim).astype(np.float32)
        return keys, picked, grads


def _generator(name: str) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(name.encode()))


def random_keys(generator: np.random.Generator, count: int, distinct: int = 1 << 64) -> Keys:
    """Return keys (uint64 [count]), spread over all 64 bits; `distinct` bounds how many differ."""
    high = min(distinct, 1 << 63)
    return reference.mix(generator.integers(0, high, count, dtype=np.uint64))


def parameters(hyper: tuple[float, ...], initial: tuple[float, float] = (0.0, 0.0)) -> Doubles:
    """Return a table's parameter array."""
    array = np.zeros(rules.NUM_PARAMETERS, np.float64)
    array[: len(hyper)] = hyper
    array[rules.INITIAL_A], array[rules.INITIAL_B] = initial
    return array


def _floats(generator: np.random.Generator, count: int) -> Floats:
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
        return inverse, _floats(generator, count * dim), dim, np.zeros(num_unique * dim, np.float32)

    return make


def _split(count: int, num_servers: int) -> Callable[[np.random.Generator], tuple[Any, ...]]:
    def make(generator: np.random.Generator) -> tuple[Any, ...]:
        owners = generator.integers(0, num_servers, index.NUM_BUCKETS).astype(np.int32)
        starts, order = np.empty(num_servers + 1, np.int64), np.empty(count, np.int64)
        return random_keys(generator, count), owners, starts, order

    return make


def _rows(count: int, dim: int) -> Callable[[np.random.Generator], tuple[Any, ...]]:
    def make(generator: np.random.Generator) -> tuple[Any, ...]:
        rows, out = _floats(generator, count * dim), np.zeros(count * dim, np.float32)
        return rows, generator.permutation(count).astype(np.int64), dim, out

    return make


def _take_keys(count: int) -> Callable[[np.random.Generator], tuple[Any, ...]]:
    def make(generator: np.random.Generator) -> tuple[Any, ...]:
        order = generator.permutation(count).astype(np.int64)
        return random_keys(generator, count), order, np.zeros(count, np.uint64)

    return make


def _csr(
    num_rows: int, width: int, *, ones: bool, transposed: bool
) -> Callable[[np.random.Generator], tuple[Any, ...]]:
    def make(generator: np.random.Generator) -> tuple[Any, ...]:
        lengths = generator.integers(0, 2 * width + 1, num_rows)
        lengths[::7] = 0
        indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        num_pairs, num_columns = int(indptr[-1]), max(1, num_rows * width // 4)
        indices = generator.integers(0, num_columns, num_pairs).astype(np.int32)
        values = _floats(generator, 0 if ones else num_pairs)
        sizes = (num_rows, num_columns) if transposed else (num_columns, num_rows)
        return indptr, indices, values, _floats(generator, sizes[0]), np.zeros(sizes[1], np.float32)

    return make


def _logistic(count: int) -> Callable[[np.random.Generator], tuple[Any, ...]]:
    def make(generator: np.random.Generator) -> tuple[Any, ...]:
        margins = _floats(generator, count) * np.float32(10)
        extremes = np.array([0, -0.0, 20, -20, 104, -104, 1e5, -1e5, 3e38, -3e38], np.float32)
        margins[: len(extremes)] = extremes[:count]
        labels = (generator.random(count) < 0.3).astype(np.float32)
        return margins, labels, np.zeros(count, np.float32), np.zeros(count, np.float32)

    return make


def _dense_push(size: int, rule: RuleCase) -> Callable[[np.random.Generator], tuple[Any, ...]]:
    def make(generator: np.random.Generator) -> tuple[Any, ...]:
        record = _dense_record(generator, size, rule)
        start, stop = size // 5, size - size // 7
        grads = _floats(generator, stop - start + 3)
        return rule.code, record, size, start, stop, grads, 3, parameters(rule.hyper)

    return make


def _dense_pull(size: int) -> Callable[[np.random.Generator], tuple[Any, ...]]:
    def make(generator: np.random.Generator) -> tuple[Any, ...]:
        start, stop = size // 5, size - size // 7
        return _floats(generator, 2 * size), start, stop, np.zeros(stop - start + 8, np.float32), 3

    return make


def _dense_push_at(size: int, rule: RuleCase) -> Callable[[np.random.Generator], tuple[Any, ...]]:
    def make(generator: np.random.Generator) -> tuple[Any, ...]:
        positions = generator.integers(0, size, size).astype(np.int64)
        record = _dense_record(generator, size, rule)
        return rule.code, record, size, positions, _floats(generator, size), parameters(rule.hyper)

    return make


def _dense_record(generator: np.random.Generator, size: int, rule: RuleCase) -> Floats:
    """Return values and plausible state: squares that are positive, counts that differ in runs."""
    planes = 1 + rule.num_states + rule.has_count
    record = np.abs(_floats(generator, planes * size))
    record[:size] *= generator.choice(np.array([-1, 1], np.float32), size)
    if rule.has_count:
        record[-size:] = np.repeat(generator.integers(0, 9, size), 5)[:size]
    return record


def _dense_start(size: int, kind: int) -> Callable[[np.random.Generator], tuple[Any, ...]]:
    def make(generator: np.random.Generator) -> tuple[Any, ...]:
        record = np.full(3 * size, np.nan, np.float32)
        start, stop = size // 5, size - size // 7
        array = parameters(RULE_CASES["FTRL"].hyper, (-0.5, 0.25))
        return rules.FTRL, record, size, start, stop, 1_000_003, kind, np.uint64(11), array

    return make


def _largest(count: int) -> Callable[[np.random.Generator], tuple[Any, ...]]:
    return lambda generator: (_floats(generator, count),)


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
            label, words, some = f"{n} in {buckets} buckets", _bucket_words(n, buckets), _select(n, buckets)
            yield ArrayCase(index.bucket_words, reference.bucket_words, label, n, words, (1,))
            yield ArrayCase(dedup.select, reference.select, label, n, some, (2,))
        yield ArrayCase(sparse.largest, reference.largest, f"{n}", n, _largest(n), ())
        yield ArrayCase(csr.logistic, reference.logistic, f"{n}", n, _logistic(n), (2, 3), 1e-6)
    for n in (1, 8, 256, 4096):
        for ones in (True, False):
            name, items = f"{n}x39 {'ones' if ones else 'values'}", n * 39
            make = _csr(n, 39, ones=ones, transposed=False)
            yield ArrayCase(csr.csr_dot, reference.csr_dot, name, items, make, (4,), 1e-5)
            make = _csr(n, 39, ones=ones, transposed=True)
            yield ArrayCase(csr.csr_transposed_dot, reference.csr_transposed_dot, name, items, make, (4,), 1e-5)
    for name, rule in RULE_CASES.items():
        for n in (1, 1000) if rule.is_rare else (1, 1000, 1_000_000):
            make = _dense_push(n, rule)
            yield ArrayCase(dense.dense_push, reference.dense_push, f"{name} {n}", n, make, (1,), 1e-6)
        make = _dense_push_at(1000, rule)
        yield ArrayCase(dense.dense_push_at, reference.dense_push_at, f"{name} 1000", 1000, make, (1,), 1e-6)
    for n in (1, 1000, 1_000_000):
        yield ArrayCase(dense.dense_pull, reference.dense_pull, f"{n}", n, _dense_pull(n), (3,))
    for kind, name in enumerate(("zeros", "constant", "uniform", "normal")):
        make = _dense_start(MIDDLE, kind)
        yield ArrayCase(dense.dense_start, reference.dense_start, name, MIDDLE, make, (1,), 1e-6)


def _sparse_cases() -> Iterator[SparseCase]:
    # Row words 1, 2 and 3 lie in the index, wider rows behind it; Adam of dim 1 has 4 words.
    for name, rule in RULE_CASES.items():
        for dim in (3,) if rule.is_rare else (1, 3, 16):
            num_rows = 500 if rule.is_rare else 5000
            case = f"{name} dim {dim}, {num_rows} rows"
            kind, initial = initializers.NORMAL, (0.1, 0.2)
            yield SparseCase(case, dim, rule, num_rows, 2 * num_rows // 5, kind, initial)
    for dim, name in ((1, "SGD"), (1, "FTRL"), (16, "Adagrad")):
        yield SparseCase(f"{name} dim {dim}, 1000000 rows", dim, RULE_CASES[name], 1_000_000, 100_000)


ARRAY_CASES: Final = tuple(_array_cases())
SPARSE_CASES: Final = tuple(_sparse_cases())
