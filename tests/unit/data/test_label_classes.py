"""Labels that are words: each word gets a number, in every format with columns; unknown words are malformed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from paceline.data import Columns, open_dataset, open_spec
from paceline.data.guessing import ReadOptions
from paceline.errors import PacelineError
from paceline.training.files.converting import convert_data, sample_sources
from paceline.training.files.data_files import sample_data
from paceline.training.files.describing import describe_data

_FORMATS = ["csv", "parquet", "jsonl"]
_ROWS = [("malignant", 1.5), ("benign", 2.0), (" benign", 0.5), ("malignant", 0.25)] * 50


def write_rows(path: Path, format: str, rows: list[tuple[str, float]]) -> Path:
    labels, numbers = zip(*rows, strict=True)
    if format == "parquet":
        table = pa.table({"class": pa.array(labels).dictionary_encode(), "size": numbers})
        parquet.write_table(table, path)
    elif format == "csv":
        path.write_text("size,class\n" + "".join(f'{number},"{label}"\n' for label, number in rows))
    else:
        path.write_text("".join(json.dumps({"class": label, "size": number}) + "\n" for label, number in rows))
    return path


@pytest.mark.parametrize("format", _FORMATS)
def test_two_words_become_0_and_1(tmp_path: Path, format: str) -> None:
    path = write_rows(tmp_path / "x", format, _ROWS)
    sample = sample_data([path], reading=ReadOptions(label="class"))
    assert sample.columns is not None
    assert sample.columns.classes == ("benign", "malignant")
    assert sample.labels == {1.0: 100, 0.0: 100}
    assert Columns.from_fields(json.loads(json.dumps(sample.columns.to_fields()))) == sample.columns
    for labels, expected in (("clicks", [1, 0, 0, 1]), ("clicks:0.0", [0, 1, 1, 0]), ("numbers", [1, 0, 0, 1])):
        with (
            open_dataset(path, format, sample.columns, labels=labels) as dataset,
            open_spec(dataset.spec()) as other,
        ):
            for opened in (dataset, other):
                assert next(opened.batches(4)).labels.tolist() == expected
                assert not opened.bad_lines.count


@pytest.mark.parametrize("format", _FORMATS)
def test_a_late_third_word_is_malformed(tmp_path: Path, format: str) -> None:
    path = write_rows(tmp_path / "x", format, _ROWS)
    columns = sample_data([path], reading=ReadOptions(label="class")).columns
    write_rows(path, format, [*_ROWS, ("unknown", 1.0), ("benign", 1.0)])
    with open_dataset(path, format, columns) as dataset:
        labels = np.concatenate([batch.labels for batch in dataset.blocks()])
        assert (len(labels), labels.sum(), dataset.bad_lines.count) == (201, 100, 1)
        named = "words that the labels are" if format == "jsonl" else "label 'class' is none of benign, malignant"
        assert named in dataset.bad_lines.first[0].reason


def test_named_columns_and_converted_data_have_classes(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "x.csv", "csv", _ROWS)
    named = sample_data([path], columns=Columns("class", numeric=("size",))).columns
    assert named is not None
    assert named.classes == ("benign", "malignant")
    out = tmp_path / "x.paceline"
    sample = sample_sources([str(path)], out, format=None, reading=ReadOptions(label="class"))
    convert_data([str(path)], out, sample)
    sample = sample_data([out])
    assert sample.columns is not None
    assert (sample.columns.classes, sample.labels) == (("benign", "malignant"), {0.0: 100, 1.0: 100})


def test_description_of_word_labels(tmp_path: Path) -> None:
    path = str(write_rows(tmp_path / "x.csv", "csv", _ROWS))
    found = describe_data([path], reading=ReadOptions(label="class"))
    assert (found["labels"], found["positive"], found["warning"]) == (
        {"benign": 100, "malignant": 100},
        "malignant",
        None,
    )
    assert describe_data([path], reading=ReadOptions(label="class"), positive="benign")["positive"] == "benign"
    with pytest.raises(
        PacelineError, match=r"--positive won: no sampled row has this label. The labels are benign and malignant"
    ):
        describe_data([path], reading=ReadOptions(label="class"), positive="won")
    write_rows(Path(path), "csv", [*_ROWS, ("unknown", 1.0)])
    found = describe_data([path], reading=ReadOptions(label="class"))
    assert found["positive"] is None
    assert "labels are benign, malignant and unknown, expected two" in found["warning"]
    assert describe_data([path], reading=ReadOptions(label="class"), positive="benign")["warning"] is None
