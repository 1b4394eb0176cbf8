"""``paceline train --interactions`` and ``--min-count``: kept with the model and applied wherever it is."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np

import paceline as package
from paceline.ps import read_model

from .running import Commands


def test_what_two_columns_say_together(paceline: Commands, tmp_path: Path) -> None:
    """The label is the exclusive or of two columns, of which neither alone says anything."""
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
    assert "train it further with the same" in other.err
    assert paceline.succeed(*common, "--init-from", "model", "--eval", data, "--json").json["auc"] > 0.99


def test_rare_features_are_not_learned(paceline: Commands, click_log: tuple[Path, Path], tmp_path: Path) -> None:
    """Which they are is counted in the first pass, on all servers and their replicas."""
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
    assert often <= found < 1.05 * often + 300  # which are values of the integer columns
    predicted = paceline.succeed("predict", "model", train, "-o", "out", "--json").json
    assert predicted["auc"] > 0.7
    assert {table.spec.name for table in read_model(tmp_path / "model").manifest.tables} == {"lr", "lr occurrences"}


def test_a_field_aware_machine_keeps_its_columns(paceline: Commands, tmp_path: Path) -> None:
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
