"""Data without labels, for predictions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from paceline.data import Batch, Columns, open_dataset
from paceline.data.formats import FORMATS
from paceline.errors import UsageError

CRITEO = "".join("\t".join([str(i % 2), *[str(i)] * 13, *[f"{i:08x}"] * 26]) + "\n" for i in range(50))
LIBSVM = "".join(f"{i % 2} {i}:1 {i + 1}:0.5\n" for i in range(50))
CSV = "y,site,age\n" + "".join(f"{i % 2},s{i % 7},{i}\n" for i in range(50))
COLUMNS = Columns("y", ("site",), ("age",))


def without_first(text: str, separator: str) -> str:
    return "".join(line.partition(separator)[2] + "\n" for line in text.splitlines())


def read(path: Path, format: str, columns: Columns | None, *, needs_labels: bool) -> Batch:
    with open_dataset(path, format, columns, needs_labels=needs_labels) as dataset:
        found = Batch.concatenate(list(dataset.batches(10)))
        assert dataset.bad_lines.count == 0
        return found


@pytest.mark.parametrize(
    ("format", "text", "separator", "columns"),
    [("criteo", CRITEO, "\t", None), ("libsvm", LIBSVM, " ", None), ("csv", CSV, ",", COLUMNS)],
)
def test_features_do_not_depend_on_the_presence_of_labels(
    tmp_path: Path, format: str, text: str, separator: str, columns: Columns | None
) -> None:
    path = tmp_path / "x"
    path.write_text(text)
    labelled = read(path, format, columns, needs_labels=False)
    assert labelled.labels.tolist() == [0, 1] * 25
    assert not FORMATS["criteo"].matches_unlabelled(str(path))
    path.write_text(without_first(text, separator))
    found = read(path, format, columns, needs_labels=False)
    assert np.isnan(found.labels).all()
    for name in ("indptr", "keys", "values"):
        np.testing.assert_array_equal(getattr(found, name), getattr(labelled, name))


def test_parquet_without_the_label(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pyarrow.parquet.write_table(pa.table({"age": [1.0, 2.0], "site": ["a", "b"]}), path)
    found = read(path, "parquet", COLUMNS, needs_labels=False)
    assert np.isnan(found.labels).all()
    assert len(found.keys) == 4
    with pytest.raises(UsageError, match="has no label 'y'"):
        open_dataset(path, "parquet", COLUMNS)


@pytest.mark.parametrize(
    ("cells", "classes"),
    [([1.0, None, 0.0], ()), (["1", "NA", "0"], ()), (["1", "", "0"], ()), (["spam", None, "egg"], ("egg", "spam"))],
)
def test_parquet_with_missing_labels(tmp_path: Path, cells: list[float | str | None], classes: tuple[str, ...]) -> None:
    path = tmp_path / "x.parquet"
    pyarrow.parquet.write_table(pa.table({"y": cells, "site": ["a", "b", "c"]}), path)
    columns = Columns("y", ("site",), (), classes=classes)
    np.testing.assert_array_equal(read(path, "parquet", columns, needs_labels=False).labels, [1, np.nan, 0])
    with open_dataset(path, "parquet", columns) as dataset:
        assert Batch.concatenate(list(dataset.batches(10))).labels.tolist() == [1, 0]
        assert dataset.bad_lines.count == 1


def test_csv_with_missing_labels(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("y,site\n1,a\nNA,b\n,c\n0,d\n")
    columns = Columns("y", ("site",), ())
    np.testing.assert_array_equal(read(path, "csv", columns, needs_labels=False).labels, [1, np.nan, np.nan, 0])
    with open_dataset(path, "csv", columns) as dataset:
        assert Batch.concatenate(list(dataset.batches(10))).labels.tolist() == [1, 0]
        assert dataset.bad_lines.count == 2


def test_decimal_commas_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("y;price\n" + "".join(f"{i % 2};{i},5\n" for i in range(60)))
    with pytest.raises(UsageError, match="decimal commas, such as '0,5' in column 'price'"):
        open_dataset(path)


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("{i},234", "commas between thousands, such as '0,234' in column 'price'. Write them without"),
        ("1,{i:03},234", "commas between thousands, such as '1,000,234'"),
        (
            "{i},{i}00",
            "decimal commas, such as '10,1000'",
        ),  # '1,100' alone would be ambiguous
        ("{i},234.50", "commas between thousands, such as '0,234.50'"),
    ],
)
def test_commas_between_thousands_are_not_taken_for_decimal_commas(tmp_path: Path, cell: str, message: str) -> None:
    path = tmp_path / "x.csv"
    path.write_text("y;price\n" + "".join(f"{i % 2};{cell.format(i=i)}\n" for i in range(60)))
    with pytest.raises(UsageError, match=message):
        open_dataset(path)


def test_word_labels(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    for one, zero in (("yes", "no"), ("Y", "n"), ("T", "F"), ("True", "false")):
        path.write_text("y,a\n" + "".join(f"{one if i % 2 else zero},{i}.5\n" for i in range(10)))
        assert read(path, "csv", Columns("y", (), ("a",)), needs_labels=True).labels.tolist() == [0, 1] * 5
