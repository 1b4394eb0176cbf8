"""The types of columns that no option names are guessed."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from paceline.data import Columns, TextTable, describe_named, guess_columns, open_dataset
from paceline.data.formats.csv_format import Csv
from paceline.data.guessing import ReadOptions, judge_column
from paceline.data.labels import CLICKS
from paceline.errors import UsageError
from paceline.training.files.data_files import sample_data
from paceline.training.files.describing import find_warnings

ROWS = 4000
RANDOM = random.Random(1)
NAMED = "integers, named as codes"
CODES = [RANDOM.randrange(300, 24_000) for _ in range(500)]


def judge(values: list[object], name: str = "x", type: str = "") -> tuple[str, str]:
    cells = [str(value) for value in values]
    return judge_column(name, cells, Counter(filter(None, cells)), type)


@pytest.mark.parametrize(
    ("name", "values", "kind", "reason"),
    [
        ("x", [RANDOM.randrange(10**19, 2**64) for _ in range(ROWS)], "left out", "identifies rows: integers"),
        ("x", list(range(500, 500 + ROWS)), "left out", "identifies rows: integers"),
        ("x", RANDOM.sample(range(10**7), ROWS), "left out", "identifies rows: integers"),
        ("user_id", RANDOM.sample(range(10**7), 100), "left out", "identifies rows: integers"),
        ("", RANDOM.sample(range(1300), 900), "left out", "identifies rows: integers"),
        ("Unnamed: 0", RANDOM.sample(range(1300), 900), "left out", "identifies rows: integers"),
        ("price_index", [1000 + int(RANDOM.gauss(0, 1) * 7) * 900 + i for i in range(900)], "numeric", "integers"),
        ("x", [f"user{i}" for i in range(ROWS)], "left out", "identifies rows: text"),
        ("x", ["", "NA", "null"] * 100, "left out", "has no value"),
        ("x", [RANDOM.choice("abc") for _ in range(ROWS)], "categorical", "text"),
        ("x", [RANDOM.choice([1, 2, "x"]) for _ in range(ROWS)], "categorical", "text"),
        ("x", [f"{RANDOM.randrange(10**5):05}" for _ in range(ROWS)], "categorical", "leading zeros"),
        ("x", [RANDOM.randrange(10**18, 10**18 + 900) for _ in range(ROWS)], "categorical", "19 digits"),
        ("user_id", [RANDOM.randrange(900) for _ in range(ROWS)], "categorical", "named as codes"),
        ("siteId", [RANDOM.randrange(900) for _ in range(ROWS)], "categorical", "named as codes"),
        ("hour", [RANDOM.randrange(24) for _ in range(ROWS)], "categorical", "few distinct"),
        ("hour", [RANDOM.randrange(24) for _ in range(ROWS)] + [""] * ROWS, "categorical", "few distinct"),
        ("x", [100_000 + RANDOM.randrange(180) for _ in range(ROWS)], "categorical", "large and close together"),
        ("x", [RANDOM.choice(CODES) for _ in range(ROWS)], "categorical", "repeat like codes"),
        ("x", [-1] * ROWS + [RANDOM.choice(CODES) for _ in range(ROWS)], "categorical", "repeat like codes"),
        ("age", [int(RANDOM.gauss(40, 15)) for _ in range(ROWS)], "numeric", "integers"),
        ("paid", [int(RANDOM.random() < 0.5) for _ in range(ROWS)], "numeric", "integers"),
        ("views", [int(RANDOM.paretovariate(0.7)) for _ in range(ROWS)], "numeric", "integers"),
        ("salary", [1000 * int(RANDOM.lognormvariate(4, 1)) for _ in range(ROWS)], "numeric", "integers"),
        ("people", [int(RANDOM.lognormvariate(10, 2)) for _ in range(ROWS)], "numeric", "integers"),
        ("identity", [int(RANDOM.gauss(40, 15)) for _ in range(ROWS)], "numeric", "integers"),
        ("x", [RANDOM.random() for _ in range(ROWS)], "numeric", "numbers"),
        ("x", [RANDOM.choice([1.5, "nan", "", 2]) for _ in range(ROWS)], "numeric", "numbers"),
        ("x", [3, 1, 2], "numeric", "integers"),
        ("x", ["c", "a", "b"], "categorical", "text"),
    ],
)
def test_kinds_of_columns(name: str, values: list[object], kind: str, reason: str) -> None:
    found, why = judge(values, name)
    assert (found, reason in why) == (kind, True), why


def test_integers_of_a_column_with_missing_values() -> None:
    """pandas writes 100153.0 for 100153 if another number is missing, and Parquet then has floats."""
    codes: list[object] = [str(100_000 + i * 7919 % 300) for i in range(6000)]
    for type in ("", "float"):
        with_missing: list[object] = [f"{code}.0" if i % 500 else "" for i, code in enumerate(codes)]
        assert judge(with_missing, "site_id", type) == judge(codes, "site_id") == ("categorical", NAMED)
    assert judge(["1.5", *with_missing], "site_id", "")[0] == "numeric"


def test_types_of_parquet_columns_are_used() -> None:
    assert judge([1, 2] * 200, type="text")[0] == "categorical"
    assert judge([1, 2] * 2000, type="float")[0] == "numeric"
    assert judge(["true", "false"] * 20, type="boolean")[0] == "categorical"
    assert judge(["[1, 2]"] * 20, type="nested") == ("left out", "holds structures")
    assert judge(["[1, 2]"] * 20, type="list") == ("categorical", "in lists")


def test_the_other_columns_are_guessed_if_only_the_label_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("id,won,site,age\n" + "".join(f"{10**19 + i},{i % 2},s{i % 9},{i * i % 97}\n" for i in range(600)))
    sample = Csv().sample_table([str(path)], ["won"])
    for label in ("won", "1", "-3"):
        found = guess_columns("x.csv", sample, ReadOptions(label=label))
        assert found.columns == Columns("won", ("site",), ("age",))
    assert found.num_rows == 600
    left_out, label_guess, site, _ = found.guesses
    assert (left_out.kind, left_out.num_distinct) == ("left out", 600)
    assert (label_guess.kind, label_guess.reason) == ("label", "")
    assert (site.kind, site.num_distinct, site.examples) == ("categorical", 9, ("s0", "s1", "s2"))
    for label in ("lost", "4", "-5"):
        with pytest.raises(UsageError, match=f"--label {label}: .*id, won, site, age"):
            guess_columns("x.csv", sample, ReadOptions(label=label))
    with pytest.raises(UsageError, match="no column named label"):
        guess_columns("x.csv", sample)


def test_data_without_a_column_to_learn_from_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("id,click\n" + "".join(f"u{i},{i % 2}\n" for i in range(600)))
    with pytest.raises(UsageError, match="no column to learn from: 'id' identifies rows: text, all distinct"):
        open_dataset(path)


def test_named_columns_are_described() -> None:
    sample = TextTable(("y", "a", "b"), ("", "", ""), [["1", "x", "2"], ["0", "", "3"]])
    found = describe_named(sample, Columns("y", numeric=("b",)))
    assert [(guess.name, guess.kind, guess.num_distinct) for guess in found.guesses] == [
        ("y", "label", 2),
        ("a", "left out", 1),
        ("b", "numeric", 2),
    ]


def test_a_number_as_the_label_is_a_position_and_implies_no_header(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("0.25,0,1\n" + "".join(f"{i / 7},{i % 2},{i % 3}\n" for i in range(200)))
    found_sample = sample_data([tmp_path / "x.csv"], reading=ReadOptions(label="1"))
    assert found_sample.columns is not None
    assert found_sample.columns.label == "c2"
    assert sum(found_sample.labels.values()) == 201


def test_copied_rows_do_not_hide_identifiers(tmp_path: Path) -> None:
    rows = [f"{i % 2},{10**9 + 7919 * i},{'ab'[i % 3 == 0]},{i % 37}\n" for i in range(500)]
    (tmp_path / "x.csv").write_text("bought,user_id,site,age\n" + "".join(rows + rows[:100]))
    found_sample = sample_data([tmp_path / "x.csv"], reading=ReadOptions(label="bought"))
    assert found_sample.columns is not None
    assert "user_id" not in found_sample.columns.names
    (tmp_path / "few.csv").write_text("y,c,d\n" + "".join(f"{i % 2},{i % 5},{i % 3}\n" for i in range(300)))
    few = sample_data([tmp_path / "few.csv"], reading=ReadOptions(label="y"))
    assert few.columns is not None
    assert few.columns.names == ["y", "c", "d"]


def write_column(path: Path, cells: list[str]) -> Path:
    """Write a column `x` of cells, and labels of both classes."""
    path.write_text("x,y\n" + "".join(f"{cell},{row % 2}\n" for row, cell in enumerate(cells)))
    return path


@pytest.mark.parametrize("missing", ["?", ".", "N/A"])
def test_numbers_with_a_mark_for_missing_values_are_numbers(tmp_path: Path, missing: str) -> None:
    """Files with the marks of the UCI repository and of SAS are read."""
    path = write_column(tmp_path / "x.csv", [missing if row % 5 == 0 else f"{row / 8}" for row in range(100)])
    columns = sample_data([path], reading=ReadOptions(label="y")).columns
    assert columns is not None
    assert columns.numeric == ("x",)
    with open_dataset([path], "csv", columns) as dataset:
        (batch,) = dataset.read(0, 0, 100)
    assert batch.indptr.tolist()[:7] == [0, 0, 1, 2, 3, 4, 4]


def test_a_column_with_infinite_numbers_is_numeric() -> None:
    assert judge([*(f"{row / 8}" for row in range(100)), "inf", "-Infinity"]) == ("numeric", "numbers")


def test_a_single_word_among_numbers_is_named() -> None:
    assert judge(["unknown", "unknown", *range(100)]) == ("categorical", "text: numbers, but for 'unknown'")


@pytest.mark.parametrize("cell", ["$12", "3.5%", "1,200 €"])
def test_currency_and_percent_signs_are_rejected(tmp_path: Path, cell: str) -> None:
    path = write_column(tmp_path / "x.csv", [f'"{cell}"'] * 60)
    with pytest.raises(UsageError, match="currency or percent signs"):
        sample_data([path], reading=ReadOptions(label="y"))


def test_blanks_around_names_do_not_hide_the_label(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("x, y\n" + "".join(f"{row / 8}, {row % 2}\n" for row in range(60)))
    columns = sample_data([path], reading=ReadOptions(label="y")).columns
    assert columns is not None
    assert (columns.label, columns.numeric) == ("y", ("x",))


def test_equal_labels_and_text_other_than_utf8_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    rows = "".join(f"{'rougé' if row % 2 else 'bleu'},{row / 8},1\n" for row in range(60))
    path.write_bytes(f"colour,x,y\n{rows}".encode("latin-1"))
    one_label, encoding = find_warnings(sample_data([path], reading=ReadOptions(label="y")), CLICKS)
    assert "all labels in the sampled rows are 1" in one_label
    assert "is not UTF-8" in encoding
    path.write_text("colour,x,y\n" + rows.replace(",1\n", ",0\n", 1))
    assert find_warnings(sample_data([path], reading=ReadOptions(label="y")), CLICKS) == []
