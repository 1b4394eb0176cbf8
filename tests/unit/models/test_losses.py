"""Models of numbers, counts and classes find the known solution and reject invalid labels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
from tests.unit.models.training import Array, train

from paceline.data import Batch
from paceline.errors import DataError, UsageError
from paceline.models.base import KeyScratch, SparseModel
from paceline.models.poisson import PoissonRegression
from paceline.models.regression import LeastSquares
from paceline.models.softmax import SoftmaxRegression, parse_classes
from paceline.ps import FTRL

N, WIDTH = 6000, 8


def make_examples(seed: int = 0) -> Array:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(N, WIDTH)) * (rng.random((N, WIDTH)) < 0.6)


def as_batch(examples: Array, labels: Array) -> Batch:
    row, column = np.nonzero(examples)
    indptr = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=len(examples)))]).astype(np.int64)
    values = examples[row, column].astype(np.float32)
    return Batch(labels.astype(np.float32), indptr, column.astype(np.uint64), values)


def trained_predictions(model: SparseModel, batch: Batch) -> Array:
    return train(model, batch, FTRL(alpha=0.1), epochs=30)[0]


def test_regression_is_least_squares() -> None:
    examples, rng = make_examples(), np.random.default_rng(1)
    labels = 500 + 40 * (examples @ rng.normal(size=WIDTH)) + 30 * rng.normal(size=N)
    batch = as_batch(examples, labels)
    model = LeastSquares().starting_from(batch.labels)
    predicted = trained_predictions(model, batch)
    with_bias = np.c_[examples, np.ones(N)]
    expected = with_bias @ np.linalg.solve(with_bias.T @ with_bias, with_bias.T @ labels)
    assert np.sqrt(np.mean((predicted - expected) ** 2)) < 0.02 * expected.std()
    found = model.evaluate(batch.labels, predicted)
    assert found.rmse == pytest.approx(np.sqrt(np.mean((predicted - labels) ** 2)), rel=1e-4)
    assert found.mae == pytest.approx(np.abs(predicted - labels).mean(), rel=1e-4)
    assert found.r2 == pytest.approx(1 - np.var(labels - expected) / np.var(labels), abs=2e-3)


def test_a_weight_equals_repetitions_of_the_example() -> None:
    """An example of weight 2 changes a model as much as two equal examples."""
    examples = make_examples()[:64]
    labels = np.arange(64) % 3
    weights = (np.arange(64) % 4).astype(np.float32)
    repeated = np.repeat(np.arange(64), weights.astype(int))
    batch = as_batch(examples, labels)
    batch.weights = weights
    for model in (LeastSquares(), PoissonRegression(), SoftmaxRegression(classes=(0, 1, 2))):
        one = model.prepare(batch, KeyScratch())
        other = model.prepare(as_batch(examples[repeated], labels[repeated]), KeyScratch())
        rows = np.random.default_rng(3).normal(size=(WIDTH + 1, model.num_outputs)).astype(np.float32)
        gradients, loss = one.gradients([rows[np.minimum(one.keys[0], WIDTH).astype(int)]])
        gradients_of_many, loss_of_many = other.gradients([rows[np.minimum(other.keys[0], WIDTH).astype(int)]])
        assert loss == pytest.approx(loss_of_many, rel=1e-5)
        order, other_order = np.argsort(one.keys[0]), np.argsort(other.keys[0])
        np.testing.assert_allclose(gradients[0][order], gradients_of_many[0][other_order], rtol=1e-3, atol=1e-3)


def test_poisson_finds_the_rates() -> None:
    examples, rng = make_examples(), np.random.default_rng(1)
    rates = np.exp(3 + 0.3 * (examples @ rng.normal(size=WIDTH)))
    batch = as_batch(examples, rng.poisson(rates))
    model = PoissonRegression().starting_from(batch.labels)
    predicted = trained_predictions(model, batch)
    assert np.abs(np.log(predicted / rates)).mean() < 0.03
    found = model.evaluate(batch.labels, predicted)
    assert found.calibration == pytest.approx(1, abs=0.02)
    assert found.deviance == pytest.approx(1, abs=0.1)  # the true model has a mean deviance of about 1
    assert 0.8 < found.d2 < 1


def test_softmax_finds_the_probabilities() -> None:
    examples, rng = make_examples(), np.random.default_rng(1)
    logits = examples @ rng.normal(size=(WIDTH, 4))
    places = (logits + rng.gumbel(size=logits.shape)).argmax(axis=1)
    classes = np.array([-3, 0, 7, 1000])
    batch = as_batch(examples, classes[places])
    model = SoftmaxRegression().starting_from(batch.labels)
    assert model.classes == (-3, 0, 7, 1000)
    predicted = trained_predictions(model, batch)
    truth = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    assert np.abs(predicted - truth).mean() < 0.02
    np.testing.assert_allclose(predicted.sum(axis=1), 1, rtol=1e-5)
    found = model.evaluate(batch.labels, predicted)
    assert found.accuracy == (predicted.argmax(axis=1) == places).mean()
    assert found.log_loss == pytest.approx(-np.log(predicted[np.arange(N), places]).mean(), rel=1e-4)


def gradients_of(model: SparseModel, labels: list[float]) -> Callable[[], object]:
    minibatch = model.prepare(as_batch(np.ones((len(labels), 1)), np.array(labels)), KeyScratch())
    return lambda: minibatch.gradients([np.zeros((2, model.num_outputs), np.float32)])


def test_invalid_labels_are_rejected() -> None:
    with pytest.raises(DataError, match=r"label -1: a Poisson regression"):
        gradients_of(PoissonRegression(), [2, -1])()
    with pytest.raises(DataError, match=r"label 5, .* classes are 0, 1, 2\..*--classes"):
        gradients_of(SoftmaxRegression(classes=(0, 1, 2)), [1, 5])()
    with pytest.raises(DataError, match=r"label 0\.5: --model softmax needs whole numbers.*--model regression"):
        SoftmaxRegression().starting_from(np.array([0.5, 1], np.float32))
    with pytest.raises(DataError, match="5,000 different labels"):
        SoftmaxRegression().starting_from(np.arange(5000, dtype=np.float32))
    with pytest.raises(DataError, match=r"1 label\. "):
        SoftmaxRegression().starting_from(np.ones(3, np.float32))


def test_empty_data_can_be_evaluated_and_learned_from() -> None:
    nothing = np.empty(0, np.float32)
    for model in (LeastSquares(), PoissonRegression()):
        assert model.starting_from(nothing) == model
        assert set(model.evaluate(nothing, nothing).as_json().values()) == {None}
    assert LeastSquares().starting_from(np.full(3, 7, np.float32)) == LeastSquares(center=7.0)
    assert PoissonRegression().starting_from(np.zeros(3, np.float32)) == PoissonRegression()
    assert SoftmaxRegression(classes=(0, 1)).evaluate(nothing, np.empty((0, 2), np.float32)).examples == 0


def test_classes_are_parsed_from_options() -> None:
    assert parse_classes("3") == (0, 1, 2)
    assert SoftmaxRegression(classes=parse_classes("5,-1,2")).classes == (-1, 2, 5)
    for text, message in {
        "a,b": "expected a number of classes",
        "1": "2 to 4,096 classes",
        "2.5": "expected a number of classes",
    }.items():
        with pytest.raises(UsageError, match=message):
            parse_classes(text)
    for classes in ((1, 1), (1, 1 << 25)):
        with pytest.raises(UsageError, match="classes"):
            dataclasses.replace(SoftmaxRegression(), classes=classes)


def test_predicted_counts_are_corrected_to_the_right_sum() -> None:
    """A mean that is twice too large is corrected. A difference within the statistical error is not."""
    counts = np.random.default_rng(0).poisson(3.0, 5000).astype(np.float32)
    model = PoissonRegression().starting_from(counts)
    corrected = model.calibrated(counts, np.full(5000, 6.0, np.float32))
    assert corrected.mean / model.mean == pytest.approx(counts.mean() / 6, rel=1e-3)
    assert model.calibrated(counts, np.full(5000, counts.mean() * 1.002, np.float32)) is model
    weights = np.where(counts > 3, 2, 1).astype(np.float32)
    heavier = model.calibrated(counts, np.full(5000, 6.0, np.float32), weights)
    assert heavier.mean / model.mean == pytest.approx(np.average(counts, weights=weights) / 6, rel=1e-3)


def test_counts_of_zero_leave_finite_losses() -> None:
    zeros = np.zeros(100, np.float32)
    model = PoissonRegression().calibrated(zeros, np.full(100, 0.2, np.float32))
    assert 0 < model.mean < 0.01
    assert np.isfinite(model.losses_of(np.ones(1, np.float32), model.outcome(np.zeros(1)).astype(np.float32))).all()
    deviance = model.evaluate(np.ones(5, np.float32), model.outcome(np.zeros(5)).astype(np.float32)).deviance
    assert deviance < 20


def test_a_diverged_poisson_regression_is_not_corrected() -> None:
    model = PoissonRegression()
    labels, predictions = np.array([1.0, 2.0], np.float32), np.zeros(2, np.float32)
    assert model.calibrated(labels, predictions) is model
