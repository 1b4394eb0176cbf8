"""``paceline model export --to onnx``: other programs compute the same results with the exported network."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from paceline.errors import ModelError, UsageError
from paceline.inference import load
from paceline.inference.export import export_model
from paceline.models.deep.base import DeepModel, load_networks
from paceline.models.features.layout import RowLayout
from paceline.models.fm import FactorModel
from paceline.models.registry import make_model
from paceline.ps import SGD, SparseStore, to_fields
from paceline.ps.client.client import make_spec
from paceline.storage.model_directory import save_model
from paceline.tables.initializers import Zeros
from paceline.tables.spec import TableSpec

Floats = npt.NDArray[np.float32]


def save_network(directory: Path, model: DeepModel) -> list[Floats]:
    """Save the layers of a model, with chosen weights; return them."""
    rng, rule = np.random.default_rng(0), SGD(lr=1.0)
    layers = [rng.normal(size=(len(layer.keys), layer.num_inputs + 1)).astype(np.float32) for layer in model.layers]
    tables = []
    for layer, rows in zip(model.layers, layers, strict=True):
        store = SparseStore(dim=rows.shape[1], rule=rule)
        store.write_records(layer.keys, rows)
        update, initializer = to_fields(rule), to_fields(Zeros())
        spec = TableSpec(name=layer.name, kind="sparse", update=update, initializer=initializer, dim=rows.shape[1])
        tables.append((spec, store.items()))
    save_model(directory, tables, {**model.describe(), "finished": True, "format": "csv", "columns": None})
    return layers


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("deepfm", marks=pytest.mark.thorough), "dcn"])
def test_a_network_as_onnx(name: str, tmp_path: Path) -> None:
    model = make_model(name, dim=2, hidden=(4, 3), offset=-1.5, layout=RowLayout(categorical=("a", "b", "c")))
    assert isinstance(model, DeepModel)
    layers, file = save_network(tmp_path / "model", model), tmp_path / "network.onnx"
    assert export_model(tmp_path / "model", file) == sum(layer.size for layer in layers)
    read = onnx.load(file)
    assert [value.name for value in (*read.graph.input, *read.graph.output)] == ["factors", "margins"]
    metadata = {entry.key: entry.value for entry in read.metadata_props}
    assert metadata.pop("paceline.prediction").startswith("P(click) = 1 / (1 + exp(-margin)); margin = ")
    assert metadata == {
        "paceline.model": name,
        "paceline.columns": '["a", "b", "c"]',
        "paceline.bias": "-1.5",
        "paceline.factor_min_count": "300",
    }
    factors = np.random.default_rng(1).normal(size=(5, 3, 2)).astype(np.float32)
    (found,) = ReferenceEvaluator(read).run(None, {"factors": factors})
    expected = load_networks(name).NetworkPass(model.network, factors, layers).margins
    np.testing.assert_allclose(np.reshape(found, -1), expected, rtol=1e-4, atol=1e-5)


def test_without_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("deepfm", dim=2, hidden=(2,), layout=RowLayout(categorical=("a", "b")))
    assert isinstance(model, DeepModel)
    save_network(tmp_path / "model", model)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        UsageError, match=r"--to onnx needs onnxscript, which is not installed: pip install 'paceline\[onnx\]'"
    ):
        export_model(tmp_path / "model", tmp_path / "network.onnx")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_a_model_without_a_network(tmp_path: Path) -> None:
    save_model(tmp_path / "lr", [], {"kind": "lr", "finished": True, "format": "csv", "columns": None})
    with pytest.raises(UsageError, match="of kind 'lr', which has no network"):
        export_model(tmp_path / "lr", tmp_path / "x.onnx")
    with pytest.raises(ModelError, match="nothing does not exist"):
        export_model(tmp_path / "nothing", tmp_path / "x.onnx")


def test_factors_without_a_gradient_are_exported(tmp_path: Path) -> None:
    """A frequent feature without a pushed gradient has its initial factors, in predictions and in the export."""
    model = make_model("fm", dim=2, factor_min_count=5)
    assert isinstance(model, FactorModel)
    rows = {
        "fm": {1: [0.5], 2: [-0.25], 3: [1.0], 4: [0.0]},
        "fm factors": {1: [0.1, 0.2]},
        "fm counts": {1: [5.0], 2: [9.0], 3: [4.0], 4: [9.0]},
    }
    tables = []
    for table in model.parameter_tables:
        update, initializer = table.update or SGD(lr=1.0), table.initializer or Zeros()
        store = SparseStore(dim=table.dim, rule=update, initializer=initializer)
        keys = np.array(list(rows[table.name]), np.uint64)
        records = np.zeros((len(keys), store.row_words), np.float32)
        records[:, : table.dim] = list(rows[table.name].values())
        store.write_records(keys, records)
        tables.append((make_spec(table.name, "sparse", update, initializer, 0, dim=table.dim), store.items()))
    save_model(tmp_path / "fm", tables, {**model.describe(), "finished": True, "format": "libsvm", "columns": None})
    export_model(tmp_path / "fm", tmp_path / "weights.npz")
    arrays = np.load(tmp_path / "weights.npz")
    assert arrays["fm factors.keys"].tolist() == [1, 2]  # feature 3 is too rare, and feature 4 has weight 0
    pair = float(arrays["fm factors.values"][0] @ arrays["fm factors.values"][1])
    (found,) = load(tmp_path / "fm").predict([{1: 1.0, 2: 1.0, 3: 1.0}])
    assert pair != 0
    assert np.log(found / (1 - found)) == pytest.approx(1.25 + pair, abs=1e-6)
