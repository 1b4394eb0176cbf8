"""The metrics equal their definitions and scikit-learn, and handle extreme values."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.models.metrics import (
    auc,
    base_log_loss,
    evaluate,
    find_useless,
    log_loss,
)

Array = npt.NDArray[Any]

LABELLED = st.lists(st.tuples(st.integers(0, 1), st.sampled_from([-1.5, 0.0, 0.25, 0.3, math.inf])), max_size=40)


def brute_force_auc(labels: list[int], scores: list[float]) -> float:
    positive = [s for s, y in zip(scores, labels, strict=True) if y]
    negative = [s for s, y in zip(scores, labels, strict=True) if not y]
    if not positive or not negative:
        return math.nan
    right = sum(Fraction(1) if p > n else Fraction(p == n, 2) for p in positive for n in negative)
    return float(right / (len(positive) * len(negative)))


def random_predictions(n: int, dtype: type = np.float64) -> tuple[Array, Array]:
    random = np.random.default_rng(1)
    labels = (random.random(n) < 0.25).astype(np.float32)
    scores = np.round(0.2 + 0.1 * labels + 0.5 * random.random(n), 3)  # with ties
    return labels, scores.astype(dtype)


@given(LABELLED)
def test_auc_is_the_share_of_correctly_ordered_pairs(pairs: list[tuple[int, float]]) -> None:
    labels, scores = [y for y, _ in pairs], [s for _, s in pairs]
    for dtype in (np.float32, np.float64):
        given_scores = np.array(scores, dtype)
        expected = brute_force_auc(labels, given_scores.tolist())
        assert auc(np.array(labels, np.float32), given_scores) == pytest.approx(expected, abs=0, nan_ok=True)


def test_auc_does_not_round_close_scores() -> None:
    scores = np.array([0.5, np.nextafter(0.5, 1)])
    assert auc([0, 1], scores) == 1.0
    assert auc([1, 0], scores) == 0.0
    assert auc([0, 1], scores.astype(np.float32)) == 0.5


def test_auc_does_not_change_the_arguments() -> None:
    labels, scores = np.array([1, 0, 1]), np.array([0.9, 0.4, 0.1])
    auc(labels, scores)
    assert labels.tolist() == [1, 0, 1]
    assert scores.tolist() == [0.9, 0.4, 0.1]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_agrees_with_scikit_learn(dtype: type) -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    labels, probabilities = random_predictions(200_000, dtype)
    result = evaluate(labels, probabilities)
    assert result.auc == pytest.approx(metrics.roc_auc_score(labels, probabilities), rel=1e-12)
    double = probabilities.astype(np.float64)
    assert result.log_loss == pytest.approx(metrics.log_loss(labels, double), rel=1e-12)
    assert result.accuracy == pytest.approx(metrics.accuracy_score(labels, probabilities >= 0.5), rel=1e-12)
    assert result.calibration == pytest.approx(double.mean() / labels.mean(dtype=np.float64), rel=1e-12)
    assert result.examples == 200_000


def test_evaluate_has_the_single_metrics() -> None:
    labels, p = random_predictions(100)
    found = evaluate(labels, p)
    assert (found.auc, found.log_loss) == (auc(labels, p), log_loss(labels, p))
    assert set(found.as_json()) == {"auc", "log_loss", "calibration", "accuracy"}
    assert (found.examples, found.positives) == (100, int(labels.sum()))


def test_metrics_undefined_for_the_labels_are_reported_in_words() -> None:
    assert (
        evaluate([0, 0], [0.5, 0.5]).sentence() == "no AUC (all labels are negative), log loss 0.6931, accuracy 0.0000"
    )
    text = "no AUC (all labels are positive), log loss 0.6931, calibration 0.500, accuracy 1.0000"
    assert evaluate([1, 1], [0.5, 0.5]).sentence() == text
    assert evaluate([1, 0], [0.5, 0.25]).sentence().startswith("AUC 1.0000, log loss ")


def test_a_model_no_better_than_the_share_of_positives_is_reported() -> None:
    assert base_log_loss((3, 1)) == pytest.approx(log_loss([1, 0, 0, 0], [0.25] * 4))
    assert base_log_loss((4, 0)) == base_log_loss((0, 4)) == 0
    assert find_useless(0.56, (3, 1)) is None
    assert find_useless(0.7, (4, 0)) is None  # with one class, no model can be better
    warning = find_useless(0.57, (3, 1))
    assert warning is not None
    assert all(number in warning for number in ("0.5700", "0.5623", "0.75, 0.25"))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_log_loss_of_certain_predictions_is_clipped(dtype: type) -> None:
    sure: Array = np.array([0, 1], dtype)
    assert log_loss([0, 1], sure) == pytest.approx(1e-15, rel=0.2)
    assert log_loss([1, 0], sure) == pytest.approx(-math.log(1e-15), rel=1e-3)


def test_the_log_loss_of_predictions_of_one_half_is_one_bit() -> None:
    assert log_loss([True, False, False], [0.5, 0.5, 0.5]) == pytest.approx(math.log(2))


def test_calibration_is_predicted_clicks_divided_by_actual_clicks() -> None:
    assert evaluate([1, 0, 0, 0], [0.5, 0.5, 0.5, 0.5]).calibration == 2.0
    assert math.isnan(evaluate([0, 0], [0.5, 0.5]).calibration)


def test_accuracy_counts_one_half_as_a_click() -> None:
    assert evaluate([1, 0, 1, 0], [0.5, 0.4, 0.3, 0.9]).accuracy == 0.5


def test_metrics_of_no_examples_are_undefined() -> None:
    result = evaluate(np.empty(0), np.empty(0))
    assert result.examples == 0
    assert all(math.isnan(x) for x in (result.auc, result.log_loss, result.calibration, result.accuracy))


@pytest.mark.parametrize(
    ("labels", "predictions", "complaint"),
    [
        ([0, 1], [0.5], r"shape \(2,\) and predictions \(1,\)"),
        ([[0, 1]], [[0.5, 0.5]], "one dimension"),
        ([-1, 1], [0.5, 0.5], "neither 0 nor 1"),
        ([0, math.nan], [0.5, 0.5], "neither 0 nor 1"),
        ([0, 1], [0.5, math.nan], "NaN"),
        ([0, 1], ["a", "b"], "real numbers"),
    ],
)
def test_unusable_predictions_are_rejected(labels: Any, predictions: Any, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        auc(labels, predictions)
    with pytest.raises(UsageError, match=complaint):
        evaluate(labels, predictions)


def test_raw_scores_are_no_probabilities() -> None:
    assert auc([0, 1], [-3.0, 2.0]) == 1.0
    for metric in (log_loss, evaluate):
        with pytest.raises(UsageError, match=r"from -3\.0 to 2\.0"):
            metric([0, 1], [-3.0, 2.0])
