"""Options that name columns or a header are applied, or rejected with a message."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.data import Columns, Sample, open_dataset
from paceline.data.dialect import guess_dialect
from paceline.data.formats.json_lines import find_json_columns
from paceline.data.guessing import ReadOptions
from paceline.errors import DataError, UsageError
from paceline.training.bad_data import BadData, describe_bad_lines
from paceline.training.files.data_files import sample_data
from paceline.training.snapshots import Resumption

ROWS = "1,Rome,20,3.5\n0,Oslo,30,2.5\n" * 40
OBJECTS = [{"click": k % 2, "user": k, "age": 20 + k} for k in range(80)]


def sample_of(path: Path, text: str, weight: str | None = None, **options: Any) -> Sample:
    path.write_text(text)
    return sample_data([path], numeric_scale="none", weight=weight, reading=ReadOptions(**options))


@pytest.mark.parametrize("kind", ["categorical", "ignore", "weight"])
def test_any_given_name_implies_a_header(tmp_path: Path, kind: str) -> None:
    text = "click,city,size,3\n" + "click,city,1,3\n0,Oslo,2,2\n" * 40  # most words of the first row also occur below
    given: dict[str, Any] = {"weight": "size"} if kind == "weight" else {kind: ("size",)}
    found = sample_of(tmp_path / "x.csv", text, label="0", **given)
    assert (found.columns is not None, found.header_note) == (True, None)
    assert found.columns.label == "click"  # type: ignore[union-attr]


def test_names_such_as_c1_are_names_if_the_header_has_them(tmp_path: Path) -> None:
    dialect = guess_dialect("c3,c1,c2\n1,0,5\n0,1,6\n", ["c1"], "yes")
    assert dialect is not None
    assert dialect.names == ("c3", "c1", "c2")
    found = sample_of(tmp_path / "x.csv", "c3,c1,c2\n" + "7,1,5.5\n8,0,6.5\n" * 40, label="c1", header="yes")
    assert ({*found.labels}, found.header_note) == ({0.0, 1.0}, None)
    assert sample_of(tmp_path / "x.csv", ROWS, label="c1").header_note is not None


def test_parquet_has_no_option_for_a_header(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--header no: .*x\.parquet is parquet, which has no header"):
        sample_data([tmp_path / "x.parquet"], "parquet", reading=ReadOptions(label="a", header="no"))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"categorical": ("typo",)}, "has no field 'typo'"),
        ({"numeric": ("typo",)}, "has no field 'typo'"),
        ({"categorical": ("age",), "numeric": ("age",)}, "--numeric age: --categorical names this column too"),
        ({"numeric": ("click",)}, "--numeric click: this column is the label"),
    ],
)
def test_options_that_name_fields_of_json_are_checked(options: dict[str, Any], problem: str) -> None:
    assert find_json_columns("x", OBJECTS, ReadOptions(categorical=("age",))).categorical == ("user", "age")
    with pytest.raises(UsageError, match=problem):
        find_json_columns("x", OBJECTS, ReadOptions(**options))


@pytest.mark.parametrize(
    ("options", "fits"),
    [
        ({"label": "1", "ignore": ("3",)}, True),
        ({"label": "-3", "categorical": ("0",)}, True),
        ({"categorical": ("city",), "numeric": ("age",), "ignore": ("*",)}, True),
        ({"label": "0"}, False),
        ({"header": "no"}, False),
        ({"numeric": ("size",)}, False),
        ({"ignore": ("age",)}, False),
        ({"categorical": ("city",), "ignore": ("*",)}, False),
    ],
)
def test_options_for_converted_data_are_compared_with_its_columns(options: dict[str, Any], fits: bool) -> None:
    columns, names = Columns("click", ("city",), ("age",)), ["city", "click", "age", "size"]
    assert ReadOptions(**options).fit("x", columns, names) == fits
    with pytest.raises(UsageError, match="--text typo: "):
        ReadOptions(**options | {"text": ("typo",)}).fit("x", columns, names)


def test_positions_refer_to_the_file_and_not_to_the_columns_of_a_model() -> None:
    columns, names = Columns("click", ("city",)), ["id", "city", "click"]
    assert ReadOptions(label="2", ignore=("id",)).fit("x", columns, names)
    assert not ReadOptions(label="1").fit("x", columns, names)


@pytest.mark.parametrize("change", [{"text": ("b", "a")}, {"header": "yes"}, {"trims": False}])
def test_a_training_can_only_be_resumed_with_the_same_columns(tmp_path: Path, change: dict[str, Any]) -> None:
    (tmp_path / "x.csv").write_text("y,a,b\n" + "1,so it is,no\n0,it was,yes\n" * 20)
    columns = Columns("y", text=("a", "b"))
    with open_dataset(tmp_path / "x.csv", columns=columns) as before:
        resumption = object.__new__(Resumption)
        size = (tmp_path / "x.csv").stat().st_size
        vars(resumption).update(snapshot="s", training={"dataset": before.spec(), "files": [["x.csv", size]]})
        resumption.check_data(before)
    with (
        open_dataset(tmp_path / "x.csv", columns=replace(columns, **change)) as now,
        pytest.raises(DataError, match=f"read the data with {next(iter(change))} "),
    ):
        resumption.check_data(now)


def described(*reasons: str) -> BadData:
    lines = [["x", None, row, "text of: it has no label: '", reason] for row, reason in enumerate(reasons)]
    return describe_bad_lines([([(0, 0, 90)], lines)])


def test_unlabelled_lines_of_vowpal_wabbit_are_not_malformed() -> None:
    missing, other = "it has no label", "it has no |"
    described(missing, missing).check(10, 0.05, "vw")
    for lines, format in ((described(missing, missing), "jsonl"), (described(missing, other), "vw")):
        with pytest.raises(DataError, match=r"90 of the 100 rows read \(90.0%\) are malformed"):
            lines.check(10, 0.05, format)
    assert described(missing).sentence().startswith("90 unlabelled lines were")
    assert described(missing, other).sentence().startswith("90 malformed lines were")
