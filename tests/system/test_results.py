"""The README's results on real data, with default settings."""

from __future__ import annotations

import gzip
import shutil
from pathlib import Path

import pytest

from .running import Commands

_TRAIN_ROWS = 109_711


@pytest.fixture(scope="module")
def criteo(real_data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("criteo")
    train, evaluation = folder / "train.tsv", folder / "test.tsv"
    with gzip.open(real_data / "criteo" / "train.tsv.gz") as source, open(train, "wb") as out:
        for _ in range(_TRAIN_ROWS):
            out.write(source.readline())
        with open(evaluation, "wb") as evaluation_file:
            shutil.copyfileobj(source, evaluation_file)
    return train, evaluation


@pytest.mark.thorough
@pytest.mark.parametrize("consistency", ["sequential", "bounded:4", "eventual"])
def test_criteo(paceline: Commands, criteo: tuple[Path, Path], consistency: str) -> None:
    result = paceline.succeed(
        "train", criteo[0], "--eval", criteo[1], "--servers", "2", "--workers", "2",
        "--consistency", consistency, "--json", "-q",
    ).json  # fmt: skip
    assert result["auc"] >= 0.7591
    assert result["log_loss"] <= 0.4840
    assert result["examples"] == result["settings"]["epochs"] * _TRAIN_ROWS
    assert 260_000 < result["num_features"] < 320_000


@pytest.mark.thorough
@pytest.mark.parametrize(("model", "auc"), [("fm", 0.7596), ("deepfm", 0.7603), ("dcn", 0.7603)])
def test_models_of_pairs(paceline: Commands, criteo: tuple[Path, Path], model: str, auc: float) -> None:
    """docs/guides/models.md claims that deep models are better than a factorization machine.

    Here this holds except for chance.
    """
    common = ("--workers", "1", "--epochs", "3", "--json", "-q")
    assert paceline.succeed("train", criteo[0], "--eval", criteo[1], "--model", model, *common).json["auc"] >= auc


def test_a9a(paceline: Commands, real_data: Path) -> None:
    folder = real_data / "a9a"
    result = paceline.succeed("train", folder / "a9a", "--eval", folder / "a9a.t", "--json", "-q").json
    assert result["accuracy"] >= 0.849
    assert result["num_features"] == 123


def test_agaricus(paceline: Commands, real_data: Path) -> None:
    """So few rows need more passes and smaller minibatches than a click log."""
    folder = real_data / "agaricus"
    result = paceline.succeed(
        "train", folder / "agaricus.txt.train", "--eval", folder / "agaricus.txt.test",
        "--epochs", "10", "--batch-size", "32", "--lr", "0.5", "--json", "-q",
    ).json  # fmt: skip
    assert result["auc"] > 0.9999
