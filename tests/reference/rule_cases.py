"""The cases of the update rules' kernels. Tests compare each kernel with its reference; the benchmark measures both.

The settings are in :mod:`tests.reference.update_rules`; the tables and batches are here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from tests.reference import rules as reference
from tests.reference.kernel_cases import MIDDLE, ArrayCase, floats, generator_of, random_keys
from tests.reference.kernels import Doubles, Floats, Keys
from tests.reference.update_rules import RuleCase, find_cases

from paceline.tables.initializers import INITIALIZERS, Initializer, Normal, Zeros
from paceline.tables.rules import FTRL, RULES, UpdateRule, kernels
from paceline.tables.sparse_store import SparseStore

_ZEROS: Final = Zeros()
RULE_CASES: Final[dict[str, RuleCase]] = {
    f"{name} {case_name}".strip(): case for name, rule in RULES.items() for case_name, case in find_cases(rule).items()
}


@dataclass(frozen=True)
class SparseCase:
    """A sparse table of `num_rows` rows, and a batch of `num_keys` keys. The table contains most of them."""

    name: str
    dim: int
    rule: UpdateRule
    num_rows: int
    num_keys: int
    initializer: Initializer = _ZEROS

    @property
    def label(self) -> str:
        """The name of the case."""
        return f"table {self.name}"

    def store(self) -> SparseStore:
        """Return an empty store."""
        return SparseStore(dim=self.dim, rule=self.rule, initializer=self.initializer, seed=7)

    def twin(self) -> reference.ReferenceTable:
        """Return an empty reference table."""
        store = self.store()
        return reference.ReferenceTable(
            self.dim, store.row_words, self.rule.code, store.parameters, self.initializer.code, seed=7
        )

    def batches(self) -> tuple[Keys, Keys, Floats]:
        """Return the table's keys, the batch's keys (a tenth absent from the table) and its gradients."""
        generator = generator_of(self.label)
        keys = random_keys(generator, self.num_rows)
        picked = keys[generator.integers(0, self.num_rows, self.num_keys)]
        absent = generator.random(self.num_keys) < 0.1
        picked[absent] = random_keys(generator, int(absent.sum()))
        grads = generator.standard_normal(self.num_keys * self.dim).astype(np.float32)
        return keys, picked, grads


def parameters(rule: UpdateRule, initializer: Initializer | None = None) -> Doubles:
    """Return a table's parameter array."""
    return SparseStore(dim=rule.row_dim or 1, rule=rule, initializer=initializer).parameters


def _dense_push(size: int, rule: UpdateRule) -> Callable[[np.random.Generator], tuple[Any, ...]]:
    def make(generator: np.random.Generator) -> tuple[Any, ...]:
        record = _dense_record(generator, size, rule)
        start, stop = size // 5, size - size // 7
        grads = floats(generator, stop - start + 3)
        return rule.code, record, size, start, stop, grads, 3, parameters(rule)

    return make


def _dense_push_at(size: int, rule: UpdateRule) -> Callable[[np.random.Generator], tuple[Any, ...]]:
    def make(generator: np.random.Generator) -> tuple[Any, ...]:
        positions = generator.integers(0, size, size).astype(np.int64)
        record = _dense_record(generator, size, rule)
        return rule.code, record, size, positions, floats(generator, size), parameters(rule)

    return make


def _dense_record(generator: np.random.Generator, size: int, rule: UpdateRule) -> Floats:
    """Return values and plausible states: squares are positive, and counts differ between runs of elements."""
    planes = 1 + rule.num_states + rule.has_count
    record = np.abs(floats(generator, planes * size))
    record[:size] *= generator.choice(np.array([-1, 1], np.float32), size)
    if rule.has_count:
        record[-size:] = np.repeat(generator.integers(0, 9, size), 5)[:size]
    return record


def _dense_start(size: int, kind: int) -> Callable[[np.random.Generator], tuple[Any, ...]]:
    def make(generator: np.random.Generator) -> tuple[Any, ...]:
        record = np.full(3 * size, np.nan, np.float32)
        start, stop = size // 5, size - size // 7
        array = parameters(FTRL(l1=0.1, l2=0.2), Normal(mean=-0.5, std=0.25))  # or Uniform
        return FTRL.code, record, size, start, stop, 1_000_003, kind, np.uint64(11), array

    return make


def _array_cases() -> Iterator[ArrayCase]:
    for name, (rule, is_rare) in RULE_CASES.items():
        if rule.row_dim is not None:
            continue
        for n in (1, 1000) if is_rare else (1, 1000, 1_000_000):
            make = _dense_push(n, rule)
            yield ArrayCase(kernels.dense_push, reference.dense_push, f"{name} {n}", n, make, (1,), 1e-6)
        make = _dense_push_at(1000, rule)
        yield ArrayCase(kernels.dense_push_at, reference.dense_push_at, f"{name} 1000", 1000, make, (1,), 1e-6)
    for name, start in INITIALIZERS.items():
        make = _dense_start(MIDDLE, start.code)
        label = name.lower()
        yield ArrayCase(kernels.dense_start, reference.dense_start, label, MIDDLE, make, (1,), 1e-6)


def _sparse_cases() -> Iterator[SparseCase]:
    # Rows of 1, 2 and 3 words are stored in the index, and wider rows outside. Adam with dim 1 has 4 words.
    for name, (rule, is_rare) in RULE_CASES.items():
        for dim in (rule.row_dim or 3,) if is_rare else (1, 3, 16):
            num_rows = 5000 if dim == 1 else 500  # the twin is slow
            case = f"{name} dim {dim}, {num_rows} rows"
            yield SparseCase(case, dim, rule, num_rows, 2 * num_rows // 5, Normal(mean=0.1, std=0.2))
    for dim, name in ((1, "SGD"), (1, "FTRL"), (16, "Adagrad")):
        yield SparseCase(f"{name} dim {dim}, 1000000 rows", dim, RULE_CASES[name].rule, 1_000_000, 100_000)


ARRAY_CASES: Final = tuple(_array_cases())
SPARSE_CASES: Final = tuple(_sparse_cases())
