"""Bounds of magnitudes decide whether a push may overflow. No bound is lower than a magnitude."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from tests.reference.rule_cases import RULE_CASES

from paceline.protocol import NUM_BUCKETS
from paceline.protocol.buckets import ALL
from paceline.ps.messages import TableSpec
from paceline.tables.initializers import Constant, Initializer, Normal, Zeros
from paceline.tables.part import Selection, TablePart
from paceline.tables.rules import FTRL, RULES, SGD, Adagrad, Adam, AdamW, Momentum, NAdam, RMSprop, Rprop, UpdateRule
from paceline.tables.rules.growth import Bounds
from paceline.tables.settings import to_fields
from paceline.tables.sparse_part import make_part

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value")  # without the JIT

NUM_ROWS = 40
SETTINGS: list[UpdateRule] = [
    SGD(lr=0.1),
    SGD(lr=3.0, weight_decay=0.5),
    Momentum(lr=0.1, momentum=0.9, weight_decay=0.01),
    Momentum(lr=1.0, momentum=0.99, nesterov=True),
    Momentum(lr=0.1, momentum=0.5, dampening=0.5, maximize=True),
    Adagrad(lr=0.1),
    Adagrad(lr=0.1, lr_decay=0.1, maximize=True),
    Adagrad(lr=2.0, eps=1e-3, initial_accumulator=0.5, weight_decay=0.1),
    RMSprop(lr=0.01),
    RMSprop(lr=1.0, alpha=0.5, weight_decay=0.1),
    RMSprop(lr=0.1, momentum=0.9, weight_decay=0.01),
    Adam(lr=0.01),
    Adam(lr=0.1, amsgrad=True),
    Adam(lr=0.1, betas=(0.5, 0.6), weight_decay=0.3),
    AdamW(lr=0.1, weight_decay=0.1),
    SGD(lr=3.0, weight_decay=0.5, l1=0.1),
    Adagrad(lr=2.0, eps=1e-3, l1=0.1),
    Adam(lr=0.1, l1=0.1),
    FTRL(),
    FTRL(alpha=3.0, beta=0.1, l1=0.5, l2=0.25),
]
SETTINGS += [case.rule for name, case in RULE_CASES.items() if name in RULES and case.rule.has_bounds()]


def in_tables(rules: list[UpdateRule]) -> list[tuple[UpdateRule, str]]:
    """Return each rule with each kind of table that supports it."""
    return [(rule, kind) for rule in rules for kind in ("sparse", "dense") if kind == "sparse" or not rule.row_dim]


def part_of(rule: UpdateRule, kind: str, start: Initializer | None = None) -> TablePart:
    fields = to_fields(Zeros() if start is None else start)
    sizes = {"dim": rule.row_dim or 3} if kind == "sparse" else {"size": 3 * NUM_ROWS}
    return make_part(TableSpec(name="w", kind=kind, update=to_fields(rule), initializer=fields, **sizes), ALL)


def bounds_of(part: TablePart) -> Bounds:
    return part.magnitudes.bounds


def found_in(part: TablePart) -> Bounds:
    """Return the magnitudes of all records."""
    kept = part.magnitudes
    part.magnitudes = type(kept)(part.rule, part.initializer, part.dim)
    part.measure_all()
    found, part.magnitudes = bounds_of(part), kept
    return found


def rows_of(part: TablePart) -> dict[int, np.ndarray]:
    """Return all records by key."""
    rows: dict[int, np.ndarray] = {}
    for bucket in range(NUM_BUCKETS):
        keys, records = part.read_bucket(bucket)
        rows |= dict(zip(keys.tolist(), records, strict=True))
    return rows


def push(part: TablePart, keys: Selection, grads: np.ndarray) -> bool:
    """Push if the bounds exclude an overflow; return whether they do."""
    is_safe = part.magnitudes.take(float(np.abs(grads).max()))
    if is_safe:
        part.push(keys, grads)
    return is_safe


def assert_bounded(part: TablePart) -> None:
    for found, bound in zip(found_in(part), bounds_of(part), strict=True):
        assert found <= bound * (1 + 1e-6), (found_in(part), bounds_of(part))


def test_every_rule_with_bounds_has_a_setting() -> None:
    assert {type(rule) for rule in SETTINGS} == {kind for kind in RULES.values() if kind.has_bounds()}


@pytest.mark.parametrize(("rule", "kind"), in_tables(SETTINGS), ids=str)
def test_no_record_exceeds_the_bounds(rule: UpdateRule, kind: str) -> None:
    random = np.random.default_rng(7)
    part = part_of(rule, kind, Normal(mean=0.5, std=0.1))
    for number in range(100):
        scale = 10.0 ** int(random.integers(-25, 4))
        if number == 50:  # gradients of the same sign add up
            scale = 1e3
        chosen = np.sort(random.choice(NUM_ROWS, 10, replace=False)).astype(np.uint64)
        grads = np.abs(random.normal(0, scale, 10 * part.dim)).astype(np.float32)
        grads *= 1.0 if number < 60 else random.choice([-1.0, 1.0], len(grads)).astype(np.float32)
        assert push(part, Selection(chosen), grads), (number, bounds_of(part))
        if number % 20 == 0:
            assert_bounded(part)
    assert_bounded(part)


@pytest.mark.parametrize("rule", SETTINGS, ids=str)
def test_bounds_stay_low_through_long_training(rule: UpdateRule) -> None:
    magnitudes = part_of(rule, "sparse").magnitudes
    decays = isinstance(rule, Momentum) and rule.weight_decay  # the bounds ignore its effect on velocity
    for number in range(3_000 if decays else 20_000):
        assert magnitudes.take(1.0 + number % 7), number


@pytest.mark.parametrize("rule", [SGD(lr=1.0), Momentum(lr=1.0, momentum=1.0), FTRL(alpha=1.0)], ids=str)
def test_bounds_can_be_replaced_by_measured_magnitudes(rule: UpdateRule) -> None:
    part = part_of(rule, "sparse")
    key, grads = Selection(np.zeros(1, np.uint64)), np.full(3, 1e36, np.float32)
    while push(part, key, grads):
        assert_bounded(part)
    (_, after), *_ = part.trial(key, grads)
    assert np.isfinite(after).all() or isinstance(rule, FTRL)  # the push is refused long before an overflow
    part.magnitudes.take_unseen(1e38)
    assert not part.magnitudes.take(0.0)
    part.measure_all()
    assert_bounded(part)


@pytest.mark.parametrize(
    ("rule", "record"),
    [
        (Adagrad(lr=1.0), [0, -1]),
        (RMSprop(lr=1.0), [0, math.nan]),
        (Adam(lr=1.0), [0, 1, 0, 1]),
        (Adam(lr=1.0), [0, 0, 0, -1]),
        (FTRL(), [0, 0, -1]),
        (SGD(lr=1.0), [math.nan]),
        (SGD(lr=1.0), [-math.inf]),
    ],
    ids=str,
)
def test_an_invalid_record_makes_every_push_a_trial(rule: UpdateRule, record: list[float]) -> None:
    part = part_of(rule, "dense")
    part.write_records(np.array([5], np.uint64), np.array([record], np.float32))
    assert not part.magnitudes.take(1.0)


def test_weights_of_other_hyperparameters() -> None:
    part = part_of(FTRL(alpha=0.001), "sparse", Constant(value=2.0))
    key = Selection(np.arange(5, dtype=np.uint64))
    for alpha in (1.0, 1e-3, 50.0, 1.0):
        for _ in range(20):
            assert push(part, key, np.full(15, -3.0, np.float32))
            assert_bounded(part)
        part.set_update(FTRL(alpha=alpha, beta=0.5))


@pytest.mark.parametrize("rule", [RMSprop(lr=0.1, centered=True), NAdam(lr=0.1), Rprop(lr=0.1)], ids=str)
def test_pushes_of_rules_without_bounds_are_always_trials(rule: UpdateRule) -> None:
    part = part_of(rule, "sparse")
    for _ in range(3):
        assert not part.magnitudes.take(1.0)
        part.measure_all()


UNBOUNDED_RULES = [case.rule for name, case in RULE_CASES.items() if name in RULES and not case.rule.has_bounds()]


@pytest.mark.parametrize(("rule", "kind"), in_tables([*SETTINGS, *UNBOUNDED_RULES]), ids=str)
def test_a_trial_equals_the_push(rule: UpdateRule, kind: str) -> None:
    random = np.random.default_rng(3)
    part = part_of(rule, kind)
    part.push(Selection(np.arange(20, dtype=np.uint64)), random.normal(size=20 * part.dim).astype(np.float32))
    selections = [Selection(np.array([3, 30, 7, 119 if kind == "dense" else 2**64 - 1], np.uint64))]
    if kind == "dense":
        selections += [Selection(None, 5, 100), Selection(np.array([4, 4, 1], np.uint64))]
    for selection in selections:
        grads = random.normal(size=part.num_values(selection)).astype(np.float32)
        tried: dict[int, Any] = {}
        for keys, records in part.trial(selection, grads):
            tried |= dict(zip(keys.tolist(), records, strict=True))
        assert tried.keys() == set(part.keys_of(selection).tolist())
        before = rows_of(part)
        part.push(selection, grads)
        stored = rows_of(part)
        assert any(before.get(key) is None or (before[key] != stored[key]).any() for key in tried)
        for key, record in tried.items():
            assert record.tobytes() == stored[key].tobytes()
