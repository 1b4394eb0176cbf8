"""The description of a saved model in text, JSON and HTML: its numbers match the weights."""

from __future__ import annotations

import itertools
import json
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from paceline import cli
from paceline.errors import ModelError, UsageError
from paceline.inference import load
from paceline.inference.export import export_model
from paceline.inference.inspection import (
    Histogram,
    LargeWeight,
    ModelSummary,
    TableSummary,
    compare_models,
    group_by_prediction,
    inspect_model,
)
from paceline.inference.reports import describe_model, make_page, write_png
from paceline.models.logistic import SparseLogisticRegression as SparseLogisticRegression
from paceline.models.softmax import SoftmaxRegression
from paceline.ps import SGD, to_fields
from paceline.storage.model_directory import save_model
from paceline.tables.initializers import Zeros
from paceline.tables.spec import TableSpec

from .conftest import save_weights

WEIGHTS = {3: 0.5, 2**64 - 1: -2.0, 17: 0.0, 9: 1.5}


def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", ["paceline", *arguments])
    monkeypatch.setattr(cli, "raise_on_sigterm", lambda: None)
    cli.main()
    return capsys.readouterr().out


def test_numbers_in_the_description_of_a_model(tmp_path: Path) -> None:
    summary = inspect_model(save_weights(tmp_path / "m", WEIGHTS, bias=0.25), top=2)
    (table,) = summary.tables
    assert (summary.kind, summary.finished, summary.description["format"]) == ("lr", True, "libsvm")
    assert (table.features, table.nonzero, table.bias) == (4, 3, 0.25)
    assert (table.l1_norm, table.largest) == (4.0, 2.0)
    assert table.l2_norm == pytest.approx(np.sqrt(0.25 + 4 + 2.25))
    assert [(weight.key, weight.weight) for weight in table.largest_weights] == [(2**64 - 1, -2.0), (9, 1.5)]
    assert sum(table.histogram.counts) == 3
    assert (table.histogram.edges[0], table.histogram.edges[-1]) == (-2.0, 1.5)


def test_a_model_whose_weights_are_all_zero(tmp_path: Path) -> None:
    (table,) = inspect_model(save_weights(tmp_path / "m", {1: 0.0})).tables
    assert (table.nonzero, table.largest_weights, table.histogram.counts) == (0, [], [])


def test_invalid_models_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="holds no model"):
        inspect_model(tmp_path)
    rule, start = to_fields(SGD(lr=1.0)), to_fields(Zeros())
    save_model(tmp_path / "own", [(TableSpec(name="x", kind="sparse", update=rule, initializer=start), [])], {})
    with pytest.raises(UsageError, match="tables of your own program"):
        inspect_model(tmp_path / "own")


def test_calibration_groups_hold_equal_shares_by_rising_prediction() -> None:
    random = np.random.default_rng(1)
    probabilities = random.random(1000, np.float32)
    labels = (random.random(1000) < probabilities).astype(np.float32)
    groups = group_by_prediction(labels, probabilities)
    assert [group.count for group in groups] == [100] * 10
    assert all(a.highest <= b.lowest for a, b in itertools.pairwise(groups))
    assert all(abs(group.predicted - group.observed) < 0.15 for group in groups)
    assert np.mean([group.observed for group in groups]) == pytest.approx(labels.mean(), rel=1e-5)
    assert len(group_by_prediction(labels[:3], probabilities[:3])) == 3


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append(tag)
        assert not {"src", "href"} & {name for name, _ in attrs}, "the page must not load other files"


def test_inspect_command(
    libsvm_model: Path, libsvm: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = libsvm_model.with_name("model.html")
    arguments = ("inspect", str(libsvm_model), "--data", str(libsvm), "--html", str(page), "--top", "3")
    text = run(capsys, monkeypatch, *arguments)
    assert "4 features, 4 with a nonzero weight" in text
    assert "on 3 examples: AUC" in text
    found = json.loads(run(capsys, monkeypatch, *arguments, "--json"))
    assert len(found["tables"][0]["largest_weights"]) == 3
    assert found["calibration"]["metrics"]["examples"] == 3
    tags = Tags()
    tags.feed(page.read_text(encoding="utf-8"))
    assert tags.found.count("svg") == 2
    assert tags.found.count("circle") == 3


def test_plots(
    libsvm_model: Path, libsvm: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plot of weights, and a calibration plot if data is given."""
    image = pytest.importorskip("matplotlib.image", reason="matplotlib is not installed: pip install 'paceline[plots]'")
    sizes, file = [], libsvm_model.with_name("model.png")
    for data in ([], ["--data", str(libsvm)]):
        run(capsys, monkeypatch, "inspect", str(libsvm_model), "--png", str(file), *data)
        pixels = image.imread(file)
        assert len(np.unique(pixels)) > 2  # the plot is not empty
        sizes.append(pixels.shape[1])
    assert sizes[1] == 2 * sizes[0]
    with pytest.raises(ModelError, match="cannot write the plots to"):
        write_png(libsvm_model.with_name("none") / "x.png", inspect_model(libsvm_model), None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UsageError, match=r"--png needs matplotlib, .*: pip install 'paceline\[plots\]'"):
        write_png(file, inspect_model(libsvm_model), None)


def test_diff(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    first = save_weights(tmp_path / "a", {1: 1.0, 2: 2.0, 5: 3.0})
    second = save_weights(tmp_path / "b", {1: 1.0, 5: -1.0, 7: 0.5, 8: 0.0})
    (table,) = compare_models(first, second).tables
    assert (table.changed, table.only_in) == (3, (1, 1))
    assert table.largest_changes == [(5, 3.0, -1.0), (2, 2.0, 0.0), (7, 0.0, 0.5)]
    assert table.distance == pytest.approx(np.sqrt(16 + 4 + 0.25))
    assert table.cosine == pytest.approx((1 - 3) / np.sqrt(14 * 2.25))
    assert compare_models(first, first).tables[0].cosine == pytest.approx(1.0)
    assert "3 features changed" in run(capsys, monkeypatch, "model", "diff", str(first), str(second))
    found = json.loads(run(capsys, monkeypatch, "model", "diff", str(first), str(second), "--json"))
    assert found["tables"][0]["changed"] == 3


def test_export(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model, arrays, text = save_weights(tmp_path / "m", WEIGHTS, bias=0.1), tmp_path / "w.npz", tmp_path / "w.txt"
    assert run(capsys, monkeypatch, "model", "export", str(model), str(arrays)) == f"3 weights in {arrays}\n"
    with np.load(arrays) as found:
        assert found["lr.keys"].tolist() == [3, 9, 2**64 - 1]
        assert found["lr.values"].tolist() == [[0.5], [1.5], [-2.0]]
        assert found["lr.bias"].tolist() == [np.float32(0.1)]
    run(capsys, monkeypatch, "model", "export", str(model), str(text))
    assert text.read_text() == f"Constant:0.100000001\n3:0.5\n9:1.5\n{2**64 - 1}:-2\n"
    with pytest.raises(UsageError, match="--to csv: expected npz, text or onnx"):
        export_model(model, text, "csv")
    with pytest.raises(ModelError, match="cannot write the weights to"):
        export_model(model, tmp_path / "nowhere" / "w.npz")


def test_features_of_the_data_are_named(
    csv_model: Path, csv: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = json.loads(run(capsys, monkeypatch, "inspect", str(csv_model), "--data", str(csv), "--json"))
    names = {entry["name"] for entry in found["tables"][0]["largest_weights"]}
    assert names == {"age", "site=news", "site=shop", "site=42", "device=phone", "device=tablet", "device="}


def test_a_model_of_several_classes(
    libsvm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = SoftmaxRegression(classes=(0, 1, 2))
    (table,) = model.tables
    rule, start = to_fields(SGD(lr=1.0)), to_fields(Zeros())
    spec = TableSpec(name=table.name, kind="sparse", dim=table.dim, update=rule, initializer=start)
    rows = (np.array([1, 3], np.uint64), np.array([[1, 0, -1], [0, 2, 0]], np.float32))
    described = {**model.describe(), "format": "libsvm", "columns": None}
    save_model(tmp_path / "classes", [(spec, [rows])], described)
    loaded = load(tmp_path / "classes")
    assert loaded.settings == {"classes": (0, 1, 2)}
    found = loaded.predict([{1: 1.0}, {3: 1.0}, {}])
    assert found.shape == (3, 3)
    np.testing.assert_allclose(found.sum(axis=1), 1.0, rtol=1e-6)
    assert found.argmax(axis=1).tolist()[:2] == [0, 1]
    np.testing.assert_allclose(found[2], 1 / 3, rtol=1e-6)
    assert loaded.weights().values.tolist() == [[1, 0, -1], [0, 2, 0]]
    data = tmp_path / "classes.svm"
    data.write_text("0 1:1\n1 3:1\n2 5:1\n")
    text = run(capsys, monkeypatch, "inspect", str(tmp_path / "classes"), "--data", str(data))
    assert "on 3 examples: accuracy" in text
    with pytest.raises(UsageError, match="several numbers per feature"):
        export_model(tmp_path / "classes", tmp_path / "w.txt")


def test_weights_apply_to_unscaled_values(tmp_path: Path) -> None:
    model = SparseLogisticRegression(offset=-1.5)
    scaling = {"keys": [3, 9], "means": [0.25, 0.0], "scales": [2.0, 4.0], "other_scale": 0.5}
    directory = save_weights(tmp_path / "m", WEIGHTS, bias=0.25, described={**model.describe(), "scaling": scaling})
    loaded = load(directory)
    keys, values, bias = loaded.weights()
    rows = [{3: 1.0}, {3: 2.0, 9: -1.0}, {2**64 - 1: 0.125}, {}]
    weight = dict(zip(keys.tolist(), values[:, 0].tolist(), strict=True))
    margins = [bias[0] + sum(weight[key] * value for key, value in row.items()) for row in rows]
    np.testing.assert_allclose(loaded.predict(rows), 1 / (1 + np.exp(-np.array(margins))), rtol=1e-5)
    summary = inspect_model(directory)
    assert (summary.description["offset"], "values of 2 keys" in summary.description["scaling"]) == (-1.5, True)
    export_model(directory, tmp_path / "w.txt")
    assert (tmp_path / "w.txt").read_text().startswith(f"Constant:{bias[0]:.9g}\n3:0.25\n9:0.375\n")


def test_feature_names_stay_on_one_line() -> None:
    largest = [LargeWeight(7, "site=line\nbreak", 0.5)]
    table = TableSummary(
        name="weights",
        dim=1,
        features=1,
        nonzero=1,
        l1_norm=0.5,
        l2_norm=0.5,
        largest=0.5,
        bias=0.0,
        histogram=Histogram([0.0, 1.0], [1]),
        largest_weights=largest,
    )
    summary = ModelSummary("m", "logistic", True, "0.1.0", {"columns": {"site\x1b": ["a\tb"]}}, [table])
    for shown_text in (describe_model(summary), make_page(summary, None)):
        assert "site=line\\nbreak" in shown_text
        assert "a\\tb" in shown_text
        assert "\x1b" not in shown_text
