"""Update rules equal torch.optim, and FTRL equals its paper, computed in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.reference.rule_cases import parameters

from paceline.kernels.initializers import CONSTANT, ZEROS
from paceline.tables.initializers import Constant
from paceline.tables.rules import (
    ASGD,
    FTRL,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Momentum,
    NAdam,
    RAdam,
    RMSprop,
    Rprop,
    UpdateRule,
    kernels,
)
from paceline.tables.sparse_store import SparseStore

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")  # without the JIT

Floats = npt.NDArray[np.float32]
STEPS = 100

RULES: dict[str, tuple[UpdateRule, str, dict[str, Any]]] = {
    "SGD": (SGD(lr=0.05), "SGD", {"lr": 0.05}),
    "SGD decay": (SGD(lr=0.05, weight_decay=0.1), "SGD", {"lr": 0.05, "weight_decay": 0.1}),
    "Momentum": (Momentum(lr=0.02), "SGD", {"lr": 0.02, "momentum": 0.9}),
    "Momentum decay": (
        Momentum(lr=0.02, momentum=0.8, weight_decay=0.1),
        "SGD",
        {"lr": 0.02, "momentum": 0.8, "weight_decay": 0.1},
    ),
    "Nesterov": (Momentum(lr=0.02, nesterov=True), "SGD", {"lr": 0.02, "momentum": 0.9, "nesterov": True}),
    "Nesterov decay": (
        Momentum(lr=0.02, nesterov=True, weight_decay=0.1),
        "SGD",
        {"lr": 0.02, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    ),
    "Adagrad": (Adagrad(lr=0.1), "Adagrad", {"lr": 0.1}),
    "Adagrad decay": (
        Adagrad(lr=0.1, initial_accumulator=0.5, weight_decay=0.1),
        "Adagrad",
        {"lr": 0.1, "initial_accumulator_value": 0.5, "weight_decay": 0.1},
    ),
    "RMSprop": (RMSprop(lr=0.01), "RMSprop", {"lr": 0.01}),
    "RMSprop decay": (
        RMSprop(lr=0.01, alpha=0.9, weight_decay=0.1),
        "RMSprop",
        {"lr": 0.01, "alpha": 0.9, "weight_decay": 0.1},
    ),
    "SGD maximize": (SGD(lr=0.01, maximize=True), "SGD", {"lr": 0.01, "maximize": True}),
    "Dampening": (
        Momentum(lr=0.02, dampening=0.5, weight_decay=0.1),
        "SGD",
        {"lr": 0.02, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1},
    ),
    "Adagrad lr_decay": (Adagrad(lr=0.1, lr_decay=0.1), "Adagrad", {"lr": 0.1, "lr_decay": 0.1}),
    "RMSprop momentum": (RMSprop(lr=0.001, momentum=0.9), "RMSprop", {"lr": 0.001, "momentum": 0.9}),
    "Adadelta": (Adadelta(weight_decay=0.1), "Adadelta", {"weight_decay": 0.1}),
    "Adam amsgrad": (Adam(lr=0.01, amsgrad=True), "Adam", {"lr": 0.01, "amsgrad": True}),
    "Adamax": (Adamax(lr=0.01, weight_decay=0.1), "Adamax", {"lr": 0.01, "weight_decay": 0.1}),
    "NAdam": (NAdam(lr=0.01, weight_decay=0.1), "NAdam", {"lr": 0.01, "weight_decay": 0.1}),
    "RAdam": (
        RAdam(lr=0.01, weight_decay=0.1, decoupled_weight_decay=True),
        "RAdam",
        {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True},
    ),
    "ASGD": (ASGD(lr=0.05, lambd=0.01, t0=10), "ASGD", {"lr": 0.05, "lambd": 0.01, "t0": 10}),
    "Rprop": (Rprop(lr=0.001), "Rprop", {"lr": 0.001}),
    "Adam": (Adam(lr=0.01), "Adam", {"lr": 0.01}),
    "Adam decay": (
        Adam(lr=0.01, betas=(0.8, 0.95), weight_decay=0.1),
        "Adam",
        {"lr": 0.01, "betas": (0.8, 0.95), "weight_decay": 0.1},
    ),
    "AdamW": (AdamW(lr=0.01, weight_decay=0.0), "AdamW", {"lr": 0.01, "weight_decay": 0.0}),
    "AdamW decay": (AdamW(lr=0.01, weight_decay=0.1), "AdamW", {"lr": 0.01, "weight_decay": 0.1}),
}


def gradients(size: int, seed: int = 0) -> Floats:
    """Gradients (float32 [STEPS, size]) of a noisy descent, some of them exactly zero."""
    generator = np.random.default_rng(seed)
    grads = generator.standard_normal((STEPS, size)).astype(np.float32)
    grads[generator.random((STEPS, size)) < 0.1] = 0
    grads[:, 0] = 0  # this element has no gradient at any step
    return grads


def torch_result(optimizer: str, settings: dict[str, Any], start: Floats, grads: Floats, parts: bool = False) -> Floats:
    """Return the parameters of torch.optim from `start`.

    With `parts`, each element is a separate parameter. A NaN means that the element has no gradient at this step.
    """
    torch = pytest.importorskip("torch")
    if parts:
        columns = []
        for j in range(len(start)):
            own_grads = grads[:, j : j + 1]
            columns.append(torch_result(optimizer, settings, start[j : j + 1], own_grads[~np.isnan(own_grads[:, 0])]))
        return np.concatenate(columns)
    weight = torch.nn.Parameter(torch.tensor(start))
    stepper = getattr(torch.optim, optimizer)([weight], **settings, foreach=False)
    for grad in grads:
        weight.grad = torch.tensor(grad)
        stepper.step()
    result: Floats = weight.detach().numpy().copy()
    return result


def ftrl_float64(gradients: npt.NDArray[np.float64], rule: FTRL, start: float) -> npt.NDArray[np.float64]:
    """Return the weight after each gradient, by McMahan et al., KDD 2013, algorithm 1, in float64.

    The paper has no initial weight `start`. Here, z starts at the value that gives this weight.
    """
    alpha, beta, l1, l2 = rule.alpha, rule.beta, rule.l1, rule.l2
    z, n, weights = 0.0, 0.0, []
    if start:
        z = -start * (beta / alpha + l2) - math.copysign(l1, start)
    for g in gradients.tolist():
        w = 0.0 if abs(z) <= l1 else -(z - math.copysign(l1, z)) / ((beta + math.sqrt(n)) / alpha + l2)
        sigma = (math.sqrt(n + g * g) - math.sqrt(n)) / alpha
        z += g - sigma * w
        n += g * g
        weights.append(0.0 if abs(z) <= l1 else -(z - math.copysign(l1, z)) / ((beta + math.sqrt(n)) / alpha + l2))
    return np.array(weights, np.float64)


def check(found: Floats, expected: Floats) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("dim", [1, 16])
def test_sparse_rows_equal_torch(name: str, dim: int) -> None:
    rule, optimizer, settings = RULES[name]
    keys = np.array([0, 5, 2**64 - 1], np.uint64)
    start, grads = np.float32(0.75), gradients(len(keys) * dim)
    store = SparseStore(dim=dim, rule=rule, initializer=Constant(value=float(start)))
    for grad in grads:
        store.push(keys, grad)
    found = np.empty(len(keys) * dim, np.float32)
    store.pull(keys, found)
    check(found, torch_result(optimizer, settings, np.full(len(found), start), grads))


@pytest.mark.parametrize("name", RULES)
def test_sparse_rows_count_steps_separately(name: str) -> None:
    rule, optimizer, settings = RULES[name]
    keys, grads = np.arange(4, dtype=np.uint64), gradients(4)
    absent = np.random.default_rng(1).random(grads.shape) < 0.5
    store = SparseStore(dim=1, rule=rule, initializer=Constant(value=0.5))
    for grad, skip in zip(grads, absent, strict=True):
        store.push(keys[~skip], grad[~skip])
    found = np.empty(4, np.float32)
    store.pull(keys, found)
    grads[absent] = np.nan
    check(found, torch_result(optimizer, settings, np.full(4, 0.5, np.float32), grads, parts=True))


def dense_record(rule: UpdateRule, start: Floats) -> tuple[Floats, npt.NDArray[np.float64]]:
    size = len(start)
    array = parameters(rule)
    record = np.full(size * (1 + rule.num_states + rule.has_count), np.nan, np.float32)
    kernels.dense_start(rule.code, record, size, 0, size, 0, ZEROS, np.uint64(0), array)
    assert not record[:size].any()
    record[:size] = start
    return record, array


@pytest.mark.parametrize("name", RULES)
def test_dense_ranges_equal_torch(name: str) -> None:
    rule, optimizer, settings = RULES[name]
    size = 23
    start, grads = np.linspace(-1, 1, size, dtype=np.float32), gradients(size)
    record, array = dense_record(rule, start)
    for grad in grads:
        kernels.dense_push(rule.code, record, size, 0, size, grad, 0, array)
    check(record[:size], torch_result(optimizer, settings, start, grads))


def push_by_range(rule: UpdateRule, record: Floats, array: Any, chosen: Any, grad: Floats) -> None:
    size, stop = len(grad), 0
    for begin in range(size):
        if begin >= stop and chosen[begin]:
            stop = begin + int(np.argmin([*chosen[begin:], False]))
            kernels.dense_push(rule.code, record, size, begin, stop, grad, begin, array)


def push_by_position(rule: UpdateRule, record: Floats, array: Any, chosen: Any, grad: Floats) -> None:
    positions = np.random.default_rng(0).permutation(np.flatnonzero(chosen))
    kernels.dense_push_at(rule.code, record, len(grad), positions, grad[positions], array)


@pytest.mark.parametrize("push", [push_by_range, push_by_position])
@pytest.mark.parametrize("name", RULES)
def test_dense_elements_count_steps_separately(name: str, push: Callable[..., None]) -> None:
    rule, optimizer, settings = RULES[name]
    size = 6
    start, grads = np.linspace(-1, 1, size, dtype=np.float32), gradients(size)
    record, array = dense_record(rule, start)
    generator = np.random.default_rng(2)
    chosen = np.zeros(grads.shape, bool)
    for row in chosen:  # a range with arbitrary ends, and a single element
        low, high = np.sort(generator.integers(0, size + 1, 2))
        row[low:high] = row[generator.integers(0, size)] = True
    for grad, own_grads in zip(grads, chosen, strict=True):
        push(rule, record, array, own_grads, grad)
    grads[~chosen] = np.nan
    check(record[:size], torch_result(optimizer, settings, start, grads, parts=True))


@pytest.mark.parametrize(
    ("settings", "start"),
    [
        ({}, 0.0),
        ({"alpha": 0.1, "beta": 0.5, "l1": 0.3, "l2": 0.7}, 0.0),
        ({"alpha": 0.1, "beta": 0.5, "l1": 0.3, "l2": 0.7}, 0.25),
        ({"alpha": 0.5, "l1": 2.0}, -0.75),
    ],
)
@pytest.mark.parametrize("dim", [1, 16])
def test_ftrl_equals_the_paper(settings: dict[str, float], start: float, dim: int) -> None:
    rule = FTRL(**settings)
    grads = gradients(dim, seed=4) + np.float32(0.1)
    store = SparseStore(dim=dim, rule=rule, initializer=Constant(value=start))
    key, found = np.array([9], np.uint64), np.empty((STEPS, dim), np.float32)
    before = np.empty(dim, np.float32)
    store.pull(key, before)
    assert (before == np.float32(start)).all()  # l1 does not set an initial weight to 0
    array = parameters(rule, Constant(value=start))
    record, dense_found = np.empty(3 * dim, np.float32), np.empty_like(found)
    kernels.dense_start(rule.code, record, dim, 0, dim, 0, CONSTANT, np.uint64(0), array)
    assert (record[:dim] == np.float32(start)).all()
    for t, grad in enumerate(grads):
        store.push(key, grad)
        store.pull(key, found[t])
        kernels.dense_push(rule.code, record, dim, 0, dim, grad, 0, array)
        dense_found[t] = record[:dim]
    for j in range(dim):
        expected = ftrl_float64(grads[:, j].astype(np.float64), rule, start)
        np.testing.assert_allclose(found[:, j], expected, rtol=1e-4, atol=1e-5)
    if settings.get("l1") and start == 0:
        assert not found[:2, 0].any()  # the gradients of element 0 are 0.1, so |z| stays below l1
    np.testing.assert_array_equal(dense_found, found)


@pytest.mark.parametrize("start", [0.0, 0.3, -0.3])
def test_ftrl_does_not_move_on_a_zero_gradient(start: float) -> None:
    store = SparseStore(dim=1, rule=FTRL(l1=0.5, l2=0.1), initializer=Constant(value=start))
    key, found = np.array([3], np.uint64), np.empty(1, np.float32)
    for _ in range(3):
        store.push(key, np.zeros(1, np.float32))
        store.pull(key, found)
        assert found[0] == pytest.approx(start, rel=1e-6)
    if start == 0:
        assert found[0] == 0  # exactly 0, so that the model can be stored sparsely


def test_initial_state_of_a_row() -> None:
    key, zero = np.array([7], np.uint64), np.zeros(2, np.float32)
    for rule, expected in (
        (Adagrad(lr=0.0, initial_accumulator=0.25), [0.5, 0.5, 0.25, 0.25]),
        (Momentum(lr=0.0), [0.5, 0.5, 0, 0]),
        (RMSprop(lr=0.0), [0.5, 0.5, 0, 0]),
        (Adam(lr=0.0), [0.5, 0.5, 0, 0, 0, 0, 1]),
        (FTRL(alpha=0.5, beta=1.0, l1=0.25), [0.5, 0.5, -1.25, -1.25, 0, 0]),
    ):
        store = SparseStore(dim=2, rule=rule, initializer=Constant(value=0.5))
        store.push(key, zero)
        ((_, records),) = store.items()
        assert records.tolist() == [expected], rule


def l1_float64(rule: SGD | Adagrad | Adam, gradients: npt.NDArray[np.float64], start: float) -> float:
    """Return the weight after all gradients, by the rule's own step and then soft thresholding, in float64."""
    w, total, first, second, greatest = start, 0.0, 0.0, 0.0, 0.0
    for step, g in enumerate(gradients.tolist(), 1):
        divisor, direction = 1.0, g
        if isinstance(rule, Adagrad):
            total += g * g
            divisor = math.sqrt(total) + rule.eps
        elif isinstance(rule, Adam):
            beta1, beta2 = rule.betas
            first, second = beta1 * first + (1 - beta1) * g, beta2 * second + (1 - beta2) * g * g
            greatest = max(greatest, second)
            divisor = math.sqrt((greatest if rule.amsgrad else second) / (1 - beta2**step)) + rule.eps
            direction = first / (1 - beta1**step)
        w -= rule.lr * direction / divisor
        w = math.copysign(max(abs(w) - rule.lr * rule.l1 / divisor, 0.0), w)
    return w


L1_RULES = [
    SGD(lr=0.05, l1=0.3),
    Adagrad(lr=0.1, l1=0.3),
    Adam(lr=0.01, l1=0.3),
    Adam(lr=0.01, l1=0.3, amsgrad=True),
    AdamW(lr=0.01, l1=0.3, weight_decay=0.0),
]


@pytest.mark.parametrize("rule", L1_RULES, ids=repr)
@pytest.mark.parametrize("dim", [1, 16])
def test_l1_is_a_proximal_step(rule: SGD | Adagrad | Adam, dim: int) -> None:
    grads = gradients(dim, seed=6) + np.linspace(-0.6, 0.6, dim, dtype=np.float32)
    store, key = SparseStore(dim=dim, rule=rule, initializer=Constant(value=0.25)), np.array([3], np.uint64)
    for grad in grads:
        store.push(key, grad)
    found = np.empty(dim, np.float32)
    store.pull(key, found)
    expected = np.array([l1_float64(rule, column.astype(np.float64), 0.25) for column in grads.T])
    np.testing.assert_allclose(found, expected, atol=2e-5)
    assert dim == 1 or 0 < np.count_nonzero(found) < dim


@pytest.mark.parametrize("rule", [SGD(lr=0.2, l1=0.5), Adagrad(lr=0.3, l1=0.5), Adam(lr=0.02, l1=0.5)], ids=repr)
def test_l1_has_the_optimum_of_the_lasso(rule: UpdateRule) -> None:
    """The optimum of (w - a)² / 2 + l1 · |w| is a moved towards 0 by l1. It is exactly 0 if |a| is at most l1."""
    targets = np.array([-2.0, -0.6, -0.4, 0.0, 0.3, 0.45, 1.5], np.float32)
    record, array = dense_record(rule, np.ones(len(targets), np.float32))
    for _ in range(1500):
        kernels.dense_push(rule.code, record, len(targets), 0, len(targets), record[: len(targets)] - targets, 0, array)
    expected = np.sign(targets) * np.maximum(np.abs(targets) - 0.5, 0)
    np.testing.assert_allclose(record[: len(targets)], expected, atol=1e-3)
    assert (record[2:6] == 0).all()
