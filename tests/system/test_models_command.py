"""``paceline train --model``: models other than logistic regression, from the command to the predictions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from .running import Commands


def write_numbers(path: Path, seed: int, *, classes: bool) -> list[float]:
    """Write LIBSVM rows; return their labels: a number that depends on two features, or one of three ranges."""
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(4000, 2))
    exact: npt.NDArray[np.float64] = 10 + 2 * features[:, 0] - features[:, 1] + 0.1 * rng.normal(size=4000)
    labels = np.digitize(exact, [9, 11]) * 5.0 if classes else exact
    lines = (f"{label:.6g} 1:{a:.6g} 2:{b:.6g}\n" for label, (a, b) in zip(labels, features, strict=True))
    path.write_text("".join(lines))
    return [float(label) for label in labels]


def test_regression(paceline: Commands, tmp_path: Path) -> None:
    train, evaluation = tmp_path / "train.svm", tmp_path / "eval.svm"
    write_numbers(train, 0, classes=False)
    labels = write_numbers(evaluation, 1, classes=False)
    common: list[str | Path] = ["train", train, "--model", "regression", "--workers", "1", "--epochs", "8"]
    trained = paceline.succeed(*common, "--batch-size", "16", "--eval", evaluation, "--save", "model", "--json")
    assert trained.json["rmse"] < 0.3
    assert trained.json["train_squared_error"] > 0
    predicted = paceline.succeed("predict", "model", evaluation)
    assert "RMSE 0." in predicted.err
    found = np.array([float(line) for line in predicted.out.splitlines()])
    assert np.sqrt(np.mean((found - labels) ** 2)) == pytest.approx(trained.json["rmse"], abs=1e-3)


def test_classes(paceline: Commands, tmp_path: Path) -> None:
    train, evaluation = tmp_path / "train.svm", tmp_path / "eval.svm"
    write_numbers(train, 0, classes=True)
    labels = write_numbers(evaluation, 1, classes=True)
    common: list[str | Path] = ["train", train, "--model", "softmax", "--workers", "2", "--epochs", "5"]
    trained = paceline.succeed(*common, "--eval", evaluation, "--save", "model", "-q")
    assert "log loss" in trained.out
    predicted = paceline.succeed("predict", "model", evaluation)
    found = np.array([[float(part) for part in line.split(" ")] for line in predicted.out.splitlines()])
    assert found.shape == (4000, 3)
    accuracy = (np.array([0, 5, 10])[found.argmax(axis=1)] == labels).mean()
    assert accuracy > 0.85
    assert f"accuracy {accuracy:.4f}" in predicted.err
    assert f"accuracy {accuracy:.4f}" in trained.out
    unknown = paceline.run(*common, "--classes", "6", "-q")
    assert unknown.status == 1
    assert "the data has the label 10, but the classes are 0, 1, 2, 3, 4, 5" in unknown.err
    refused = paceline.run("train", train, "--classes", "6", "-q")
    assert "--classes is not an option of --model lr" in refused.err


@pytest.mark.thorough
def test_weights_of_rows_and_classes(paceline: Commands, tmp_path: Path) -> None:
    """A row of weight 3 counts like three rows. Predictions are calibrated although negatives were dropped."""
    rng = np.random.default_rng(0)
    sites, is_click = rng.integers(0, 5, 20_000), np.zeros(20_000, np.int64)
    is_click[:] = rng.random(20_000) < 0.02 + 0.03 * sites
    counts = rng.integers(0, 4, 20_000)
    weighted = "".join(f"{a},s{b},{c}\n" for a, b, c in zip(is_click, sites, counts, strict=True))
    (tmp_path / "weighted.csv").write_text("click,site,times\n" + weighted)
    (tmp_path / "plain.csv").write_text(
        "click,site\n" + "".join(f"{a},s{b}\n" * c for a, b, c in zip(is_click, sites, counts, strict=True))
    )
    common: list[str | Path] = ["--workers", "1", "-q", "--json", "--epochs", "6", "--l1", "0", "--lr", "0.5"]
    found = paceline.succeed(
        "train", "weighted.csv", "--weight", "times", *common, "--eval", "plain.csv", "--save", "m"
    )
    expected = paceline.succeed("train", "plain.csv", *common, "--eval", "plain.csv")
    assert found.json["log_loss"] == pytest.approx(expected.json["log_loss"], abs=2e-3)
    assert paceline.succeed("predict", "m", "plain.csv", "--json").json["log_loss"] == found.json["log_loss"]
    thinned = paceline.succeed("train", "plain.csv", *common, "--keep-negatives", "0.1", "--eval", "plain.csv")
    assert thinned.json["examples"] == expected.json["examples"]
    assert thinned.json["log_loss"] == pytest.approx(expected.json["log_loss"], abs=3e-3)
    assert thinned.json["calibration"] == pytest.approx(1, abs=0.1)
    balanced = paceline.succeed("train", "plain.csv", *common, "--class-weight", "balanced", "--eval", "plain.csv")
    rate = is_click.repeat(counts).mean()
    assert balanced.json["calibration"] == pytest.approx(0.5 / rate, rel=0.2)
    for arguments, message in {
        ("--weight", "clicks"): "has no weight 'clicks'",
        ("--model", "poisson", "--class-weight", "balanced"): "--class-weight is not an option of --model poisson",
        ("--model", "regression", "--keep-negatives", "0.5"): "only models of clicks",
    }.items():
        refused = paceline.run("train", "weighted.csv", *arguments, "-q")
        assert refused.status
        assert message in refused.err


@pytest.mark.thorough
def test_factorization_machine(paceline: Commands, tmp_path: Path) -> None:
    """Learn a label that depends on pairs of features, on two servers; save and load the three tables."""
    for name, seed in (("train.svm", 0), ("eval.svm", 1)):
        rng = np.random.default_rng(seed)
        pairs = rng.integers(0, 6, (8000, 2))
        labels = rng.random(8000) < np.where(pairs.sum(axis=1) % 2 == 0, 0.85, 0.15)
        lines = (f"{label:d} {a}:1 {6 + b}:1\n" for label, (a, b) in zip(labels, pairs, strict=True))
        (tmp_path / name).write_text("".join(lines))
    common: list[str | Path] = ["train", "train.svm", "--servers", "2", "--workers", "2", "--eval", "eval.svm", "-q"]
    common += ["--consistency", "sequential", "--l1", "0", "--epochs", "12", "--batch-size", "32", "--json"]
    factors = ["--dim", "4", "--factor-lr", "0.1", "--factor-l2", "0", "--factor-min-count", "100"]
    trained = paceline.succeed(*common, "--model", "fm", *factors, "--save", "model").json
    assert trained["auc"] > 0.75
    assert trained["num_features"] == 12
    predicted = paceline.succeed("predict", "model", "eval.svm", "--json").json
    assert predicted["auc"] == pytest.approx(trained["auc"], abs=1e-6)
    refused = paceline.run(*common, "--dim", "4")
    assert refused.status
    assert "--dim is not an option of --model lr" in refused.err
