"""Progressive validation: the sums of each worker, and the lines for all workers."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.data import Batch
from paceline.models.base import KeyScratch
from paceline.models.progressive import HEADING, ExampleSums, FirstPass, progressive_losses
from paceline.models.registry import make_model


def summed(*workers: FirstPass) -> dict[str, float]:
    """Return the sums of the workers' counters, as the scheduler computes them."""
    total: dict[str, float] = {}
    for worker in workers:
        for name, value in worker.counters.items():
            total[name] = total.get(name, 0.0) + value
    return total


def a_pass(num_minibatches: int, loss: float, label: float = 0.25, prediction: float | None = 0.5) -> FirstPass:
    worker = FirstPass()
    for _ in range(num_minibatches):
        predictions = None if prediction is None else prediction * 32
        worker.add(32, loss * 32, ExampleSums(32.0, label * 32, predictions, 96))
    return worker


def test_losses_are_reported_when_the_number_of_rows_doubles() -> None:
    worker = FirstPass()
    for loss in (0.7, 0.5, 0.4, 0.4, 0.2):
        worker.add(64, loss * 64, ExampleSums(64.0, 16.0, 32.0, 128))
    found = progressive_losses(worker.counters)
    assert [report.examples for report in found] == [64, 128, 256, 320]
    assert [report.loss for report in found] == pytest.approx([0.7, 0.6, 0.5, 0.44])
    assert [report.loss_since_last for report in found] == pytest.approx([0.7, 0.5, 0.4, 0.2])
    assert {(report.label, report.prediction, report.features) for report in found} == {(0.25, 0.5, 2.0)}
    assert len(found[0].line()) == len(HEADING)


def test_examples_count_by_weight() -> None:
    worker = FirstPass()
    for loss, weight in ((0.8, 1.0), (0.2, 3.0)):
        worker.add(64, loss * 64 * weight, ExampleSums(64.0 * weight, 16.0 * weight, None, 128))
    found = progressive_losses(worker.counters)
    assert [report.loss for report in found] == pytest.approx([0.8, 0.35])
    assert [report.loss_since_last for report in found] == pytest.approx([0.8, 0.2])


def test_losses_of_all_workers_are_combined() -> None:
    """One worker read fewer rows. Its last examples count in the report of the time at which it read them."""
    found = progressive_losses(summed(a_pass(8, 0.6), a_pass(3, 0.3)))
    assert [report.examples for report in found] == [128, 128 + 32 + 64, 256 + 96]
    assert found[-1].loss == pytest.approx((0.6 * 256 + 0.3 * 96) / 352)


def test_incomplete_losses_are_not_reported() -> None:
    quick, slow = a_pass(9, 0.6), a_pass(3, 0.3)
    assert [loss.examples for loss in progressive_losses(summed(quick, slow), 2)] == [128]
    assert progressive_losses(summed(quick), 2) == []
    assert progressive_losses({"examples": 5.0}, 1) == progressive_losses({}) == []


def test_negative_sums_and_missing_predictions() -> None:
    """Counters of a job never fall, although labels of a regression may be negative."""
    worker = FirstPass()
    worker.add(2, 1.0, ExampleSums(2.0, 3.0, -1.0, 2))
    before = dict(worker.counters)
    worker.add(2, 1.0, ExampleSums(2.0, -7.0, -1.0, 2))
    assert all(worker.counters[name] >= value for name, value in before.items())
    (found,) = progressive_losses(worker.counters)
    assert (found.label, found.prediction) == (-1.0, -0.5)
    (found,) = progressive_losses(a_pass(1, 0.5, prediction=None).counters)
    assert found.as_json()["prediction"] is None


@pytest.mark.parametrize("name", ["lr", "fm", "regression", "poisson", "softmax"])
def test_sums_of_a_minibatch(name: str) -> None:
    """The sums cover the predictions of the same examples as the losses, with the weights of the examples."""
    labels, weights = np.array([1.0, 0.0, 1.0], np.float32), np.array([1.0, 2.0, 0.5], np.float32)
    keys = np.array([5, 6, 5, 7], np.uint64)
    batch = Batch(labels, np.array([0, 2, 3, 4]), keys, None, weights)
    model = make_model(name, classes=(0, 1)) if name == "softmax" else make_model(name)
    minibatch = model.prepare(batch, KeyScratch())
    rows = [
        np.full((len(keys), table.dim), 0.25, np.float32)
        for keys, table in zip(minibatch.keys, model.tables, strict=True)
    ]
    minibatch.gradients(rows)
    sums = minibatch.sums()
    assert (sums.weights, sums.labels, sums.num_pairs) == (3.5, 1.5, 4)
    if name == "softmax":
        assert sums.predictions is None
    else:
        assert sums.predictions == pytest.approx(float(minibatch.predict(rows) @ weights))
