"""The file of a feature gives the feature's name; the names are stable across versions."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from paceline.data import Columns, open_dataset
from paceline.data.feature_names import read_feature_names, write_feature_names
from paceline.data.formats import FORMATS
from paceline.errors import ModelError
from paceline.models.features.interactions import Interactions
from paceline.training.files.feature_names import name_features

COLUMNS = Columns("label", ("site", "text"), ("age",))
ROWS: dict[str, list[Any]] = {
    "label": [1, 0, 1, 0],
    "site": ["news", "", "a;b", "42"],
    "age": [31.5, None, 7, 2.25],
    "text": ['say "x"', "two\nlines", "ünï", "tab\there"],
}


def keys_of(path: Path, format: str, columns: Columns | None) -> np.ndarray[Any, Any]:
    with open_dataset(path, format, columns) as dataset:
        return np.unique(np.concatenate([batch.keys for batch in dataset.batches(100)]))


@pytest.mark.parametrize("format", ["csv", "parquet"])
def test_columns(tmp_path: Path, format: str) -> None:
    path = tmp_path / f"data.{format}"
    table = pyarrow.table(ROWS)
    if format == "csv":
        cells = [["" if cell is None else str(cell) for cell in row] for row in zip(*ROWS.values(), strict=True)]
        lines = [",".join('"' + cell.replace('"', '""') + '"' for cell in row) for row in cells]
        path.write_text("\n".join([",".join(ROWS), *lines]) + "\n", encoding="utf-8")
    else:
        pyarrow.parquet.write_table(table, path)
    keys = keys_of(path, format, COLUMNS)
    names = FORMATS[format].find_names([str(path)], COLUMNS, keys)
    assert sorted(names) == keys.tolist()
    expected = {f"site={number}" for number in ROWS["site"]} | {f"text={number}" for number in ROWS["text"]} | {"age"}
    assert set(names.values()) == expected
    assert FORMATS[format].find_names([str(path)], COLUMNS, keys[:2]) == {key: names[key] for key in keys[:2].tolist()}


def test_elements_of_lists(tmp_path: Path) -> None:
    path, columns = tmp_path / "x.parquet", Columns("click", ("tags",))
    pyarrow.parquet.write_table(pyarrow.table({"click": [1, 0], "tags": [["a", "b"], ["b", None]]}), path)
    keys = keys_of(path, "parquet", columns)
    assert set(FORMATS["parquet"].find_names([str(path)], columns, keys).values()) == {"tags=a", "tags=b"}


def test_crosses_in_data_with_rows_without_pairs(tmp_path: Path) -> None:
    """Rows in which all numbers are missing have no pair, in the middle of the file and at its end."""
    path, columns = tmp_path / "x.csv", Columns("click", (), ("a", "b"))
    path.write_text("click,a,b\n1,,\n0,2,3\n1,,\n0,,\n")
    interactions = Interactions(text="a:b").of_columns("csv", columns)
    with open_dataset(path, columns=columns) as dataset:
        keys = np.unique(np.concatenate([interactions.apply(batch).keys for batch in dataset.batches(100)]))
    assert len(keys) == 3
    assert set(name_features([str(path)], "csv", columns, interactions, keys).values()) == {"a", "b", "a^b"}


def test_criteo(tmp_path: Path) -> None:
    numbers = ["", "0", "2", "3", "4", "100", "-1", "-7", "12345678", "1", "7", "9", "20"]
    lines = [f"{row % 2}\t" + "\t".join([*numbers[row:], *numbers[:row], *[f"{row}f"] * 25, ""]) for row in range(13)]
    path = tmp_path / "data.tsv.gz"
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    keys = keys_of(path, "criteo", None)
    names = FORMATS["criteo"].find_names([str(path)], None, keys)
    assert sorted(names) == keys.tolist()
    assert {"I1=", "I1=0", "I1=-7", "I13=2", "C1=3f", "C26="} <= set(names.values())
    inside = [name for name in names.values() if name.startswith("I4=") and ".." in name]
    spans = [tuple(map(int, name.removeprefix("I4=").split(".."))) for name in inside]
    assert any(low <= 100 <= high for low, high in spans)
    assert any(low <= 12345678 <= high for low, high in spans)


def test_stored_names(tmp_path: Path) -> None:
    assert read_feature_names(tmp_path) == {}
    names = {2**64 - 1: 'a\tb\n"c"', 0: "ünï\udc80"}
    write_feature_names(tmp_path, names)
    found = read_feature_names(tmp_path)
    assert found[2**64 - 1] == names[2**64 - 1]
    assert found[0].startswith("ünï")
    (tmp_path / "feature-names.tsv").write_text("x\n")
    with pytest.raises(ModelError, match="has no names of features"):
        read_feature_names(tmp_path)
