"""``paceline train --init-from`` and ``--feature-names``: the initial model, and the files of a model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import paceline as package
from paceline.inference.inspection import compare_models
from paceline.protocol import Sequential
from paceline.training.driver import train_locally
from paceline.training.options import PassOptions, TrainOptions

from .running import Commands

pytestmark = pytest.mark.usefixtures("warm_clusters")

CSV = "label,site,age,size\n" + "1,news,31,2\n0,shop,20,3\n1,news,17,5\n0,42,2,8\n" * 25


def test_one_pass_and_a_further_pass_equal_two_passes(click_log: tuple[Path, Path], tmp_path: Path) -> None:
    def train(epochs: int, save: str, init_from: Path | None = None, servers: int = 1) -> None:
        options = TrainOptions(
            data=[click_log[0]], epochs=epochs, save=tmp_path / save, init_from=init_from, adapt="no",
            passes=PassOptions(order="file"),
        )  # fmt: skip
        train_locally(options, servers=servers, workers=1, consistency=Sequential())

    train(2, "at-once")
    train(1, "first")
    train(1, "second", tmp_path / "first", servers=2)
    (table,) = compare_models(tmp_path / "at-once", tmp_path / "second").tables
    assert table.changed == 0
    (table,) = compare_models(tmp_path / "at-once", tmp_path / "first").tables
    assert table.changed > 1000
    weights = package.load(tmp_path / "second").weights()
    assert table.l2_norms[0] == float(np.sqrt((weights.values.astype(np.float64) ** 2).sum()))


def test_names_of_features_are_kept(paceline: Commands, click_log: tuple[Path, Path], tmp_path: Path) -> None:
    common: list[str | Path] = ["train", click_log[0], "-q", "--workers", "1", "--epochs", "1", "--feature-names"]
    paceline.succeed(*common, "--save", "model")
    (table,) = paceline.succeed("inspect", "model", "--json").json["tables"]
    assert all(weight["name"][0] in "IC" and "=" in weight["name"] for weight in table["largest_weights"])
    assert len((tmp_path / "model" / "feature-names.tsv").read_text().splitlines()) == table["nonzero"]
    assert "--feature-names saves names with the model" in paceline.run(*common).err


def test_columns_come_from_the_model_and_mismatches_are_rejected(
    paceline: Commands, click_log: tuple[Path, Path], tmp_path: Path
) -> None:
    data = tmp_path / "data.csv"
    data.write_text(CSV)
    common: list[str | Path] = ["train", data, "-q", "--workers", "1", "--epochs", "1"]
    paceline.succeed(*common, "--label", "label", "--categorical", "site,size", "--numeric", "age", "--save", "model")
    more = tmp_path / "more.csv"  # numbers on another scale; the model keeps its scales
    more.write_text(CSV.replace(",31,", ",310,"))
    same = ("--label", "label", "--categorical", "site,size", "--numeric", "age")
    paceline.succeed("train", more, *common[2:], *same, "--init-from", "model", "--save", "further")
    columns = package.load(tmp_path / "further").columns
    assert columns is not None
    assert (columns.categorical, columns.numeric) == (("site", "size"), ("age",))

    def fail(*arguments: str | Path) -> str:
        finished = paceline.run(*arguments)
        assert finished.status != 0
        assert finished.err.count("\n") == 1, finished.err
        return finished.err

    column_options = ["--label", "label", "--categorical", "site", "--ignore", "size"]
    assert "was trained with other columns" in fail(*common, "--init-from", "model", *column_options)
    criteo = ("train", click_log[0], "-q", "--workers", "1", "--init-from", "model")
    assert "was trained on csv and has no features of criteo" in fail(*criteo)
    assert "same --update" in fail(*common, "--init-from", "model", "--update", "sgd")
    assert "with --model lr" in fail(*common, "--init-from", "model", "--model", "softmax")
    assert "does not exist" in fail(*common, "--init-from", "nothing")
    assert "--init-from starts one" in fail(*common, "--init-from", "model", "--resume", "snaps")
