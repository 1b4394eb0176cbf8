"""Trainings on malformed data, and on data without information about the label."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from paceline.data.guessing import ReadOptions
from paceline.errors import DataError
from paceline.models.registry import make_model
from paceline.training.driver import train_locally
from paceline.training.files.data_files import resolve_files
from paceline.training.options import TrainOptions
from paceline.training.planning import plan_training

pytestmark = pytest.mark.usefixtures("warm_clusters")


def write(path: Path, num_good: int, num_bad: int, bad: str = "no row\n") -> Path:
    rows = ["click,age\n", *(f"{i % 2},{i / 8}\n" for i in range(num_good))]
    step = max(num_good // max(num_bad, 1), 1)
    for number in range(num_bad):
        rows.insert(2 + number * (step + 1), bad)
    path.write_text("".join(rows))
    return path


def test_a_training_fails_if_too_many_rows_are_malformed(tmp_path: Path) -> None:
    options = TrainOptions(data=[write(tmp_path / "x.csv", 188, 12)], epochs=1, save=tmp_path / "model")
    expected = (
        r"12 of the 200 rows read \(6.0%\) are malformed, more than --max-malformed 0.05 allows. The first is .* 3: "
    )
    with pytest.raises(DataError, match=expected):
        plan_training(resolve_files(options)[0])
    lenient = ReadOptions(max_malformed=0.06)
    resolved, _ = resolve_files(TrainOptions(data=options.data, epochs=1, reading=lenient))
    assert plan_training(resolved).num_examples == 188
    few = TrainOptions(data=[write(tmp_path / "few.csv", 20, 10)], epochs=1)
    assert plan_training(resolve_files(few)[0]).num_examples == 20


def test_all_rows_are_checked_after_a_training_without_a_sample(tmp_path: Path) -> None:
    options = TrainOptions(data=[write(tmp_path / "x.csv", 100, 20)], epochs=2, adapt="no")
    with pytest.raises(DataError, match=r"20 of the 120 rows read \(16.7%\) are malformed"):
        train_locally(options)


def test_lines_without_a_label_are_skipped_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "x.vw"
    path.write_text("".join(f"{'' if row % 3 else row % 2} | a{row % 2} b\n" for row in range(300)))
    warnings: list[str] = []
    result = train_locally(TrainOptions(data=[path], epochs=1), warn=warnings.append)
    assert result.examples == 100
    assert any(text.startswith("200 unlabelled lines") for text in warnings)


@pytest.mark.parametrize("is_learnable", [True, False])
def test_a_useless_model_of_several_classes_is_reported(tmp_path: Path, is_learnable: bool) -> None:
    rng = random.Random(4)
    classes = [rng.choice("abc") for _ in range(600)]
    sites = classes if is_learnable else [rng.choice("abc") for _ in classes]
    (tmp_path / "x.csv").write_text("label,site\n" + "".join(map("{},{}\n".format, classes, sites)))
    for evaluation in ([], [tmp_path / "x.csv"]):
        warnings: list[str] = []
        options = TrainOptions(data=[tmp_path / "x.csv"], model=make_model("softmax"), epochs=1, evaluation=evaluation)
        found = train_locally(options, warn=warnings.append)
        is_warned = any("better than" in text for text in warnings)
        assert is_warned == (not is_learnable), (warnings, found.train_loss)
