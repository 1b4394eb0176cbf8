"""Deep models: predictions equal to NumPy's, accepted settings, and training of the layers."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tests.unit.models.test_ffm import LAYOUT, make_pairs
from tests.unit.models.training import train

from paceline.data import Batch, Columns
from paceline.errors import UsageError
from paceline.kernels.hashing import name_seed
from paceline.models import deep
from paceline.models.base import KeyScratch
from paceline.models.deep.base import DeepModel
from paceline.models.deep.layers import Layer, parse_hidden
from paceline.models.features.interactions import Interactions
from paceline.models.features.layout import RowLayout
from paceline.models.metrics import auc
from paceline.models.registry import make_model, read_model_settings
from paceline.ps import FTRL, Adam

DEEP = ("deepfm", "dcn")
Array = npt.NDArray[Any]


def make_deep(name: str, **settings: Any) -> DeepModel:
    model = make_model(name, **settings)
    assert isinstance(model, DeepModel)
    return model


def perceptron(x: Array, layers: list[Array]) -> Array:
    for layer in layers:
        x = np.maximum(layer[:, :-1] @ x + layer[:, -1], 0)
    return x


def margin(model: DeepModel, vectors: Array, layers: list[Array]) -> float:
    """Return the part of a margin from the factors of columns (float64 [columns, dim])."""
    x = vectors.reshape(-1)
    if model.name == "deepfm":
        pairs = sum(vectors[a] @ vectors[b] for a in range(len(vectors)) for b in range(a))
        return float(pairs + layers[-1][0, :-1] @ perceptron(x, layers[:-1]) + layers[-1][0, -1])
    crossed = x
    for layer in layers[:2]:
        crossed = x * (layer[:, :-1] @ crossed + layer[:, -1]) + crossed
    both = np.concatenate([crossed, perceptron(x, layers[2:-1])])
    return float(layers[-1][0, :-1] @ both + layers[-1][0, -1])


@pytest.mark.parametrize("name", DEEP)
def test_outputs_of_deep_models(name: str) -> None:
    """The rows have missing numbers and a feature that is too rare for factors."""
    model = make_deep(name, dim=2, hidden=(4, 3), layout=LAYOUT, factor_min_count=5, offset=0.25)
    x, y, z = (name_seed(column) for column in LAYOUT.numeric)
    keys = np.array([7, 8, x, y, z, 7, 9, z], np.uint64)
    columns = [[0, 1, 2, 3, 4], [0, 1, 4]]
    values = np.array([1, 1, 0.5, -2, 3, 1, 1, 0.25], np.float32)
    batch = Batch(np.zeros(2, np.float32), np.array([0, 5, 8]), keys, values)
    minibatch = model.prepare(batch, KeyScratch())
    rng = np.random.default_rng(3)
    rows = zip(minibatch.keys, model.tables, strict=True)
    weights = [rng.normal(size=(len(keys), table.dim)).astype(np.float32) for keys, table in rows]
    features = minibatch.keys[0][:-1].tolist()
    weights[2][:] = 5
    weights[2][features.index(9)] = 4
    first, factors, _, *layers = (weight.astype(np.float64) for weight in weights)
    found = []
    for row, pairs in enumerate((range(5), range(5, 8))):
        vectors, total = np.zeros((5, 2)), 0.25 + first[-1, 0]
        for at, column in zip(pairs, columns[row], strict=True):
            place = features.index(int(keys[at]))
            total += first[place, 0] * values[at]
            vectors[column] = factors[place] * values[at] * (keys[at] != 9)
        found.append(total + margin(model, vectors, layers))
    np.testing.assert_allclose(minibatch.predict(weights), 1 / (1 + np.exp(-np.array(found))), rtol=1e-4)


@pytest.mark.parametrize("name", DEEP)
def test_effects_of_pairs_are_learned(name: str) -> None:
    before, unseen = torch.get_num_threads(), make_pairs(1)
    model = make_deep(
        name, layout=RowLayout(categorical=("a", "b")), hidden=(8,), tower_lr=0.02,
        factor_lr=0.1, factor_l2=0.0, factor_std=0.1, factor_min_count=0,
    )  # fmt: skip
    found, stores = train(model, make_pairs(0), FTRL(alpha=0.1, l1=0.0), epochs=3, unseen=unseen)
    assert auc(unseen.labels, found) > 0.77  # the true probabilities reach 0.8
    assert [len(store) for store in stores[3:]] == [layer.num_units for layer in model.layers]
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("name", DEEP)
def test_layers_are_learned_if_features_are_counted(name: str) -> None:
    model = make_deep(name, layout=RowLayout(categorical=("a", "b")), hidden=(3,), min_count=2, factor_min_count=0)
    batch = make_pairs(0).slice(0, 8)
    batch.keys = batch.keys + np.uint64(1 << 63)
    minibatch = model.prepare_training(batch, KeyScratch(), is_first_pass=False)
    rows = zip(minibatch.keys, model.tables, strict=True)
    minibatch.gradients([np.ones((len(keys), table.dim), np.float32) for keys, table in rows])
    assert [len(keys) for keys in minibatch.gradient_keys[:2]] == [1, 0]  # only the bias: no key has occurred twice
    assert [keys.tolist() for keys in minibatch.gradient_keys[3:-1]] == [keys.tolist() for keys in model.layer_keys]


def test_sizes_of_layers() -> None:
    model = make_deep("dcn", dim=2, hidden=(5, 4), cross_layers=1).of_columns("criteo", None)
    assert isinstance(model, DeepModel)
    assert [layer[2:] for layer in model.layers] == [(78, 78), (78, 5), (5, 4), (82, 1)]
    keys = np.concatenate(model.layer_keys)
    assert len(np.unique(keys)) == len(keys) == 78 + 5 + 4 + 1
    table = Layer("one", 3, 16, 2).table(Adam(lr=0.5))
    assert (table.name, table.dim, table.update) == ("one", 17, Adam(lr=0.5))
    assert table.initializer is not None
    penalized = make_deep("dcn", layout=LAYOUT, tower_lr=0.01, tower_l1=0.2, tower_l2=0.3).parameter_tables[3]
    assert penalized.update == Adam(lr=0.01, l1=0.2, weight_decay=0.3)
    assert table.initializer.largest == 0.25
    assert read_model_settings(json.loads(json.dumps(model.describe()))) == model.with_defaults()


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("deepfm", {"hidden": (0,)}, "--hidden 0: expected the sizes of 1 to 16 layers"),
        ("deepfm", {"hidden": ()}, "expected the sizes of 1 to 16 layers"),
        ("deepfm", {"cross_layers": 2}, "--cross-layers is not an option of --model deepfm"),
        ("dcn", {"cross_layers": 0}, "--cross-layers 0: expected 1 to 16"),
        ("dcn", {"tower_lr": -1.0}, "--tower-lr -1: expected a number of 0 or more"),
        ("dcn", {"tower_l2": -0.5}, "--tower-l2 -0.5: expected a number of 0 or more"),
        ("dcn", {"tower_l1": -0.5}, "--tower-l1 -0.5: expected a number of 0 or more"),
        ("dcn", {"tower_lr": math.nan}, "--tower-lr nan: expected"),
        ("dcn", {"dim": 1024, "layout": RowLayout(categorical=tuple(map(str, range(64))))}, "smaller --dim"),
        ("dcn", {"interactions": Interactions(text="a:b")}, "--interactions is not an option of --model dcn"),
        ("fm", {"hidden": (3,)}, "--hidden is not an option of --model fm"),
    ],
)
def test_invalid_settings_are_rejected(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_model(name, **settings)


def test_numbers_of_units_are_parsed() -> None:
    assert parse_hidden("128, 64") == (128, 64)
    with pytest.raises(UsageError, match="--hidden 12x: expected the number of units of each layer"):
        parse_hidden("12x")


@pytest.mark.parametrize("format", ["libsvm", "vw", "jsonl"])
def test_data_without_columns_is_rejected(format: str) -> None:
    columns = Columns("label", is_open=True) if format == "jsonl" else None
    for name in (*DEEP, "ffm"):
        with pytest.raises(UsageError, match=f"{format} has none.* --model fm"):
            make_model(name).of_columns(format, columns)


def test_a_missing_pytorch_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error appears at the start of a training and before a saved model predicts."""
    message = r"--model dcn needs PyTorch, which is not installed: pip install 'paceline\[torch\]'"
    layout = RowLayout(categorical=("a", "b"))
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "paceline.models.deep.networks", None)
        patch.delattr(deep, "networks", raising=False)
        with pytest.raises(UsageError, match=message):
            make_deep("dcn", layout=layout).import_libraries()
        with pytest.raises(UsageError, match=message):
            make_deep("dcn", layout=layout).prepare(make_pairs(0), KeyScratch())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=message):
        make_model("dcn").of_columns("criteo", None)
