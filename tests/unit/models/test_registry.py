"""Every model, by name: its settings can be stored as JSON, and its gradients are the gradients of its loss."""

from __future__ import annotations

import inspect
import json
from typing import Any

import numpy as np
import pytest

from paceline.cli.train_flags import ModelFlags
from paceline.data import Batch
from paceline.errors import UsageError
from paceline.models.base import KeyScratch, SparseModel
from paceline.models.features.layout import RowLayout
from paceline.models.fm import FactorModel
from paceline.models.registry import MODELS, describe_settings, make_model, read_model_settings


def make_batch(num_examples: int = 7, num_keys: int = 12, num_columns: int = 0) -> Batch:
    """Return examples of up to 5 features, or of one feature per column if `num_columns` is not 0."""
    rng = np.random.default_rng(1)
    lengths = np.full(num_examples, num_columns) if num_columns else rng.integers(0, 6, num_examples)
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    keys = rng.integers(0, num_keys, indptr[-1]).astype(np.uint64)
    values = rng.normal(size=indptr[-1]).astype(np.float32)
    return Batch(rng.integers(0, 2, num_examples).astype(np.float32), indptr, keys, values)


def columns_of(model: SparseModel) -> int:
    """Return the number of columns that the model requires, or 0 if it accepts any features."""
    return len(getattr(model, "layout", None) or ())


SETTINGS: dict[str, dict[str, Any]] = {
    "regression": {"center": 0.3, "scale": 1.0},
    "fm": {"dim": 3, "factor_min_count": 0},
    "ffm": {"dim": 2, "factor_min_count": 0, "layout": RowLayout(categorical=tuple("abcde"))},
    "deepfm": {"dim": 2, "factor_min_count": 0, "layout": RowLayout(categorical=tuple("abcde")), "hidden": (3, 2)},
    "dcn": {
        "dim": 2,
        "factor_min_count": 0,
        "layout": RowLayout(categorical=tuple("abcde")),
        "hidden": (3,),
        "cross_layers": 2,
    },
    "poisson": {"mean": 0.7},
    "softmax": {"classes": (0, 1, 4)},
}
LOSS_BY_GRADIENT = {"regression": 2.0, "poisson": 2.0}
"""Quotient of the reported loss and the minimized loss."""


@pytest.mark.parametrize("name", MODELS)
def test_settings_can_be_stored_and_read(name: str) -> None:
    model = make_model(name, **SETTINGS.get(name, {}))
    assert read_model_settings(json.loads(json.dumps({**model.describe(), "finished": True}))) == model.with_defaults()
    assert describe_settings(model.describe()).startswith(name)
    assert name in inspect.getsource(ModelFlags)  # the help text of --model, which needs no numba


@pytest.mark.parametrize("is_weighted", [pytest.param(False, marks=pytest.mark.thorough), True])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_equal_the_gradients_of_the_loss(name: str, is_weighted: bool) -> None:
    model, scratch, rng = make_model(name, **SETTINGS.get(name, {})), KeyScratch(), np.random.default_rng(2)
    batch = make_batch(num_columns=columns_of(model))
    if is_weighted:
        batch.weights = rng.uniform(0, 3, batch.num_examples).astype(np.float32)
    minibatch = model.prepare(batch, scratch)
    weights = [
        (rng.normal(size=(len(keys), table.dim)) / 2).astype(np.float32)
        for keys, table in zip(minibatch.keys, model.tables, strict=True)
    ]
    counts = 2 if isinstance(model, FactorModel) else None  # position of the table that counts features
    if counts is not None:
        weights[counts] = np.abs(weights[counts])
    gradients, _ = minibatch.gradients(weights)
    step = np.float32(2**-7)
    for number, rows in enumerate(weights):
        if number == counts:
            continue
        gradient = np.asarray(gradients[number]).reshape(rows.shape)
        found = np.empty_like(gradient)
        for at in np.ndindex(rows.shape):
            losses = []
            for sign in (1, -1):
                moved = [weight.copy() for weight in weights]
                moved[number][at] += sign * step
                losses.append(minibatch.gradients(moved)[1])
            found[at] = (losses[0] - losses[1]) / (2 * step * LOSS_BY_GRADIENT.get(name, 1.0))
        np.testing.assert_allclose(gradient, found, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("name", MODELS)
def test_keys_are_distinct_and_batches_may_be_empty(name: str) -> None:
    model = make_model(name, **SETTINGS.get(name, {}))
    for num_examples, num_keys in ((7, 12), (0, 12), (1, 1)):
        batch = make_batch(num_examples, num_keys, columns_of(model))
        minibatch = model.prepare(batch, KeyScratch())
        for keys in minibatch.keys:
            assert len(np.unique(keys)) == len(keys)
        weights = [
            np.zeros((len(keys), table.dim), np.float32)
            for keys, table in zip(minibatch.keys, model.tables, strict=True)
        ]
        gradients, loss = minibatch.gradients(weights)
        sizes = [len(keys) * table.dim for keys, table in zip(minibatch.gradient_keys, model.tables, strict=True)]
        assert [np.size(gradient) for gradient in gradients] == sizes
        assert np.isfinite(loss)
        predictions = minibatch.predict(weights)
        assert predictions.shape == (
            (batch.num_examples,) if model.num_outputs == 1 else (batch.num_examples, model.num_outputs)
        )
        assert predictions.dtype == np.float32


def test_unsupported_settings_of_models() -> None:
    assert make_model("lr", dim=None) == make_model()
    with pytest.raises(UsageError, match=r"model='svm': expected one of lr"):
        make_model("svm")
    with pytest.raises(UsageError, match="--classes is not an option of --model lr"):
        make_model("lr", classes=(0, 1))
    with pytest.raises(UsageError, match="'svm'"):
        read_model_settings({"kind": "svm"})
