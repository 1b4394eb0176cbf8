"""The output of `paceline describe` for truncated, damaged and mislabelled files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.data import open_dataset
from paceline.errors import DataError
from paceline.training.files.describing import describe_data


def describe(path: Path) -> dict[str, Any]:
    return describe_data([str(path)])


def column(found: dict[str, Any], name: str) -> dict[str, Any]:
    return next(column for column in found["columns"] if column["name"] == name)


def test_lists_are_counted_by_elements(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = {
        "click": [i % 2 for i in range(90)],
        "tags": [[f"t{k}" for k in range(i % 4)] for i in range(90)],
        "sizes": [[float(i % 3), 2.5, None] for i in range(90)],
        "x": [i / 7 for i in range(90)],
    }
    parquet.write_table(arrow.table(table), tmp_path / "x.parquet")
    found = describe(tmp_path / "x.parquet")
    assert (column(found, "tags")["distinct"], column(found, "tags")["examples"]) == (3, ["t0", "t1", "t2"])
    assert (column(found, "sizes")["distinct"], column(found, "sizes")["examples"]) == (4, ["0", "2.5", "1"])
    assert [feature["column"] for feature in found["first_row"]["features"]] == ["sizes", "sizes", "x"]


def test_incomplete_parquet(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "x.parquet"
    parquet.write_table(arrow.table({"click": [0, 1] * 50, "site": ["a", "b"] * 50}), path)
    whole = path.read_bytes()
    for length in (len(whole) // 2, 9):
        path.write_bytes(whole[:length])
        with pytest.raises(DataError, match="is not a complete parquet file"):
            describe(path)
    path.write_bytes(whole[:-60] + b"x" * 40 + whole[-20:])
    with pytest.raises(DataError, match="is a damaged parquet file"):
        describe(path)


def test_a_json_field_with_numbers_and_lists(tmp_path: Path) -> None:
    rows = [{"click": i % 2, "x": i % 7 if i % 3 else [i % 5, 9]} for i in range(300)]
    (tmp_path / "x.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = column(describe(tmp_path / "x.json"), "x")
    assert (found["kind"], found["reason"]) == (
        "numeric and categorical",
        "200 as numbers, 200 in lists, as categories",
    )


def test_an_unclosed_quote(tmp_path: Path) -> None:
    """An unclosed quote would put all later rows into one cell, so it is an error and not a malformed row."""
    path = tmp_path / "x.csv"
    rows = [f"{i % 2},s{i % 5},{i * 1.5}" for i in range(900)]

    def write(at: int) -> None:
        lines = [row if i != at else '1,"s3,4.5' for i, row in enumerate(rows)]
        path.write_text("click,site,price\n" + "\n".join(lines) + "\n")

    write(300)
    message = "the row at line 302 opens a quote that is never closed, so it would include 599 more lines"
    with pytest.raises(DataError, match=message):
        describe(path)
    with open_dataset(path, shard_bytes=2000) as dataset, pytest.raises(DataError, match=message):
        list(dataset.batches(100))
    write(0)
    with pytest.raises(DataError, match="Line 2 opens a quote and does not close it"):
        describe(path)
    write(899)  # no row follows
    assert "a quote is opened and not closed" in describe(path)["malformed"]["first"]
