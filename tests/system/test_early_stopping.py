"""``paceline train --validation``: the best pass's model is what is saved, over two runs too."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from .running import Commands

OVERFITTING: list[str | Path] = ["--update", "adagrad", "--lr", "0.2", "--batch-size", "64"]


def test_the_best_pass_is_saved(paceline: Commands, click_log: tuple[Path, Path], tmp_path: Path) -> None:
    train, validation = click_log
    common: list[str | Path] = ["train", train, "--validation", validation, "--eval", validation, "--save", "model"]
    common += [*OVERFITTING, "--servers", "2", "--workers", "2", "--consistency", "sequential", "--json"]
    first = paceline.succeed(*common, "--epochs", "9", "--patience", "1", "--snapshot-every", "6000")
    found = first.json["validation"]
    numbers = [each["pass"] for each in found["passes"]]
    losses = [each["log_loss"] for each in found["passes"]]
    assert numbers == list(range(1, len(numbers) + 1))
    assert len(numbers) == found["best_pass"] + 1 < 9  # one without progress was enough
    assert losses.index(min(losses)) + 1 == found["best_pass"]
    assert first.json["examples"] == 12_000 * len(numbers)
    assert f"stopped after pass {len(numbers)} of at most 9: no progress since pass {found['best_pass']}" in first.err
    # The rows in the servers and those on disk are of that pass.
    assert first.json["log_loss"] == pytest.approx(found["best_loss"], abs=1e-7)
    predicted = paceline.succeed("predict", "model", validation, "-o", "out", "--json").json
    assert predicted["log_loss"] == pytest.approx(found["best_loss"], abs=1e-7)

    # Another run goes on, and has the best pass of the former one.
    shutil.rmtree(tmp_path / "model")
    again = paceline.succeed(*common, "--epochs", "9", "--patience", "2", "--resume", tmp_path / "model-snapshots")
    assert again.json["validation"]["best_loss"] <= found["best_loss"]
    predicted = paceline.succeed("predict", "model", validation, "-o", "out", "--json").json
    assert predicted["log_loss"] == pytest.approx(again.json["validation"]["best_loss"], abs=1e-7)
