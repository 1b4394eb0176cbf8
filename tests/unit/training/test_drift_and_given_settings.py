"""The offset is corrected once for a drifting rate. Tuning does not change settings that the user gave."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from paceline.models.base import Optimism
from paceline.models.clicks import ClickProbabilityModel
from paceline.models.logistic import SparseLogisticRegression
from paceline.models.rate_drift import changed_rates
from paceline.models.registry import MODELS
from paceline.models.update import make_update, suited_ftrl
from paceline.sklearn import LogisticRegression
from paceline.tables.types import Doubles, Floats
from paceline.training.options import TrainOptions
from paceline.training.planning import given_settings


def _mean_prediction(rate_of_newest: float, *, is_gradual: bool = False) -> float:
    """Return the corrected mean prediction for the newest eighth of the data, whose rate has changed from 5%."""
    n = 16_000
    rates = np.full(n, 0.05)
    rates[-n // 8 :] = np.linspace(0.05, rate_of_newest, n // 8) if is_gradual else rate_of_newest
    labels = (np.random.default_rng(0).random(n) < rates).astype(np.float32)
    predictions = np.full(n, 0.06, np.float32)
    model = MODELS["lr"]()
    trial = Optimism(1.5, 0.05)  # measured on the newest rows, like in a trial of drifting data
    assert isinstance(model, ClickProbabilityModel)
    offset = model.calibrated(labels, predictions, None, trial).offset
    return float(1 / (1 + np.exp(-(np.log(0.06 / 0.94) + offset))))


@pytest.mark.parametrize("rate", [0.12, 0.2, 0.35])
def test_drift_is_corrected_once(rate: float) -> None:
    assert _mean_prediction(rate) == pytest.approx(rate, rel=0.1)


def test_the_end_of_a_changing_rate_is_not_extrapolated() -> None:
    mean = 0.05 * 7 / 8 + (0.05 + 0.5) / 2 / 8
    assert _mean_prediction(0.5, is_gradual=True) == pytest.approx(mean, rel=0.1)


def _labels_of(rates: Doubles, seed: int) -> Floats:
    return (np.random.default_rng(seed).random(len(rates)) < rates).astype(np.float32)


@pytest.mark.parametrize("rate", [0.08, 0.12])
def test_a_small_step_in_few_rows_is_corrected(rate: float) -> None:
    """The mean over 20 samples of 6,500 rows is right. The newest eighth of a sample has about 65 positives."""
    rates = np.where(np.arange(6500) < 6500 * 7 / 8, 0.05, rate)
    offset = math.log(0.06 / 0.94)
    found = []
    for seed in range(20):
        model = SparseLogisticRegression(offset=offset).calibrated(
            _labels_of(rates, seed), np.full(6500, 0.06, np.float32)
        )
        found.append(1 / (1 + math.exp(-model.offset)))
    assert np.mean(found) == pytest.approx(rate, rel=0.1)


def test_a_constant_rate_is_not_a_drift() -> None:
    drifts = [changed_rates(_labels_of(np.full(5000, 0.05), seed), None) for seed in range(40)]
    assert sum(drift is not None for drift in drifts) <= 2
    step = _labels_of(np.repeat([0.05, 0.1], 4000), 0)
    assert changed_rates(step, None) == pytest.approx((0.05, 0.1), rel=0.25)


@pytest.mark.parametrize("given", [{}, {"epochs": 2, "lr": 0.1}])
@pytest.mark.parametrize("is_ordered", [True, False])
def test_the_mean_prediction_is_right_if_the_rate_rises(given: dict[str, Any], is_ordered: bool) -> None:
    rates = 1 / (1 + np.exp(4.5 - 5 * (np.arange(8000) / 8000) ** 3))
    labels, noise = _labels_of(rates, 1), np.random.default_rng(2).normal(0, 1, (8000, 3))
    order = np.arange(8000) if is_ordered else np.random.default_rng(4).permutation(8000)
    fitted = LogisticRegression(shuffle=False, **given).fit(noise[order], labels[order])
    assert fitted.predict_proba(noise)[:, 1].mean() == pytest.approx(labels.mean(), rel=0.08)


def test_a_ramp_that_the_model_predicts_is_not_taken_for_a_step() -> None:
    """The margins of the model are too high by 1 for the newest quarter, and by 3 for the other rows."""
    time = np.arange(8000) / 8000
    margins = -4.5 + 5 * time**3
    labels = _labels_of(1 / (1 + np.exp(-margins)), 1)
    learned = margins + np.where(time < 0.75, 3.0, 1.0)
    predictions = (1 / (1 + np.exp(-learned))).astype(np.float32)
    found = SparseLogisticRegression().calibrated(labels, predictions, is_complete=True)
    assert (1 / (1 + np.exp(-learned - found.offset))).mean() == pytest.approx(labels.mean(), rel=0.05)


def test_given_settings_are_distinguished_from_suggestions() -> None:
    model = MODELS["regression"]()
    assert given_settings(TrainOptions(model=model, data=["x"], update=suited_ftrl)) == []
    given = TrainOptions(model=model, data=["x"], update=lambda lr, l1, l2: make_update(lr=lr, l1=2.0, l2=l2))
    assert given_settings(given) == ["l1"]
    given = TrainOptions(model=model, data=["x"], update=make_update(lr=0.1, l1=2.0))
    assert given_settings(given) == ["alpha", "l1"]
