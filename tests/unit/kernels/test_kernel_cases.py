"""Every kernel against its twin, on the table of cases that the benchmark times too."""

from __future__ import annotations

import numba
import numpy as np
import pytest

from paceline.kernels.cases import ARRAY_CASES, RULE_CASES, SPARSE_CASES, ArrayCase, SparseCase, parameters
from paceline.kernels.compile import KERNELS
from paceline.kernels.initializers import NORMAL
from paceline.kernels.rules import NUM_HYPER
from paceline.tables.rules import (
    ASGD,
    FTRL,
    RULES,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Initializer,
    Momentum,
    NAdam,
    Normal,
    RAdam,
    RMSprop,
    Rprop,
    UpdateRule,
    Zeros,
)
from paceline.tables.sparse_store import SparseStore

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")  # without the JIT

_MOST_ITEMS = 200 if numba.config.DISABLE_JIT else 1_000_000  # type: ignore[attr-defined]
_RULES: dict[str, UpdateRule] = {
    "SGD": SGD(lr=0.1, weight_decay=0.01),
    "SGD maximize": SGD(lr=0.1, weight_decay=0.01, maximize=True),
    "Momentum": Momentum(lr=0.1, weight_decay=0.01, nesterov=True),
    "Momentum dampening": Momentum(lr=0.1, weight_decay=0.01, dampening=0.5),
    "Adagrad": Adagrad(lr=0.1, weight_decay=0.01, initial_accumulator=0.1),
    "Adagrad lr_decay": Adagrad(lr=0.1, weight_decay=0.01, initial_accumulator=0.1, lr_decay=0.2),
    "RMSprop": RMSprop(lr=0.01, weight_decay=0.01),
    "RMSprop momentum": RMSprop(lr=0.01, weight_decay=0.01, momentum=0.9),
    "RMSprop centered": RMSprop(lr=0.01, weight_decay=0.01, centered=True),
    "RMSprop both": RMSprop(lr=0.01, weight_decay=0.01, momentum=0.9, centered=True, maximize=True),
    "Adadelta": Adadelta(weight_decay=0.01),
    "Adam": Adam(lr=0.01, weight_decay=0.01),
    "Adam amsgrad": Adam(lr=0.01, weight_decay=0.01, amsgrad=True, maximize=True),
    "AdamW": AdamW(lr=0.01),
    "Adamax": Adamax(lr=0.01, weight_decay=0.01),
    "NAdam": NAdam(lr=0.01, weight_decay=0.01),
    "NAdam decoupled": NAdam(lr=0.01, weight_decay=0.01, decoupled_weight_decay=True, maximize=True),
    "RAdam": RAdam(lr=0.01, weight_decay=0.01),
    "RAdam decoupled": RAdam(lr=0.01, weight_decay=0.01, decoupled_weight_decay=True, maximize=True),
    "ASGD": ASGD(lr=0.1, weight_decay=0.01, lambd=0.01, t0=2.0),
    "Rprop": Rprop(lr=0.01),
    "FTRL": FTRL(l1=0.1, l2=0.2),
}


def test_a_case_and_its_rule_agree() -> None:
    assert _RULES.keys() == RULE_CASES.keys()
    for name, rule in _RULES.items():
        case = RULE_CASES[name]
        assert (rule.code, rule.num_states, rule.has_count) == (case.code, case.num_states, case.has_count)
        assert rule.hyper == tuple(parameters(case.hyper)[:NUM_HYPER])
    assert {type(rule) for rule in _RULES.values()} == set(RULES.values())


def rule_of(case: SparseCase) -> UpdateRule:
    (name,) = (name for name, rule in RULE_CASES.items() if rule is case.rule)
    return _RULES[name]


def store_of(case: SparseCase) -> SparseStore:
    initializer: Initializer = Zeros()
    if case.initializer == NORMAL:
        initializer = Normal(mean=case.initial[0], std=case.initial[1])
    return SparseStore(dim=case.dim, rule=rule_of(case), initializer=initializer, seed=7)


@pytest.mark.parametrize(
    "case", [case for case in ARRAY_CASES if case.num_items <= _MOST_ITEMS], ids=lambda case: case.label
)
def test_kernel_and_twin_agree(case: ArrayCase) -> None:
    ours, theirs = case.arguments(), case.arguments()
    result, expected = case.kernel(*ours), case.twin(*theirs)
    if isinstance(expected, float):
        assert result == pytest.approx(expected, rel=case.tolerance, abs=case.tolerance)
    else:
        assert result == expected
    for position in case.outputs:
        np.testing.assert_allclose(
            ours[position], theirs[position], rtol=case.tolerance, atol=case.tolerance, strict=True
        )
    for position, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        if position not in case.outputs and not (case.kernel.__name__ == "dedup" and position == 1):
            np.testing.assert_array_equal(mine, other)  # an argument that is no output is left alone


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.thorough] * (case.dim == 3 and case.num_rows == 5000), id=case.label)
        for case in SPARSE_CASES
        if case.num_rows <= 5000
    ],
)
def test_sparse_table_and_twin_agree(case: SparseCase) -> None:
    if numba.config.DISABLE_JIT and case.dim > 1:  # type: ignore[attr-defined]
        pytest.skip("one width is enough for coverage")
    store, twin = store_of(case), case.twin()
    keys, batch, grads = case.batches()
    start = np.resize(grads, len(keys) * case.dim)
    for some, some_grads in ((keys, start), (batch, grads), (batch, grads)):
        store.push(some, some_grads)
        twin.push(some, some_grads)
    erased = batch[::3].copy()
    assert store.erase(erased) == twin.erase(erased.tolist())
    assert len(store) == len(twin.rows)
    found, expected = (np.empty(len(batch) * case.dim, np.float32) for _ in range(2))
    store.pull(batch, found)
    twin.gather(batch, expected)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
    whole, exists = store.read_records(batch)
    assert exists.tolist() == [key in twin.rows for key in batch.tolist()]
    for key, record in zip(batch[exists].tolist(), whole[exists], strict=True):
        np.testing.assert_allclose(record, twin.rows[key], rtol=1e-6, atol=1e-6)
    for some_keys, records in store.items():
        for key, record in zip(some_keys.tolist(), records, strict=True):
            np.testing.assert_allclose(record, twin.rows.pop(key), rtol=1e-6, atol=1e-6)
    assert not twin.rows


def test_every_kernel_has_a_case() -> None:
    in_cases = {case.kernel.__name__ for case in ARRAY_CASES}
    through_the_store = {"gather", "push", "write_records", "copy_records", "erase", "bucket_keys", "rehash"}
    through_the_store |= {"read_records", "has_room", "is_run_too_long", "count_absent", "digest_records"}
    texts = {"parse_criteo", "parse_libsvm", "hash_strings", "parse_floats"}  # test_text_kernels.py
    between_processes = {  # tests/integration/collectives
        *("publish_word", "read_word", "claim", "read_peer"),
        *("all_reduce_small", "all_reduce", "all_reduce_direct", "move"),
    }
    assert in_cases | through_the_store | texts | between_processes == {kernel.__name__ for kernel in KERNELS}
