"""Early stopping: the best pass, the end of the training, and its output."""

from __future__ import annotations

import math
from pathlib import Path
from typing import cast

import pytest

from paceline.errors import UsageError
from paceline.models.metrics import ClickEvaluation
from paceline.ps import Client
from paceline.storage.model_directory import save_model
from paceline.training.early_stopping import BestPass, PassLosses
from paceline.training.options import EarlyStopping


def found(loss: float) -> ClickEvaluation:
    return ClickEvaluation(100, 0.75, loss, 1.0, 0.8, 30)


def passes(*losses: float, patience: int = 2, min_delta: float = 0.0) -> PassLosses:
    """Add losses until the training is over."""
    noted = PassLosses(EarlyStopping(validation=["v"], patience=patience, min_delta=min_delta))
    for number, loss in enumerate(losses, 1):
        noted.add(number, found(loss))
        if noted.is_over:
            break
    return noted


@pytest.mark.parametrize(
    ("losses", "settings", "best", "last"),
    [
        ((0.5, 0.4, 0.41, 0.42, 0.3), {}, 2, 4),
        ((0.5, 0.4, 0.41, 0.39, 0.4, 0.4), {}, 4, 6),
        ((0.5, 0.4, 0.41, 0.3), {"patience": 1}, 2, 3),
        ((0.5, 0.495, 0.49, 0.48), {"min_delta": 0.01}, 1, 3),
        ((0.5, 0.4), {}, 2, 2),
        ((math.nan, 0.5, math.nan, math.inf), {}, 2, 4),
        ((math.nan, math.nan, math.nan), {"patience": 1}, 3, 3),
    ],
)
def test_numbers_of_the_best_and_the_last_pass(
    losses: tuple[float, ...], settings: dict[str, float], best: int, last: int
) -> None:
    noted = passes(*losses, **settings)  # type: ignore[arg-type]
    assert (noted.best_pass, noted.last_pass) == (best, last)


def test_output_of_passes() -> None:
    noted = passes(0.5, 0.4, 0.45, 0.46)
    assert noted.line(found(0.46)).startswith("pass 4: on the validation file AUC 0.7500, log loss 0.4600")
    assert noted.line(found(0.46)).endswith("(2 after the best)")
    assert noted.summary(9).startswith("stopped after pass 4 of at most 9: no progress since pass 2. The model is")
    assert noted.summary(4).endswith("The model is from pass 2")
    report = noted.as_json()
    assert (report["best_pass"], report["best_loss"]) == (2, 0.4)
    assert [(entry["pass"], entry["log_loss"]) for entry in report["passes"]] == [
        (1, 0.5),
        (2, 0.4),
        (3, 0.45),
        (4, 0.46),
    ]
    assert "The model is" not in passes(0.5, 0.4).summary(2)


def test_passes_of_an_earlier_run_are_kept() -> None:
    noted = PassLosses(EarlyStopping(validation=["v"]))
    noted.continue_from(passes(0.5, 0.4).as_json())
    noted.add(3, found(0.3))
    assert [entry["pass"] for entry in noted.as_json()["passes"]] == [1, 2, 3]


def test_the_best_pass_of_an_earlier_run_stays_the_best() -> None:
    """Passes of the resumed run have the number of the best pass, or a lower number, but give another model."""
    noted = PassLosses(EarlyStopping(validation=["v"]))
    noted.best_pass, noted.best_loss = 2, 0.4
    for number in (1, 2):
        assert not noted.add(number, found(0.45))
        assert not noted.is_over
        assert noted.line(found(0.45)).endswith("(pass 2 of the earlier run was better)")
    assert noted.summary(2).endswith("The model is from pass 2")


def test_the_best_pass_of_another_training_is_ignored(tmp_path: Path) -> None:
    """A best pass with other validation files is ignored, and so is a directory without a model."""
    kept = {"best_pass": 3, "best_loss": 0.1, "origin": {"run": "a", "validation": [["v", 10]]}}
    save_model(tmp_path, [], kept)
    for origin, number in (
        (kept["origin"], 3),
        ({"run": "b", "validation": [["v", 10]]}, 0),
        ({"run": "a", "validation": [["w", 10]]}, 0),
    ):
        best = BestPass(cast(Client, None), tmp_path, PassLosses(EarlyStopping(validation=["v"])), [], origin)  # type: ignore[arg-type]
        best.find(tmp_path / "none")
        assert not best.is_kept
        best.find(tmp_path)
        assert (best.losses.best_pass, best.is_kept) == (number, number > 0)


@pytest.mark.parametrize("settings", [{"patience": 0}, {"min_delta": -0.1}, {"min_delta": math.nan}])
def test_wrong_settings(settings: dict[str, float]) -> None:
    with pytest.raises(
        UsageError, match=r"--patience 0: expected at least 1|--min-delta .*: expected a number of 0 or more"
    ):
        EarlyStopping(validation=["v"], **settings)  # type: ignore[arg-type]
