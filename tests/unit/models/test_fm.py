"""The factorization machine: data that no linear model can learn, and features with factors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.unit.models.training import train

from paceline.data import Batch
from paceline.errors import UsageError
from paceline.models.base import KeyScratch
from paceline.models.features.counting import MOST_COUNTED
from paceline.models.ffm import FieldAwareMachine
from paceline.models.fm import FactorModel, SparseFactorizationMachine
from paceline.models.logistic import SparseLogisticRegression
from paceline.models.metrics import auc
from paceline.ps import FTRL

N, NUM_VALUES = 8000, 6


def make_pairs(seed: int) -> Batch:
    """Return examples of two categories. The label depends only on the pair: each single category has 50% clicks."""
    rng = np.random.default_rng(seed)
    categories = rng.integers(0, NUM_VALUES, (N, 2))
    is_likely = (categories[:, 0] + categories[:, 1]) % 2 == 0
    labels = rng.random(N) < np.where(is_likely, 0.8, 0.2)
    categories[:, 1] += NUM_VALUES
    indptr = np.arange(0, 2 * N + 1, 2, dtype=np.int64)
    return Batch(labels.astype(np.float32), indptr, categories.reshape(-1).astype(np.uint64))


def test_nonlinear_interactions() -> None:
    batch, labels = make_pairs(0), make_pairs(1).labels
    rule = FTRL(alpha=0.1, l1=0.0)
    linear, _ = train(SparseLogisticRegression(), batch, rule, epochs=6, unseen=make_pairs(1))
    assert abs(auc(labels, linear) - 0.5) < 0.03
    machine, _ = train(
        SparseFactorizationMachine(dim=4, factor_lr=0.1, factor_l2=0.0, factor_std=0.1, factor_min_count=0),
        batch,
        rule,
        epochs=6,
        unseen=make_pairs(1),
    )
    assert auc(labels, machine) > 0.77  # the true probabilities reach 0.8


def test_features_without_a_weight_have_no_factors() -> None:
    """A feature with weight 0 has no row of factors and no effect on predictions."""
    model = SparseFactorizationMachine(dim=4, factor_min_count=0)
    _, stores = train(model, make_pairs(0), FTRL(l1=1e6), epochs=6)
    assert [len(store) for store in stores] == [2 * NUM_VALUES + 1, 0, 0]
    minibatch = model.prepare(make_pairs(0), KeyScratch())
    rng = np.random.default_rng(0)
    weights, factors = (rng.normal(size=(len(minibatch.keys[0]), 1)), rng.normal(size=(len(minibatch.keys[1]), 4)))
    weights[:3] = 0
    wide = [array.astype(np.float32) for array in (weights, factors, np.ones((len(factors), 1)))]
    predicted = minibatch.predict(wide).copy()
    gradients, _ = minibatch.gradients(wide)
    assert set(minibatch.gradient_keys[1]) == set(minibatch.keys[1][3:])
    assert gradients[1].shape == (2 * NUM_VALUES - 3, 4)
    wide[1][:3] = 100
    assert np.array_equal(minibatch.predict(wide), predicted)


@pytest.mark.parametrize("model", [SparseFactorizationMachine, FieldAwareMachine])
def test_without_factors_the_model_equals_a_logistic_regression(model: type[FactorModel]) -> None:
    """Workers then do not pull factors and counts."""
    batch, rule = make_pairs(0).slice(0, 640), FTRL(l1=0.1)
    expected, _ = train(SparseLogisticRegression(), batch, rule, epochs=2)
    without = model(factor_min_count=MOST_COUNTED)
    predicted, stores = train(without, batch, rule, epochs=2)
    assert np.array_equal(predicted, expected)
    assert [len(store) for store in stores] == [2 * NUM_VALUES + 1, 0, 0]
    assert [len(keys) for keys in without.prepare(batch, KeyScratch()).keys] == [2 * NUM_VALUES + 1, 0, 0]


def test_features_get_factors_after_a_number_of_occurrences() -> None:
    """The occurrences of a feature are counted up to this number."""
    batch = make_pairs(0).slice(0, 640)
    model = SparseFactorizationMachine(dim=4, factor_min_count=80)
    keys, counts = np.unique(batch.keys, return_counts=True)
    assert counts.min() > 80
    _, stores = train(model, batch, FTRL(alpha=0.1), epochs=1)
    counted = np.empty((len(keys), 1), np.float32)
    stores[2].pull(keys, counted)
    assert ((counted >= 80) & (counted < 80 + 64)).all()
    assert 0 < len(stores[1]) <= len(keys)
    _, stores = train(SparseFactorizationMachine(dim=4, factor_min_count=800), batch, FTRL(alpha=0.1), epochs=1)
    stores[2].pull(keys, counted)
    assert np.array_equal(counted[:, 0], counts)
    assert len(stores[1]) == 0


def test_an_l1_penalty_makes_factors_zero() -> None:
    """A small penalty sets some factors to 0 without a loss of quality. A large penalty sets all factors to 0."""
    batch, labels = make_pairs(0), make_pairs(1).labels
    shares = []
    for factor_l1 in (0.0, 0.1, 1.0):
        model = SparseFactorizationMachine(
            dim=4, factor_lr=0.1, factor_l1=factor_l1, factor_l2=0.0, factor_std=0.1, factor_min_count=0
        )
        machine, (_, factors, _) = train(model, batch, FTRL(alpha=0.1), epochs=6, unseen=make_pairs(1))
        values = np.concatenate([records[:, :4] for _, records in factors.items()])
        shares.append(float(np.mean(values == 0)))
        assert (auc(labels, machine) > 0.77) == (factor_l1 < 1)
    assert shares[0] == 0 < shares[1] < shares[2] == 1


def test_settings() -> None:
    refused: tuple[dict[str, Any], ...] = (
        {"dim": 0},
        {"dim": 5000},
        {"factor_lr": -1.0},
        {"factor_min_count": -1},
        {"factor_l1": -1.0},
        {"factor_l1": float("inf")},
        {"factor_l2": -1.0},
        {"factor_std": float("nan")},
    )
    for settings in refused:
        with pytest.raises(UsageError):
            SparseFactorizationMachine(**settings)
