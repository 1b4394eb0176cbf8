"""Trials of models other than logistic regression: chosen settings, given settings, and factors without benefit."""

from __future__ import annotations

import numpy as np
import pytest
from tests.unit.models.test_fm import make_pairs

from paceline.data import Batch
from paceline.data.example_sampling import sample_batch
from paceline.data.sampling import ExampleSample
from paceline.models.features.counting import MOST_COUNTED
from paceline.models.fm import SparseFactorizationMachine
from paceline.models.poisson import PoissonRegression
from paceline.models.regression import LeastSquares
from paceline.models.softmax import SoftmaxRegression
from paceline.ps import FTRL, SGD
from paceline.training.tuning.model_trial import ModelTrial
from paceline.training.tuning.search import FactorSearch, TunedModel, tune_linear

RULE = FTRL(alpha=0.2, l1=1.0)
LINEAR = TunedModel(model=SparseFactorizationMachine().with_defaults(), rule=RULE, passes=3)


def search(model: SparseFactorizationMachine, sample: ExampleSample, passes: int | None = None) -> TunedModel:
    found = FactorSearch(model, sample, 32, is_mixed=False, passes=passes)
    return found.run(LINEAR, FTRL(alpha=0.2, l1=0.0))


def make_linear(n: int, seed: int = 0) -> ExampleSample:
    rng = np.random.default_rng(seed)
    keys = rng.integers(0, 40, (n, 4))
    margins = rng.normal(0, 1, 40)[keys].sum(1)
    labels = (rng.random(n) < 1 / (1 + np.exp(-margins))).astype(np.float32)
    return sample_batch(Batch(labels, np.arange(0, 4 * n + 1, 4), keys.reshape(-1).astype(np.uint64)))


def test_settings_of_factors_are_chosen_if_pairs_have_an_effect() -> None:
    sample = sample_batch(make_pairs(0).slice(0, 400))
    found = search(SparseFactorizationMachine(dim=4), sample)
    assert found.note is None
    assert found.model.factor_min_count < 300  # type: ignore[attr-defined]
    assert None not in [getattr(found.model, name) for name in found.model.usual]
    trial = ModelTrial(found.model, sample, 32, is_mixed=False)
    usual = trial.run(SparseFactorizationMachine(dim=4).with_defaults(), RULE)
    assert trial.run(found.model, found.rule).losses.mean < usual.losses.mean - 0.01
    assert found.optimism is not None


def test_given_settings_are_not_changed() -> None:
    sample = sample_batch(make_pairs(0).slice(0, 300))
    found = search(SparseFactorizationMachine(dim=4, factor_l2=0.02, factor_min_count=2), sample, passes=5)
    assert (found.model.factor_l2, found.model.factor_min_count) == (0.02, 2)  # type: ignore[attr-defined]
    assert found.passes == 5


@pytest.mark.thorough
def test_no_factors_without_a_benefit() -> None:
    """Without factors, the model has the rule and passes of logistic regression. The losses of both are reported."""
    found = search(SparseFactorizationMachine(), make_linear(400, seed=1))
    assert found.model.factor_min_count == MOST_COUNTED  # type: ignore[attr-defined]
    assert (found.rule, found.passes) == (RULE, 3)
    assert "factors do not help here: log loss on held-out examples is 0." in str(found.note)
    given = search(SparseFactorizationMachine(factor_min_count=1), make_linear(150, seed=1))
    assert (given.model.factor_min_count, given.note) == (1, None)  # type: ignore[attr-defined]


def test_a_trial_on_a_part_of_the_data_keeps_the_usual_settings() -> None:
    whole = make_linear(1000)
    part = ExampleSample(whole.batch, whole.starts, 10**6, False)
    found = search(SparseFactorizationMachine(), part)
    assert found.model == SparseFactorizationMachine().with_defaults()
    assert found.passes == LINEAR.passes


def test_the_best_pass_counts_in_a_trial_on_a_part_of_the_data() -> None:
    """With all data, the loss after the given number of passes counts, although the model then overfits."""
    whole = make_linear(300)
    model = SparseFactorizationMachine(dim=8, factor_lr=1.0, factor_l2=0.0, factor_min_count=0).with_defaults()
    losses = {}
    for is_whole in (True, False):
        for passes in (1, 8):
            sample = ExampleSample(whole.batch, whole.starts, whole.batch.num_examples, is_whole)
            trial = ModelTrial(model, sample, 32, is_mixed=False, passes=passes)
            losses[is_whole, passes] = trial.run(model, FTRL(alpha=1.0, l1=0.0)).losses.mean
    assert losses[True, 8] > losses[True, 1] == losses[False, 1]
    assert losses[False, 8] <= losses[False, 1]


@pytest.mark.parametrize(
    "kind", [LeastSquares, pytest.param(PoissonRegression, marks=pytest.mark.thorough), SoftmaxRegression]
)
def test_rule_and_passes_of_linear_models(kind: type[LeastSquares | PoissonRegression | SoftmaxRegression]) -> None:
    """A rate that is a hundred times too small is rejected.

    A rule other than FTRL is unchanged, and its passes are chosen.
    """
    rng = np.random.default_rng(3)
    keys = rng.integers(0, 30, (150, 3))
    margins = rng.normal(0, 0.5, 30)[keys].sum(1)
    labels = np.round(np.exp(margins)).clip(0, 5).astype(np.float32)
    batch = Batch(labels, np.arange(0, 451, 3), keys.reshape(-1).astype(np.uint64))
    model, sample = kind().starting_from(labels), sample_batch(batch)
    rules = [FTRL(alpha=0.002, l1=1.0), RULE]
    found = tune_linear(model, sample, 16, rules, is_mixed=False, passes=None)
    assert isinstance(found.rule, FTRL)
    assert found.rule.alpha > 0.01
    trial = ModelTrial(model, sample, 16, is_mixed=False)
    constant = trial.run(model, SGD(lr=0.0)).losses
    assert trial.run(model, found.rule).losses.is_below(constant, 3.0)
    other = tune_linear(model, sample, 16, [SGD(lr=0.01)], is_mixed=False, passes=None)
    assert other.rule == SGD(lr=0.01)
    assert 1 <= other.passes <= 64


def test_the_trial_of_a_slow_model_uses_a_part_of_the_sample() -> None:
    """The part has runs of rows from all parts of the sample, also the newest rows."""
    batch = make_pairs(0)
    sample = sample_batch(Batch.concatenate([batch, batch, batch]))
    trial = ModelTrial(SparseFactorizationMachine(dim=512), sample, 8, is_mixed=False)
    assert 8_000 <= trial.num_examples < 24_000
    assert not trial.is_complete
    assert trial.batch.keys[-2:].tolist() == sample.batch.keys[-2:].tolist()
