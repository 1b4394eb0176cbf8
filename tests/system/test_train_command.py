"""``paceline train`` and ``paceline predict``: every format and consistency, saving, caching, JSON."""

from __future__ import annotations

import gzip
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest

from paceline.models.metrics import auc
from paceline.models.prediction import Predictor
from paceline.ps import read_model

from .running import Commands

KEYS = {
    "auc", "log_loss", "calibration", "accuracy", "eval_examples", "train_log_loss", "examples", "seconds",
    "examples_per_s", "num_features", "staleness", "bad_lines", "lost_workers", "bytes", "settings", "progressive",
    "validation", "block_passes",
}  # fmt: skip


def labels_of(path: Path) -> list[int]:
    return [int(line[:1]) for line in path.read_text().splitlines()]


def as_table(path: Path) -> Any:
    """Return a click log as an Arrow table: the label, the categories, and a column of small numbers."""
    rows = [line.split("\t") for line in path.read_text().splitlines()]
    columns: dict[str, Any] = {"label": [int(row[0]) for row in rows]}
    for at in range(14, 40):
        columns[f"c{at}"] = [row[at] or None for row in rows]
    columns["size"] = [float(row[6]) / 1e6 if row[6] else None for row in rows]
    return pa.table(columns)


def as_libsvm(path: Path) -> str:
    lines = []
    for line in path.read_text().splitlines():
        fields = line.split("\t")
        pairs = [f"{1 + 100_000 * at + int(fields[at] or '0', 16) % 100_000}:1" for at in range(14, 40)]
        lines.append(f"{fields[0]} {' '.join(pairs)}\n")
    return "".join(lines)


def write_as(format: str, source: Path, folder: Path) -> list[Path]:
    """Write a click log in another format, as two files; one is compressed if the format allows this."""
    if format == "criteo":
        lines = source.read_bytes().splitlines(keepends=True)
        half = len(lines) // 2
        paths = [folder / f"{source.stem}1.tsv", folder / f"{source.stem}2.tsv.gz"]
        paths[0].write_bytes(b"".join(lines[:half]))
        paths[1].write_bytes(gzip.compress(b"".join(lines[half:])))
        return paths
    path = folder / f"{source.stem}.{format}"
    if format == "libsvm":
        path.write_text(as_libsvm(source))
    elif format == "csv":
        pyarrow.csv.write_csv(as_table(source), path)
    else:
        pyarrow.parquet.write_table(as_table(source), path, row_group_size=2000)
    return [path]


@pytest.mark.parametrize(
    ("format", "how", "least_auc"),
    [
        ("criteo", ["--consistency", "sequential", "--servers", "2", "--workers", "2"], 0.65),
        pytest.param(
            *("libsvm", ["--consistency", "bounded:2", "--stale", "drop:8", "--workers", "2"], 0.6),
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            *("csv", ["--consistency", "eventual", "--servers", "2", "--stale", "compensate:0.04"], 0.6),
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            *("parquet", ["--consistency", "bounded:4", "--update", "adagrad"], 0.6), marks=pytest.mark.thorough
        ),
    ],
)
def test_train_save_predict(
    paceline: Commands,
    click_log: tuple[Path, Path],
    tmp_path: Path,
    format: str,
    how: list[str],
    least_auc: float,
) -> None:
    data, evaluation = (write_as(format, path, tmp_path) for path in click_log)
    evaluating = [argument for path in evaluation for argument in ("--eval", str(path))]
    trained = paceline.succeed(
        "train", *data, *evaluating, *how, "--epochs", "2", "--save", "model", "--json", "--progressive"
    )
    result = trained.json
    assert set(result) == KEYS
    assert result["examples"] == 24_000
    assert result["eval_examples"] == 4_000
    assert least_auc < result["auc"] < 0.8
    assert 0.4 < result["log_loss"] < 0.6
    assert result["examples_per_s"] == pytest.approx(result["examples"] / result["seconds"])
    assert result["lost_workers"] == result["bad_lines"] == 0
    assert set(result["staleness"]) == {"mean", "max", "histogram", "dropped"}
    assert sum(result["staleness"]["histogram"]) > 0
    assert "examples/s" not in trained.err  # standard error is no terminal
    assert result["progressive"][-1]["examples"] == 12_000  # the examples of the first pass
    assert 0.4 < result["progressive"][-1]["loss"] < 0.6
    lines = trained.err.splitlines()
    heading = next(i for i, line in enumerate(lines) if line.split()[:3] == ["loss", "since", "last"])
    assert len(lines[heading + 1].split()) == 6

    predicted = paceline.succeed("predict", "model", *evaluation, "-o", "probabilities", "--json").json
    assert predicted["auc"] == pytest.approx(result["auc"], abs=1e-9)
    assert predicted["log_loss"] == pytest.approx(result["log_loss"], abs=1e-7)
    assert predicted["examples"] == 4_000
    probabilities = [float(line) for line in (tmp_path / "probabilities").read_text().splitlines()]
    assert auc(labels_of(click_log[1]), probabilities) == pytest.approx(result["auc"], abs=1e-9)
    assert os.listdir(tmp_path).count("model") == 1
    assert [name for name in os.listdir(tmp_path) if name.startswith(".")] == []


def test_predictions_on_standard_output(paceline: Commands, click_log: tuple[Path, Path], tmp_path: Path) -> None:
    """The output has one probability per line, in the order of the rows."""
    train, evaluation = click_log
    paceline.succeed("train", train, "--epochs", "1", "--workers", "1", "--save", "model", "-q")
    finished = paceline.succeed("predict", "model", evaluation)
    assert len(finished.out.splitlines()) == 4_000
    assert "4,000 predictions" in finished.err
    one = tmp_path / "one.tsv"
    one.write_text(evaluation.read_text().splitlines(keepends=True)[1234])
    alone = paceline.succeed("predict", "model", one, "--json")  # one example has no AUC, and the JSON has no NaN
    assert alone.json["auc"] is None
    assert paceline.succeed("predict", "model", one).out == finished.out.splitlines(keepends=True)[1234]
    assert Predictor(tmp_path / "model").format == "criteo"
    paceline.succeed("convert", one, "damaged", "-q")
    data = bytearray((tmp_path / "damaged").read_bytes())
    data[100] ^= 4  # this byte is in the only block of rows
    (tmp_path / "damaged").write_bytes(data)
    (tmp_path / "scores").write_text("kept\n")
    refused = paceline.run("predict", "model", "damaged", "--output", "scores")
    assert (refused.status, (tmp_path / "scores").read_text()) == (1, "kept\n")
    assert "no line that can be predicted" in refused.err


def test_a_second_run_reads_the_cache(paceline: Commands, click_log: tuple[Path, Path], tmp_path: Path) -> None:
    train, evaluation = click_log
    arguments: list[str | Path] = [
        "train",
        train,
        "--eval",
        evaluation,
        "--epochs",
        "1",
        "--cache",
        "cache",
        "--json",
        "-q",
    ]
    first = paceline.succeed(*arguments, "--save", "model").json
    cached = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()}
    assert sum(path.stat().st_size for path in cached) > 12_000 * 39 * 8
    second = paceline.succeed(*arguments, "--save", "model").json
    files = sorted(os.listdir(tmp_path / "model"))  # the next model replaces the file completely
    assert files == ["manifest.json", *sorted(read_model(tmp_path / "model").manifest.files)]
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()} == cached
    assert second["examples"] == first["examples"] == 12_000
    assert second["auc"] == pytest.approx(first["auc"], abs=0.01)


def weights_of(model: Path) -> tuple[bytes, bytes]:
    """Return the sorted keys and their rows."""
    found = read_model(model)
    parts = list(found.records(found.table("lr")))
    keys, records = (np.concatenate([part[i] for part in parts]) for i in range(2))
    order = np.argsort(keys)
    return keys[order].tobytes(), records[order].tobytes()


def test_two_trainings_run_concurrently(paceline: Commands, click_log: tuple[Path, Path], tmp_path: Path) -> None:
    """Two sequential trainings run concurrently and give equal results."""
    arguments: list[str | Path] = [
        "train", click_log[0], "--eval", click_log[1], "--epochs", "2",
        "--consistency", "sequential", "--servers", "2", "--workers", "2",
    ]  # fmt: skip
    runs = [paceline.start(*arguments, "--save", f"model{i}", "--cache", "cache", "--json", "-q") for i in range(2)]
    results = [run.wait() for run in runs]
    assert [result.status for result in results] == [0, 0]
    assert results[0].json["auc"] == results[1].json["auc"]
    assert weights_of(tmp_path / "model0") == weights_of(tmp_path / "model1")


def test_a_model_predicts_only_data_of_the_trained_format(paceline: Commands, tmp_path: Path) -> None:
    """A model stores the format and the columns, also guessed columns.

    Other data is rejected or reported.
    """
    rows = [(i % 4 == 0, "ab"[i % 4 == 0], i % 7) for i in range(4000)]
    (tmp_path / "train.csv").write_text("click,site,size\n" + "".join(f"{int(y)},{s},{n}\n" for y, s, n in rows))
    (tmp_path / "swapped.csv").write_text("size;site;click\n" + "".join(f"{n};{s};{int(y)}\n" for y, s, n in rows))
    table = {"site": [s for _, s, _ in rows], "size": [n for _, _, n in rows], "click": [y for y, _, _ in rows]}
    pyarrow.parquet.write_table(pa.table(table), tmp_path / "train.parquet")
    paceline.succeed("train", "train.csv", "-q", "--workers", "1", "--epochs", "1", "--save", "model")
    right = paceline.succeed("predict", "model", "train.csv")
    for same in ("swapped.csv", "train.parquet"):
        assert paceline.succeed("predict", "model", same).out == right.out

    (tmp_path / "other.csv").write_text("click,place\n1,a\n0,b\n")
    (tmp_path / "other.svm").write_text("1 3:1\n0 4:1\n" * 9)
    for other, message in (
        ("other.csv", "has no column 'site': its columns are click, place; the model in model needs site, size"),
        ("other.svm", "looks like libsvm, but the model in model was trained on csv, which has other features"),
    ):
        refused = paceline.run("predict", "model", other)
        assert (refused.status, refused.out) == (1, "")
        assert message in refused.err
        assert refused.err.count("\n") == 1

    (tmp_path / "new.csv").write_text("click,site,size\n" + "0,unheard,\n" * 9)
    unknown = paceline.succeed("predict", "model", "new.csv").err
    assert "no feature of this data occurs in the model" in unknown
    assert "no AUC (all labels are negative)" in unknown


def test_a_training_without_progress_reports_it(paceline: Commands, tmp_path: Path) -> None:
    lines = "".join(f"{i * 7919 % 101 % 2},{i}\n" for i in range(3000))
    (tmp_path / "noise.csv").write_text("click,id\n" + lines)
    how = ["--label", "click", "--categorical", "id", "--workers", "1", "-q", "--epochs", "1", "--lr", "1"]
    trained = paceline.succeed("train", "noise.csv", *how)
    assert "the model may have learned nothing: the log loss, " in trained.err
    assert "is no better than 0.69" in trained.err


@pytest.mark.thorough
def test_kinds_of_columns_are_reported(paceline: Commands, tmp_path: Path) -> None:
    rows = [f"{10**19 + 7 * i},{i % 3 == 0:d},{'ab'[i % 3 == 0]},{i % 40}\n" for i in range(600)]
    (tmp_path / "x.csv").write_text("id,won,site,age\n" + "".join(rows))
    how = ["train", "x.csv", "--label", "won", "--workers", "1", "--epochs", "1"]
    words = [line.split() for line in paceline.succeed(*how).err.splitlines()]
    assert ["id", "left", "out", "(identifies", "rows:", "integers,", "all", "distinct)", "600"] in [
        line[:9] for line in words
    ]
    assert ["age", "numeric", "(integers;", "mean", "19.5,", "deviation", "11.54)", "40", "0,", "1,", "2"] in words
    quiet = paceline.succeed(*how, "-q", "--save", "model")
    assert "taken for" not in quiet.err
    words = [line.split() for line in paceline.succeed(*how, "--categorical", "age").err.splitlines()]
    assert ["age", "categorical", "(named)"] in [line[:3] for line in words]
    assert ["site", "categorical", "(text)"] in [line[:3] for line in words]
    found = paceline.succeed("describe", "x.csv", "--label", "1", "--json").json
    assert {column["name"]: column["kind"] for column in found["columns"]} == {
        "id": "left out",
        "won": "label",
        "site": "categorical",
        "age": "numeric",
    }
    assert found["labels"] == {"0": 400, "1": 200}
    assert found["first_row"]["label"] == 1
    first = [(feature["column"], feature["value"]) for feature in found["first_row"]["features"]]
    assert first == [("site", 1), ("age", pytest.approx(-19.5 / 11.54, rel=1e-3))]
    assert "the first row has label 1" in paceline.succeed("describe", "x.csv", "--label", "1").out
    assert paceline.succeed("predict", "model", "x.csv", "--json").json["auc"] > 0.9


def test_the_positive_label_can_be_chosen(paceline: Commands, tmp_path: Path) -> None:
    """Label 1 is positive, and label 2 is not. If the labels were swapped, the AUC would be near 0."""
    rows = [f"{1 + i % 2},{'ab'[i % 2]},{i % 7}\n" for i in range(600)]
    (tmp_path / "x.csv").write_text("label,site,age\n" + "".join(rows))
    described = paceline.succeed("describe", "x.csv", "--positive", "2", "--json").json
    assert (described["labels"], described["positive"], described["warning"]) == ({"1": 300, "2": 300}, 2, None)
    assert described["first_row"]["label"] == 0
    how = ["--positive", "1", "--workers", "1", "--epochs", "1", "-q", "--json", "--save", "model"]
    trained = paceline.succeed("train", "x.csv", "--eval", "x.csv", *how).json
    assert trained["auc"] == 1
    paceline.succeed("convert", "x.csv", "x.paceline", "-q")
    for data in ("x.csv", "x.paceline"):
        found = paceline.succeed("predict", "model", data, "--json", "--output", "p.txt").json
        assert found["auc"] == 1
        first, second = (float(line) for line in (tmp_path / "p.txt").read_text().splitlines()[:2])
        assert first > 0.5 > second


def test_word_labels(paceline: Commands, tmp_path: Path) -> None:
    """`won` is positive because it follows `lost`, unless --positive changes this; the model stores the choice."""
    rows = [f'"{("won", "lost")[i % 2]}",{"ab"[i % 2]},{i % 7}\n' for i in range(600)]
    (tmp_path / "x.csv").write_text("result,site,age\n" + "".join(rows))
    common = ["train", "x.csv", "--label", "result", "--workers", "1", "--epochs", "1"]
    trained = paceline.succeed(*common, "--save", "won", "--eval", "x.csv")
    assert "lost is 0, and won is 1, the positive label (--positive 'lost' swaps them)" in trained.err
    trained = paceline.succeed(*common, "--save", "lost", "--positive", "lost")
    assert "won is 0, and lost is 1, the positive label" in trained.err
    for model, is_first in (("won", True), ("lost", False)):
        found = paceline.succeed("predict", model, "x.csv", "--json", "--output", "p.txt").json
        assert found["auc"] == 1
        first, second = (float(line) for line in (tmp_path / "p.txt").read_text().splitlines()[:2])
        assert (first > second) == is_first
    paceline.succeed(*common, "--init-from", "won", "--positive", "won", "-q")
    paceline.succeed(*common, "--init-from", "lost", "--positive", "lost", "-q")
    refused = paceline.run(*common, "--init-from", "won", "--positive", "lost", "-q")
    assert re.search(r"positive\WNone, not .*positive\W0\.0", refused.err)
    refused = paceline.run(*common, "--model", "regression", "-q")
    assert "labels are words, such as lost, but --model regression learns numbers" in refused.err


def test_describe_other_formats(paceline: Commands, click_log: tuple[Path, Path], tmp_path: Path) -> None:
    assert "format   criteo" in paceline.succeed("describe", click_log[0]).out
    (tmp_path / "x.svm").write_text("1 3:1 8:0.5\n2 4:1\n3 3:1\n")
    output = paceline.succeed("describe", "x.svm").out
    assert "labels are 1, 2 and 3, expected two" in output
    assert "8    0.5" in output


@pytest.mark.thorough
def test_columns_of_any_scale_are_learned(paceline: Commands, tmp_path: Path) -> None:
    """The rows are sorted, and columns have millions or millionths. One worker and two workers give the same model."""
    random = np.random.default_rng(5)
    large, small = random.normal(3e6, 1e6, 3000), random.normal(0, 1e-6, 3000)
    won = (large - 3e6) / 1e6 + small / 1e-6 + random.normal(0, 0.3, 3000) > 0
    order = np.argsort(won, kind="stable")
    lines = [f"{won[i]:d},{large[i]:.6g},{small[i]:.6g}\n" for i in order]
    (tmp_path / "x.csv").write_text("won,large,small\n" + "".join(lines))
    scales = []
    for workers in (1, 2):
        model = f"model{workers}"
        how = ["--label", "won", "--workers", workers, "--consistency", "sequential", "--save", model, "-q"]
        how += ["--epochs", "8"]
        paceline.succeed("train", "x.csv", *map(str, how))
        scales.append(Predictor(tmp_path / model).columns)
        assert paceline.succeed("predict", model, "x.csv", "--json").json["auc"] > 0.95
    assert scales[0] == scales[1]
    assert scales[0] is not None
    assert [scale.mean for scale in scales[0].scales] == pytest.approx([large.mean(), small.mean()], rel=1e-4, abs=1e-9)


@pytest.mark.thorough
def test_training_with_filters(paceline: Commands, click_log: tuple[Path, Path], tmp_path: Path) -> None:
    """Exact filters do not change the model, other filters change it little, and unknown filters are rejected."""
    arguments: list[str | Path] = [
        "train", click_log[0], "--eval", click_log[1], "--epochs", "2", "--consistency", "sequential", "--servers", "2",
        "--workers", "1", "--order", "file", "--json", "-q",
    ]  # fmt: skip
    chains = {"plain": "", "exact": "key-caching,compress", "lossy": "key-caching,quantize:8,compress"}
    found = {name: paceline.succeed(*arguments, "--filters", chains[name], "--save", name).json for name in chains}
    assert found["exact"]["auc"] == found["plain"]["auc"]
    assert weights_of(tmp_path / "exact") == weights_of(tmp_path / "plain")
    assert found["exact"]["bytes"] < 0.5 * found["plain"]["bytes"]
    assert found["lossy"]["bytes"] < 0.25 * found["plain"]["bytes"]
    assert found["lossy"]["auc"] == pytest.approx(found["plain"]["auc"], abs=0.003)
    for option in ("--filters", "--pull-filters"):
        refused = paceline.run(*arguments, option, "quantize:3")
        assert (refused.status, refused.out, refused.err.count("\n")) == (2, "", 1)
        assert "Quantize(bits=3): expected 8, 4, 2 or 1" in refused.err


@pytest.mark.thorough
def test_converted_data_gives_the_same_results(
    paceline: Commands, click_log: tuple[Path, Path], tmp_path: Path
) -> None:
    (data,), (evaluation,) = (write_as("csv", path, tmp_path) for path in click_log)
    converted = paceline.succeed("convert", data, "train.paceline", "--json")
    assert converted.json["examples"] == 12_000
    assert "columns, by" in converted.err
    paceline.succeed("convert", evaluation, "eval.paceline", "-q")
    how = ("--epochs", "1", "--consistency", "sequential", "--workers", "1", "--json", "-q")
    results = [
        paceline.succeed("train", path, "--eval", other, *how, "--save", path.stem).json
        for path, other in ((data, evaluation), (tmp_path / "train.paceline", evaluation))
    ]
    assert results[0]["auc"] == pytest.approx(results[1]["auc"], abs=0.002)
    predicted = [paceline.succeed("predict", "train", path).out for path in (evaluation, tmp_path / "eval.paceline")]
    assert predicted[0] == predicted[1]
    refused = paceline.run("convert", evaluation, data)
    assert (refused.status, "'paceline convert' did not write it" in refused.err) == (2, True)
