"""Counting features in a sketch: never too few, seldom too many; and what is learned from features that are counted."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from paceline.data import Batch
from paceline.errors import UsageError
from paceline.models.base import BIAS_KEY, KeyScratch
from paceline.models.features.counting import DEPTH, FeatureCounts
from paceline.models.registry import make_model, read_model_settings


def push(sketch: dict[int, float], features: npt.NDArray[np.uint64], num_cells: int, times: int = 1) -> None:
    """Count each of some features, as a server's table does."""
    counted = FeatureCounts(features, num_cells)
    for cell, added in zip(counted.cells.tolist(), counted.added(np.full(len(features), times)).tolist(), strict=True):
        sketch[cell] = sketch.get(cell, 0.0) + added


def test_counts_are_never_too_small_and_seldom_too_large() -> None:
    random, num_cells, sketch = np.random.default_rng(0), 2048, dict[int, float]()
    features = random.integers(0, 2**64, 2000, np.uint64)
    times = random.geometric(0.2, len(features))
    for each, count in zip(features, times.tolist(), strict=True):
        push(sketch, np.array([each]), num_cells, count)
    counted = FeatureCounts(features, num_cells)
    estimates = counted.estimates(np.array([sketch[cell] for cell in counted.cells.tolist()], np.float32))
    assert (estimates >= times).all()
    bound = np.e * times.sum() / num_cells  # theorem 1
    assert np.mean(estimates > times + bound) < np.exp(-DEPTH)
    assert max(sketch) < DEPTH * num_cells
    assert len(FeatureCounts(features[:0], num_cells).cells) == 0


def test_only_what_has_occurred_often_enough_is_learned() -> None:
    """Features 5 and 6 come twice in the minibatch; of feature 7, which comes once, there was one before."""
    model = make_model("lr", min_count=2, count_cells=1 << 16)
    keys = np.array([5, 6, 5, 7, 6, 8], np.uint64)
    batch = Batch(np.array([1, 0, 1], np.float32), np.array([0, 2, 4, 6]), keys)
    sketch: dict[int, float] = {}
    push(sketch, np.array([7], np.uint64), 1 << 16)
    for is_first_pass, learned in ((True, {5, 6, 7}), (False, set())):
        minibatch = model.prepare_training(batch, KeyScratch(), is_first_pass=is_first_pass)
        assert len(minibatch.keys) == len(model.tables) == 2
        counts = np.array([[sketch.get(cell, 0.0)] for cell in minibatch.keys[1].tolist()], np.float32)
        gradients, _ = minibatch.gradients([np.zeros((len(minibatch.keys[0]), 1), np.float32), counts])
        assert set(minibatch.gradient_keys[0].tolist()) == learned | {int(BIAS_KEY)}
        assert [len(each) for each in gradients] == [len(each) for each in minibatch.gradient_keys]
        # The rule of that table, SGD, takes gradients off.
        assert -sum(gradients[1].tolist()) == (DEPTH * len(keys) if is_first_pass else 0)
    assert len(model.prepare(batch, KeyScratch()).keys) == 1  # predictions need no counts


def test_a_factorization_machine_is_counted_too() -> None:
    model = make_model("fm", min_count=2, factor_min_count=0)
    batch = Batch(np.ones(2, np.float32), np.array([0, 2, 4]), np.array([5, 6, 5, 7], np.uint64))
    minibatch = model.prepare_training(batch, KeyScratch(), is_first_pass=True)
    weights = [
        np.ones((len(keys), table.dim), np.float32)
        for keys, table in zip(minibatch.keys[:-1], model.tables, strict=False)
    ]
    gradients, _ = minibatch.gradients([*weights, np.zeros((len(minibatch.keys[-1]), 1), np.float32)])
    assert [each.tolist() for each in minibatch.gradient_keys[:2]] == [[5, int(BIAS_KEY)], [5]]
    assert gradients[1].shape == (1, 8)


def test_settings() -> None:
    model = make_model("lr", min_count=3)
    assert read_model_settings(model.describe()) == model
    assert "min_count" not in make_model("lr").describe()
    for wrong in ({"min_count": 0}, {"min_count": 1 << 30}, {"min_count": 2, "count_cells": 0}):
        with pytest.raises(UsageError, match=r"--min-count .*: expected 1 to|--count-cells 0: expected 1 to"):
            make_model("lr", **wrong)
