"""The offset follows a drifting rate once; tuning does not change settings that the user gave."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.launch.train.options import TrainOptions
from paceline.launch.train.planning import given_settings
from paceline.models.base import Optimism
from paceline.models.clicks import ClickProbabilityModel
from paceline.models.registry import MODELS
from paceline.models.update import make_update, suited_ftrl


def _mean_prediction(rate_of_newest: float, *, is_gradual: bool = False) -> float:
    """Return the mean prediction for the newest eighth, whose rate changed from 5%, after the correction."""
    n = 16_000
    rates = np.full(n, 0.05)
    rates[-n // 8 :] = np.linspace(0.05, rate_of_newest, n // 8) if is_gradual else rate_of_newest
    labels = (np.random.default_rng(0).random(n) < rates).astype(np.float32)
    predictions = np.full(n, 0.06, np.float32)
    model = MODELS["lr"]()
    trial = Optimism(1.5, 0.05)  # on the newest rows, as the trial of a drifting file shows it
    assert isinstance(model, ClickProbabilityModel)
    offset = model.calibrated(labels, predictions, None, trial).offset
    return float(1 / (1 + np.exp(-(np.log(0.06 / 0.94) + offset))))


@pytest.mark.parametrize("rate", [0.12, 0.2, 0.35])
def test_drift_is_corrected_once(rate: float) -> None:
    assert _mean_prediction(rate) == pytest.approx(rate, rel=0.1)


def test_a_rate_that_still_changes_is_not_followed() -> None:
    mean = 0.05 * 7 / 8 + (0.05 + 0.5) / 2 / 8
    assert _mean_prediction(0.5, is_gradual=True) == pytest.approx(mean, rel=0.1)


def testgiven_settings_are_known() -> None:
    model = MODELS["regression"]()
    assert given_settings(TrainOptions(model=model, data=["x"], update=suited_ftrl)) == []
    given = TrainOptions(model=model, data=["x"], update=lambda lr, l1, l2: make_update(lr=lr, l1=2.0, l2=l2))
    assert given_settings(given) == ["l1"]
    given = TrainOptions(model=model, data=["x"], update=make_update(lr=0.1, l1=2.0))
    assert given_settings(given) == ["alpha", "l1"]
