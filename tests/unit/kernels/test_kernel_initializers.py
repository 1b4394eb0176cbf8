"""Initial values: a function of key, element and seed, with the requested distribution."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from tests.reference import kernels as reference
from tests.reference.kernel_cases import random_keys
from tests.reference.rule_cases import parameters

from paceline.kernels.initializers import CONSTANT, NORMAL, UNIFORM, ZEROS
from paceline.tables.initializers import Constant, Initializer, Normal, Uniform, Zeros
from paceline.tables.rules import SGD, Adagrad, kernels
from paceline.tables.sparse_store import SparseStore

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")  # without the JIT

Floats = npt.NDArray[np.float32]
KINDS: list[Initializer] = [Zeros(), Constant(value=-1.5), Uniform(low=-0.5, high=1.5), Normal(mean=2, std=3)]
KEYS = random_keys(np.random.default_rng(0), 3000)
KEYS[:3] = 0, 2**64 - 1, 1


def pulled(store: SparseStore, keys: npt.NDArray[np.uint64] = KEYS) -> Floats:
    out = np.empty((len(keys), store.dim), np.float32)
    store.pull(keys, out)
    return out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [1, 16])
def test_initial_values_do_not_depend_on_insertion_or_order(kind: Initializer, dim: int) -> None:
    rule = Adagrad(lr=0.0)
    missing = pulled(SparseStore(dim=dim, rule=rule, initializer=kind, seed=3))
    for order in (slice(None), slice(None, None, -1)):
        store = SparseStore(dim=dim, rule=rule, initializer=kind, seed=3)
        store.push(np.ascontiguousarray(KEYS[order]), np.ones(dim * len(KEYS), np.float32))
        np.testing.assert_array_equal(pulled(store), missing)
    expected = reference.initial_values(kind.code, 3, KEYS, dim, *kind.arguments)
    np.testing.assert_allclose(missing, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", [ZEROS, CONSTANT, UNIFORM, NORMAL])
def test_dense_values_do_not_depend_on_the_bounds_of_a_range(kind: int) -> None:
    array = parameters(SGD(lr=0.1), Uniform(low=-0.5, high=0.75))  # two parameters for all kinds
    whole, part = np.empty(100, np.float32), np.empty(60, np.float32)
    kernels.dense_start(SGD.code, whole, 100, 0, 100, 0, kind, np.uint64(2**63 + 5), array)
    kernels.dense_start(SGD.code, part, 60, 10, 60, 50, kind, np.uint64(2**63 + 5), array)
    np.testing.assert_array_equal(part[10:], whole[50:])


@pytest.mark.parametrize("seed", [0, -1, 2**63, 2**64 - 1])
def test_any_seed_is_accepted(seed: int) -> None:
    kind = Uniform(low=0.0, high=1.0)
    found = pulled(SparseStore(dim=2, initializer=kind, seed=seed))
    expected = reference.initial_values(kind.code, seed % 2**64, KEYS, 2, 0.0, 1.0)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)


def test_seeds_keys_and_elements_differ() -> None:
    kind = Uniform(low=0.0, high=1.0)
    one, other = (pulled(SparseStore(dim=4, initializer=kind, seed=seed)) for seed in (1, 2))
    columns = np.concatenate([one, other], axis=1)
    correlation = np.corrcoef(columns.T) - np.eye(8)
    assert abs(correlation).max() < 5 / np.sqrt(len(KEYS))
    assert len(np.unique(columns)) > 0.99 * columns.size


def test_moments() -> None:
    rows = pulled(SparseStore(dim=16, rule=SGD(lr=0.1), initializer=Uniform(low=-0.5, high=1.5)))
    error = 5 / np.sqrt(rows.size)
    assert rows.min() >= -0.5
    assert rows.max() <= 1.5
    assert rows.mean() == pytest.approx(0.5, abs=error)
    assert rows.var() == pytest.approx(4 / 12, abs=error)
    quarters = np.histogram(rows, 4, (-0.5, 1.5))[0] / rows.size
    np.testing.assert_allclose(quarters, 0.25, atol=error)

    normal = (pulled(SparseStore(dim=16, initializer=Normal(mean=2, std=3))).astype(np.float64) - 2) / 3
    for power, moment in ((1, 0), (2, 1), (3, 0), (4, 3)):
        assert (normal**power).mean() == pytest.approx(moment, abs=5 * error * power)
    assert np.isfinite(normal).all()
