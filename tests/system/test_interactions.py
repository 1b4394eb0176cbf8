"""``paceline train --interactions`` and ``--min-count``: the model stores them, and every command applies them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import paceline as package
from paceline.ps import read_model

from .running import Commands


def test_interactions_of_two_columns_are_learned(paceline: Commands, tmp_path: Path) -> None:
    """The label is the exclusive or of two columns; a single column has no information."""
    random = np.random.default_rng(7)
    a, b, noise = random.integers(0, 2, (3, 4000))
    lines = [f"{int(x != y)},v{x},w{y},{z}.5" for x, y, z in zip(a, b, noise, strict=True)]
    data = tmp_path / "xor.csv"
    data.write_text("\n".join(["label,a,b,noise", *lines]) + "\n")
    common: list[str | Path] = ["train", data, "--label", "label", "--categorical", "a,b", "--numeric", "noise", "-q"]
    common += ["--epochs", "2", "--workers", "1"]
    found = paceline.succeed(
        *common, "--interactions", "b:a", "--eval", data, "--save", "model", "--feature-names", "--json"
    )
    assert found.json["auc"] > 0.99
    predicted = paceline.succeed("predict", "model", data, "-o", "out", "--json").json
    assert predicted["auc"] > 0.99
    model = package.load(tmp_path / "model")
    assert (model.predict({"a": ["v0", "v1"], "b": ["w1", "w1"], "noise": [0.5, 0.5]}) > 0.5).tolist() == [True, False]
    names = [
        json.loads(line.split("\t")[1]) for line in (tmp_path / "model/feature-names.tsv").read_text().splitlines()
    ]
    assert {"a=v0^b=w0", "a=v0^b=w1", "a=v1^b=w0", "a=v1^b=w1"} <= set(names)
    other = paceline.run(*common, "--init-from", "model", "--interactions", "a:noise")
    assert other.status == 2
    assert "to continue its training" in other.err
    assert paceline.succeed(*common, "--init-from", "model", "--eval", data, "--json").json["auc"] > 0.99


@pytest.mark.thorough
def test_fields_of_lines_and_bins_of_columns(paceline: Commands, tmp_path: Path) -> None:
    """Data with namespaces of several features (text and converted), fields of JSON, and a nonlinear column."""
    random = np.random.default_rng(7)
    n = 3000
    a, b, noise = random.integers(0, 2, (3, n))
    labels = (a != b).astype(int)
    rows = list(zip(labels.tolist(), a.tolist(), b.tolist(), noise.tolist(), strict=True))
    (tmp_path / "xor.vw").write_text("".join(f"{y} |other n{z} n{x}{z} |user v{x} |ad w{w}\n" for y, x, w, z in rows))
    objects = [{"label": y, "user": {"id": f"v{x}"}, "ad": [f"w{w}", f"n{z}"]} for y, x, w, z in rows]
    (tmp_path / "xor.json").write_text("".join(json.dumps(row) + "\n" for row in objects))
    paceline.succeed("convert", "xor.vw", "xor.paceline")
    common = ["--epochs", "2", "--workers", "1", "-q", "--json"]
    for data in ("xor.vw", "xor.paceline"):
        crossed = paceline.succeed("train", data, "--interactions", "u:a", "--eval", data, "--save", "model", *common)
        assert crossed.json["auc"] > 0.99
    assert paceline.succeed("predict", "model", "xor.vw", "-o", "out", "--json").json["auc"] > 0.99
    ffm = ["--model", "ffm", "--factor-min-count", "5", "--factor-lr", "0.3", "--factor-l2", "0", "--epochs", "12"]
    found = paceline.succeed("train", "xor.json", *ffm, *common[2:], "--eval", "xor.json", "--save", "ffm")
    assert found.json["auc"] > 0.95
    model = package.load(tmp_path / "ffm")
    predicted = model.predict([{"user": {"id": "v0"}, "ad": [w]} for w in ("w1", "w0")] + [{"new": 1, "ad": ["w1"]}])
    assert predicted[0] > predicted[1]
    x = random.normal(size=n)
    lines = [f"{int(abs(value) > 0.7)},{value:.4f}" for value in x]
    (tmp_path / "bent.csv").write_text("\n".join(["label,x", *lines]) + "\n")
    for how, least, most in (("auto", 0.97, 1.0), ("quantile:20", 0.97, 1.0), ("standard", 0.0, 0.6)):
        found = paceline.succeed(
            "train", "bent.csv", "--numeric-scale", how, "--eval", "bent.csv", "--save", "bent", *common
        )
        assert least <= found.json["auc"] <= most
        if how == "quantile:20":
            assert "scales: 20 bins" in paceline.succeed("inspect", "bent").out
            predicted = package.load(tmp_path / "bent").predict([{"x": value} for value in (-2.0, 0.0, 2.0, None)])
            assert min(predicted[0], predicted[2]) > 0.8 > 0.2 > predicted[1]


@pytest.mark.thorough
def test_rare_features_are_not_learned(paceline: Commands, click_log: tuple[Path, Path], tmp_path: Path) -> None:
    """All servers and replicas count the features in the first pass."""
    train, _ = click_log
    counts = Counter(
        (column, value)
        for line in train.read_text().splitlines()
        for column, value in enumerate(line.split("\t")[14:], 14)
    )
    often = sum(count >= 3 for count in counts.values())
    common: list[str | Path] = ["train", train, "--workers", "2", "-q", "--json", "--save", "model"]
    common += ["--min-count", "3", "--servers", "2", "--replicas", "1"]
    found = paceline.succeed(*common, "--epochs", "2").json["num_features"]
    assert often <= found < 1.05 * often + 300  # values of the integer columns
    predicted = paceline.succeed("predict", "model", train, "-o", "out", "--json").json
    assert predicted["auc"] > 0.7
    assert {table.spec.name for table in read_model(tmp_path / "model").manifest.tables} == {"lr", "lr occurrences"}


def test_a_field_aware_machine_stores_the_columns(paceline: Commands, tmp_path: Path) -> None:
    random = np.random.default_rng(8)
    a, b = random.integers(0, 2, (2, 4000))
    data = tmp_path / "xor.csv"
    data.write_text("\n".join(["label,a,b", *(f"{int(x != y)},v{x},w{y}" for x, y in zip(a, b, strict=True))]) + "\n")
    common: list[str | Path] = ["train", data, "--label", "label", "--categorical", "a,b", "-q", "--workers", "1"]
    common += ["--model", "ffm", "--l1", "0", "--factor-min-count", "0", "--factor-l2", "0", "--factor-lr", "0.3"]
    found = paceline.succeed(*common, "--epochs", "6", "--eval", data, "--save", "model", "--json")
    assert found.json["auc"] > 0.99
    model = package.load(tmp_path / "model")
    assert (model.predict({"b": ["w1", "w1"], "a": ["v0", "v1"]}) > 0.5).tolist() == [True, False]
