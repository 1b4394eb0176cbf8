"""``paceline train --validation`` saves the model of the best pass, also over two runs. ``--schedule``: rates fall."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest

from paceline.ps import read_model

from .running import Commands

OVERFITTING: list[str | Path] = ["--update", "adagrad", "--lr", "0.2", "--batch-size", "64", "--schedule", "step:3:0.8"]


def test_the_best_pass_is_saved(paceline: Commands, click_log: tuple[Path, Path], tmp_path: Path) -> None:
    train, validation = click_log
    common: list[str | Path] = ["train", train, "--validation", validation, "--eval", validation, "--save", "model"]
    common += [*OVERFITTING, "--servers", "2", "--workers", "2", "--consistency", "sequential", "--json"]
    first = paceline.succeed(*common, "--epochs", "9", "--patience", "1", "--snapshot-every", "6000")
    found = first.json["validation"]
    numbers = [entry["pass"] for entry in found["passes"]]
    losses = [entry["log_loss"] for entry in found["passes"]]
    assert numbers == list(range(1, len(numbers) + 1))
    assert len(numbers) == found["best_pass"] + 1 < 9  # the training ends after one pass without progress
    assert losses.index(min(losses)) + 1 == found["best_pass"]
    assert first.json["examples"] == 12_000 * len(numbers)
    assert f"stopped after pass {len(numbers)} of at most 9: no progress since pass {found['best_pass']}" in first.err
    # The rows in the servers and on disk are the rows of the best pass.
    assert first.json["log_loss"] == pytest.approx(found["best_loss"], abs=5e-3)  # the offset is corrected at the end
    predicted = paceline.succeed("predict", "model", validation, "-o", "out", "--json").json
    assert predicted["log_loss"] == pytest.approx(first.json["log_loss"], abs=1e-7)

    # Another run continues, and knows the best pass of the earlier run.
    shutil.rmtree(tmp_path / "model")
    again = paceline.succeed(*common, "--epochs", "9", "--patience", "2", "--resume", tmp_path / "model-snapshots")
    assert again.json["validation"]["best_loss"] <= found["best_loss"]
    predicted = paceline.succeed("predict", "model", validation, "-o", "out", "--json").json
    assert predicted["log_loss"] == pytest.approx(again.json["log_loss"], abs=1e-7)

    # After Ctrl-C, the saved model is the best pass's model. The best pass of another training is ignored.
    shutil.rmtree(tmp_path / "model")
    running = paceline.start(*common, "--epochs", "500", "--patience", "500", "--snapshot-every", "6000")
    running.wait_line("pass 2: on the validation file")
    running.signal(signal.SIGINT)
    stopped = running.wait()
    line = next(line for line in stopped.err.splitlines() if "the best so far, is saved in model" in line)
    assert stopped.status == 130
    number = int(line.split("the model of pass ")[1].split(",")[0])
    [pass_line] = [line for line in stopped.err.splitlines() if f" pass {number}: on the validation file" in line]
    predicted = paceline.succeed("predict", "model", validation, "-o", "out", "--json").json
    assert f"log loss {predicted['log_loss']:.4f}" in pass_line


@pytest.mark.thorough
def test_rates_fall_from_pass_to_pass(paceline: Commands, click_log: tuple[Path, Path], tmp_path: Path) -> None:
    """A thousandth of the rate changes the model very little. The saved model has the full rate again."""
    train, validation = click_log
    common: list[str | Path] = ["train", train, "--validation", validation, "--epochs", "3", "--update", "sgd"]
    common += ["--lr", "0.002", "--workers", "1", "--consistency", "sequential", "--save", "model", "--json"]
    falling = paceline.succeed(*common, "--schedule", "exponential:0.001")
    losses = [entry["log_loss"] for entry in falling.json["validation"]["passes"]]
    assert losses[1] == pytest.approx(losses[0], abs=2e-4)
    assert losses[2] == pytest.approx(losses[1], abs=2e-4)
    constant = [entry["log_loss"] for entry in paceline.succeed(*common).json["validation"]["passes"]]
    assert constant[0] == pytest.approx(losses[0], abs=1e-9)
    assert abs(constant[1] - constant[0]) > 5e-4
    assert read_model(tmp_path / "model").table("lr").spec.update["lr"] == 0.002

    # The rate also rises within a pass, so one pass over a small file changes the model, but less than the full rate.
    (tmp_path / "small.csv").write_text("a,y\n" + "p,1\nq,0\n" * 300)
    common = ["train", "small.csv", "--epochs", "1", "--update", "adagrad", "--workers", "1", "--batch-size", "16"]
    unlearned, risen, whole = (
        paceline.succeed(*common, "--lr", lr, "--warmup", passes, "--json").json["train_log_loss"]
        for lr, passes in (("1e-9", "0"), ("0.02", "1"), ("0.02", "0"))
    )
    assert 0.1 < (unlearned - risen) / (unlearned - whole) < 0.9
