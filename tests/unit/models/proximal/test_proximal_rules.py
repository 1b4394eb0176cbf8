"""The formulas of delayed block proximal gradient equal a search over many candidates."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.random_examples import num_examples

from paceline.data import Batch
from paceline.errors import DataError, UsageError
from paceline.models.base import BIAS_KEY
from paceline.models.proximal import rules
from paceline.models.proximal.columns import ColumnCollector, ExampleColumns
from paceline.models.proximal.margins import Margins
from paceline.models.proximal.rules import ProximalBlocks
from paceline.models.proximal.schedule import (
    FULL_PASS_INTERVAL,
    Convergence,
    block_order,
    block_starts,
    count_blocks,
    moving_with,
    places_of,
)
from paceline.ps import ProximalNewton, SparseStore
from paceline.tables.rules.proximal import proximal_step
from paceline.tables.spec import TableSpec

numbers = st.integers(-80, 80).map(lambda number: number / 10)
penalties = st.integers(0, 40).map(lambda number: number / 10)


@given(weight=numbers, gradient=numbers, bound=st.floats(0.01, 8), l1=penalties, l2=penalties)
def test_a_proximal_step_is_optimal(weight: float, gradient: float, bound: float, l1: float, l2: float) -> None:
    def objective(step: Any) -> Any:
        after = weight + step
        return gradient * step + bound * step * step / 2 + l1 * np.abs(after) + l2 * after * after / 2

    step = float(proximal_step(*(np.float64(number) for number in (weight, gradient, bound, l1, l2))))  # type: ignore[arg-type]
    candidates = np.concatenate([step + np.linspace(-1, 1, 201), [-weight, 0.0]])
    assert objective(step) <= objective(candidates).min() + 1e-9


def push(store: SparseStore, key: int, *pairs: tuple[float, float]) -> list[float]:
    keys, out = np.array([key], np.uint64), np.empty(2, np.float32)
    for pair in pairs:
        store.push(keys, np.array(pair, np.float32))
    store.pull(keys, out)
    return out.tolist()


def test_a_row_is_described_and_then_steps_within_the_radius() -> None:
    store = SparseStore(dim=2, rule=ProximalNewton(l1=1.0, l2=0.5))
    assert push(store, 1, (6.0, -3.0)) == [6.0, 3.0]  # three values with mean 2: the first radius is 1 / 2
    assert push(store, 1, (-100.0, 4.0)) == [0.5, -100.0]  # the step is at most one radius
    assert push(store, 1, (-100.0, 4.0)) == pytest.approx([0.5 + 2 * 0.5 + 0.1 * 0.5, -100.0])
    assert push(store, 1, (7.0, 0.0))[1] == 7.0  # this pair adds to the sum and moves no weight
    assert push(store, 2, (-3.0, -3.0), (0.25, 4.0)) == [-0.0625, 0.25]  # no penalty applies
    assert push(store, 3, (3.0, -3.0), (0.25, 4.0)) == [0.0, 0.25]  # the gradient is smaller than the penalty
    assert push(store, 1, (6.0, -3.0), (0.0, 4.0)) == [0.0, 0.0]  # a new description sets the weight to 0


def test_the_rule_is_for_rows_of_two_values() -> None:
    for kind, sizes in (("sparse", {"dim": 3}), ("dense", {"size": 10})):
        with pytest.raises(UsageError, match=r"ProximalNewton updates sparse tables with dim=2 only"):
            TableSpec(name="w", kind=kind, update={"kind": "ProximalNewton"}, initializer={"kind": "Zeros"}, **sizes)


@given(weight=numbers, gradient=numbers, l1=penalties, l2=penalties)
def test_the_violation_is_0_only_for_optimal_weights(weight: float, gradient: float, l1: float, l2: float) -> None:
    found = rules.violations(*(np.array([number]) for number in (weight, gradient, l1, l2)))[0]
    step = proximal_step(*(np.array([number]) for number in (weight, gradient, 1.0, l1, l2)))[0]
    assert found >= 0
    assert (found < 1e-9) == (abs(step) < 1e-9) or found < 1e-6


def test_the_filter_keeps_moving_weights_active() -> None:
    weights, gradients = np.array([0.0, 0.0, 0.0, 2.0, 0.0]), np.array([0.5, -0.95, 1.5, 0.0, 0.0])
    l1 = np.array([1.0, 1.0, 1.0, 1.0, 0.0])
    assert rules.stay_active(weights, gradients, l1, np.full(5, 0.1)).tolist() == [False, True, True, True, True]
    assert rules.stay_active(weights, gradients, l1, np.full(5, np.inf)).all()
    assert rules.filter_threshold(3.0, 100) == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"l1": -1.0}, r"--l1 -1: expected a number of 0 or more"),
        ({"l2": np.inf}, "--l2 inf"),
        ({"max_delay": -1}, "--max-delay -1"),
        ({"block_ratio": 0.0}, "--block-ratio 0"),
        ({"tolerance": 1.0}, "--tolerance 1"),
    ],
)
def test_settings_out_of_range_are_refused(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ProximalBlocks(**setting)


# Blocks.


@given(st.integers(1, 300), st.integers(1, 40))
def test_every_column_is_in_one_block(num_columns: int, num_blocks: int) -> None:
    places = np.sort(places_of(np.arange(num_columns, dtype=np.uint64)))
    starts = block_starts(places, num_blocks)
    assert (starts[0], starts[-1], len(starts)) == (0, num_columns, num_blocks + 1)
    assert (np.diff(starts) >= 0).all()
    assert [int(position) * num_blocks >> 64 for position in places] == np.repeat(
        np.arange(num_blocks), np.diff(starts)
    ).tolist()
    assert sorted(block_order(num_blocks)) == list(range(num_blocks))


def test_the_ratio_determines_the_number_of_blocks() -> None:
    assert count_blocks(4.0, 1400, 100, 120) == 56
    assert count_blocks(4.0, 1400, 100, 10) == 10
    assert count_blocks(0.01, 1400, 100, 120) == count_blocks(4.0, 0, 0, 0) == 1


@given(st.integers(1, 20), st.integers(0, 25))
def test_a_block_moves_with_all_blocks_within_the_delay(num_steps: int, max_delay: int) -> None:
    together = [set(moving_with(step, num_steps, max_delay)) for step in range(num_steps)]
    for a in range(num_steps):
        for b in range(num_steps):
            assert (b in together[a]) == (abs(a - b) <= max_delay)


# Convergence.


def test_training_ends_when_a_pass_over_all_columns_changes_little() -> None:
    run = Convergence(100.0, 1e-3, 1000)
    run.record_pass(50.0)
    assert (run.change, run.is_over_all, run.is_over) == (1.0, False, False)
    run.record_pass(49.99)
    assert (run.is_over_all, run.has_converged) == (
        True,
        False,
    )  # the filter may have skipped some columns
    run.record_pass(45.0)
    assert (run.is_over_all, run.has_converged) == (False, False)  # the filter had skipped some columns
    run.record_pass(44.99)
    run.record_pass(44.98)
    assert run.has_converged
    assert run.is_over


def test_passes_over_all_columns_occur_regularly() -> None:
    run, over_all = Convergence(2.0**40, 1e-9, 25), []
    while not run.is_over:
        over_all.append(run.is_over_all)
        run.record_pass(2.0 ** (39 - run.num_passes))
    assert [number for number, is_full in enumerate(over_all) if is_full] == [
        0,
        FULL_PASS_INTERVAL,
        2 * FULL_PASS_INTERVAL,
    ]
    assert (run.num_passes, run.has_converged) == (25, False)


# ExampleColumns and margins.


def examples(seed: int, *, ones: bool, weighted: bool) -> tuple[Batch, np.ndarray[Any, Any]]:
    """Return examples, and the same as a dense matrix, whose last column is the intercept's."""
    random = np.random.default_rng(seed)
    num, width = int(random.integers(1, 30)), int(random.integers(1, 9))
    indptr = np.concatenate([[0], np.cumsum(random.integers(0, 5, num))]).astype(np.int64)
    keys = random.integers(0, width, indptr[-1]).astype(np.uint64)
    values = np.round(random.normal(0, 10.0 ** random.integers(-3, 4), len(keys)) * random.integers(0, 2, len(keys)), 4)
    dense = np.zeros((num, width + 1))
    dense[:, -1] = 1
    rows = np.repeat(np.arange(num), np.diff(indptr))
    np.add.at(dense, (rows, keys.astype(int)), 1.0 if ones else values.astype(np.float32))
    weights = random.uniform(0, 3, num).astype(np.float32) if weighted else None
    labels = random.integers(0, 2, num).astype(np.float32)
    return Batch(labels, indptr, keys, None if ones else values.astype(np.float32), weights), dense


def by_column(batch: Batch) -> ExampleColumns:
    collector = ColumnCollector()
    for start in range(0, batch.num_examples, 7):
        collector.add(batch.slice(start, min(start + 7, batch.num_examples)))
    return collector.finish()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("ones", [False, True])
@num_examples(25)
@given(seed=st.integers(0, 10_000))
def test_a_step_within_the_radii_lowers_the_loss_as_bounded(seed: int, ones: bool, weighted: bool) -> None:
    """With any columns and any common rows, a pass without delay never raises the objective."""
    batch, dense = examples(seed, ones=ones, weighted=weighted)
    columns, random = by_column(batch), np.random.default_rng(seed)
    assert columns.keys[-1] == BIAS_KEY
    places = [int(key) for key in columns.keys[:-1]] + [dense.shape[1] - 1]
    matrix, margins = dense[:, places], Margins(columns, 0.5)
    assert (matrix != 0).sum() <= len(columns.rows)
    y, c = 2 * batch.labels - 1.0, 1.0 if batch.weights is None else batch.weights.astype(np.float64)

    def loss(weights: Any) -> float:
        return float((np.logaddexp(0, -y * (0.5 + matrix @ weights)) * c).sum())

    weights, chosen = np.zeros(len(places)), np.arange(len(places))
    start = random.normal(0, 1, len(places)) / np.maximum(np.abs(matrix).max(axis=0), 1e-9)
    margins.move(chosen, start)
    weights += start
    assert margins.losses()[0] == pytest.approx(loss(weights), rel=1e-5)
    margins.begin_moving(chosen)
    radii = (np.abs(random.normal(0, 1, len(places))) / np.maximum(np.abs(matrix).max(axis=0), 1e-9)).astype(np.float32)
    pairs = margins.gradients(chosen, radii).astype(np.float64)
    slope = (-y * c / (1 + np.exp(np.clip(y * (0.5 + matrix @ weights), -500, 500)))) @ matrix
    np.testing.assert_allclose(pairs[:, 0], slope, rtol=1e-3, atol=1e-4 * max(1.0, np.abs(slope).max()))
    for _ in range(5):
        step = radii * random.uniform(-1, 1, len(places))
        most = loss(weights) + pairs[:, 0] @ step + (pairs[:, 1] * step * step).sum() / 2
        assert loss(weights + step) <= most + 1e-3 * max(1.0, abs(most))


def test_values_of_zero_are_dropped_and_columns_are_sorted_by_place() -> None:
    batch = Batch(
        np.array([1, 0, 1], np.float32),
        np.array([0, 2, 3, 4], np.int64),
        np.array([5, 9, 5, 7], np.uint64),
        np.array([2, 0, -4, 0], np.float32),
        np.ones(3, np.float32),
    )
    columns = by_column(batch)
    assert columns.keys.tolist() == [5, int(BIAS_KEY)]
    assert (columns.num_examples, columns.num_values, len(columns.weights)) == (3, 2, 0)
    assert columns.magnitudes().tolist() == [6.0, 3.0]
    assert columns.rows.tolist() == [0, 1, 0, 1, 2]
    values = np.array([1e12, 1e-6, 2e-6, -4e-6], np.float32)  # in one running sum, 1e12 would absorb the other values
    wide = by_column(Batch(np.zeros(2, np.float32), np.array([0, 3, 4]), np.array([5, 6, 7, 7], np.uint64), values))
    known = dict(zip(wide.keys.tolist(), wide.magnitudes().tolist(), strict=True))
    assert [known[key] for key in (5, 6, 7, int(BIAS_KEY))] == pytest.approx([1e12, 1e-6, 6e-6, 2.0], rel=1e-6)
    nothing = ColumnCollector().finish()
    assert (nothing.num_examples, nothing.num_values, nothing.keys.tolist()) == (0, 0, [int(BIAS_KEY)])


def test_invalid_examples_are_refused() -> None:
    batch, _ = examples(3, ones=True, weighted=False)
    with pytest.raises(DataError, match=r"do not fit into this worker's memory by column: 0 MiB more are needed"):
        ColumnCollector(available_bytes=100).add(batch)


def test_values_beyond_a_float32_are_refused() -> None:
    batch = Batch(np.ones(1, np.float32), np.array([0, 1]), np.array([77], np.uint64), np.array([1e30], np.float32))
    margins = Margins(by_column(batch), 0.0)
    margins.begin_moving(np.array([0]))
    with pytest.raises(DataError, match="the values of the column with key 77 are too large for this solver"):
        margins.gradients(np.array([0]), np.ones(2, np.float32))
