"""``paceline train --model deepfm``, from the command to the predictions."""

from __future__ import annotations

import json
import re
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import paceline as package

from .running import Commands, Finished

EXAMPLES = Path(__file__).parents[2] / "examples"


def write_pairs(path: Path, seed: int) -> None:
    """Write rows with weights and three columns. The label depends only on the pair of the first two columns."""
    rng = np.random.default_rng(seed)
    a, b, c = rng.integers(0, 4, (3, 4000))
    labels = rng.random(4000) < np.where((a + b) % 2 == 0, 0.9, 0.1)
    rows = zip(labels.astype(int), a, b, c, strict=True)
    path.write_text("\n".join(["label,a,b,x,times", *(f"{y},v{a},w{b},{c},2" for y, a, b, c in rows)]) + "\n")


COMMON = (
    *("train", "train.csv", "--model", "deepfm", "--hidden", "16", "--l1", "0", "--epochs", "4"),
    *("--factor-min-count", "0", "--factor-l2", "0", "--factor-lr", "0.3", "--tower-lr", "0.01"),
    *("--servers", "2", "--workers", "2", "--consistency", "sequential", "--json", "--weight", "times"),
)


def train(paceline: Commands, *options: str) -> Finished:
    """Train a deep model on several servers and workers, and save it."""
    write_pairs(paceline.folder / "train.csv", 0)
    write_pairs(paceline.folder / "eval.csv", 1)
    columns = ("--categorical", "a,b", "--numeric", "x", "--label", "label", "--eval", "eval.csv")
    return paceline.succeed(*COMMON, *columns, "--save", "model", *options)


def test_a_deep_model_is_trained_and_used(paceline: Commands, tmp_path: Path) -> None:
    """The training uses weights of rows and a validation file."""
    paceline = replace(paceline, kind="torch")
    trained = train(paceline, "--validation", "eval.csv", "--progressive")
    assert trained.json["auc"] > 0.88  # the true probabilities reach 0.9
    assert len(trained.json["validation"]["passes"]) <= 4
    assert "on the validation file" in trained.err
    predicted = paceline.succeed("predict", "model", "eval.csv", "-o", "out.txt", "--json").json
    assert predicted["auc"] == pytest.approx(trained.json["auc"], abs=1e-6)
    model = package.load(tmp_path / "model")
    found = model.predict([{"a": "v0", "b": "w0", "x": 1.0}, {"a": "v0", "b": "w1", "x": 1.0}])
    assert found[0] > 0.8 > 0.2 > found[1]
    inspected = json.loads(paceline.succeed("inspect", "model", "--json").out)
    assert [(table["name"], table["features"], table["dim"]) for table in inspected["tables"][3:]] == [
        ("deepfm hidden 1", 16, 3 * 8 + 1),
        ("deepfm output", 1, 17),
    ]
    other = paceline.run(*COMMON[:4], "--init-from", "model", "--hidden", "8")
    assert other.status == 2
    assert re.search(r"the model in model has .*hidden", other.err)


@pytest.mark.thorough
def test_a_deep_model_is_exported_and_trained_further(
    paceline: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    paceline = replace(paceline, kind="torch")
    train(paceline)
    paceline.environment["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path / "cache")  # created by torch's export
    for file in ("weights.npz", "network.onnx"):
        paceline.succeed("model", "export", "model", file)
    files = [str(tmp_path / name) for name in ("weights.npz", "network.onnx")]
    monkeypatch.setattr(
        sys, "argv", ["", *files, "--model", str(tmp_path / "model"), "--data", str(tmp_path / "eval.csv")]
    )
    runpy.run_path(str(EXAMPLES / "onnx_model.py"), run_name="__main__")
    output = capsys.readouterr().out
    assert output.startswith("4,000 predictions by ")
    assert float(output.split()[-1]) < 1e-5
    further = paceline.succeed(*COMMON, "--init-from", "model", "--eval", "eval.csv").json
    assert further["auc"] > 0.88
