"""CSV and Parquet."""

from __future__ import annotations

import csv
import gzip
import io
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.data import FORMATS, Batch, Columns, Dataset, describe_not_binary, open_dataset
from paceline.errors import DataError, UsageError
from paceline.kernels.hashing import hash_bytes, name_seed

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install 'paceline[parquet]'")
pq = pytest.importorskip("pyarrow.parquet")

COLUMNS = Columns("click", ("site", "ad"), ("price",))


def key(column: str, value: str) -> int:
    return hash_bytes(value.encode(), name_seed(column))


def rows(dataset: Dataset, batch_size: int = 4) -> list[tuple[int, dict[int, float]]]:
    result, shard = [], 0
    dataset.num_shards(0)
    while dataset.ended(0) is None or shard < (dataset.ended(0) or 0):
        for batch in dataset.read(0, shard, batch_size):
            result += batch_rows(batch)
        shard += 1
    return result


def batch_rows(batch: Batch) -> list[tuple[int, dict[int, float]]]:
    values = np.ones(len(batch.keys), np.float32) if batch.values is None else batch.values
    pairs = list(zip(batch.keys.tolist(), values.tolist(), strict=True))
    return [
        (int(label), dict(pairs[a:b]))
        for label, a, b in zip(batch.labels, batch.indptr[:-1], batch.indptr[1:], strict=True)
    ]


def expected(click: int, site: str, ad: str, price: float | None) -> tuple[int, dict[int, float]]:
    pairs = {key("site", site): 1.0, key("ad", ad): 1.0}
    return click, pairs if price is None else {**pairs, name_seed("price"): price}


CSV = b"""ad,click,price,note,site
17,1,2.5,x,a.example
18,0,,y,"b, ""quoted""
and broken"
,-1,NA,z,
19,0.5,1e3,,\xc3\xa4
"""
CSV_ROWS = [
    expected(1, "a.example", "17", 2.5),
    expected(0, 'b, "quoted"\nand broken', "18", None),
    expected(0, "", "", None),
    expected(1, "ä", "19", 1000.0),
]


@pytest.mark.parametrize("name", ["x.csv", "x.csv.gz"])
@pytest.mark.parametrize("batch_size", [1, 3, 4])
def test_csv(tmp_path: Path, name: str, batch_size: int) -> None:
    path = tmp_path / name
    path.write_bytes(gzip.compress(CSV) if name.endswith("gz") else CSV)
    with open_dataset(path, "csv", COLUMNS) as dataset:
        assert rows(dataset, batch_size) == CSV_ROWS
        assert dataset.bad_lines.count == 0
        assert dataset.ended(0) == dataset.num_shards(0) == 1


def test_csv_columns_are_guessed_as_categories_or_numbers(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("site,clicked,price,hour\na,1,0.5,3\nb,0,1.5,4\n")
    with open_dataset(path) as dataset:
        assert dataset.columns == Columns("clicked", ("site",), ("price", "hour"))
        found = rows(dataset)
    assert found[0] == (1, {key("site", "a"): 1.0, name_seed("price"): 0.5, name_seed("hour"): 3.0})
    path.write_text("site,outcome\na,1\n")
    with pytest.raises(UsageError, match=r"no column named label, click, clicked, target, y.* are site, outcome"):
        open_dataset(path, "csv")


@pytest.mark.parametrize("separator", [",", ";", "\t"])
@pytest.mark.parametrize("header", [True, False])
def test_csv_with_other_separators_and_without_a_header(tmp_path: Path, separator: str, header: bool) -> None:
    path = tmp_path / "x.csv"
    lines = [["1", "a", "0.5"], ["0", f'"b{separator}"', "1e2"]]
    names = ["click", "site", "price"] if header else ["c1", "c2", "c3"]
    path.write_text("".join(separator.join(line) + "\n" for line in [names, *lines][0 if header else 1 :]))
    with open_dataset(path, columns=Columns(names[0], (names[1],), (names[2],))) as dataset:
        assert dataset.format == "csv"
        assert rows(dataset) == [
            (1, {key(names[1], "a"): 1.0, name_seed(names[2]): 0.5}),
            (0, {key(names[1], "b" + separator): 1.0, name_seed(names[2]): 100.0}),
        ]


def test_the_sample_is_spread_over_the_files(tmp_path: Path) -> None:
    """The files are sorted by label. The sample contains all labels, and its size is bounded."""
    paths = [str(tmp_path / name) for name in ("a.csv", "b.csv")]
    for path, labels in zip(paths, ((0, 1), (2, 7)), strict=True):
        text = "".join(f"{labels[i > 200_000]},site{i}\n" for i in range(400_000))
        Path(path).write_text("click,site\n" + text)
    counts = FORMATS["csv"].sample_labels(paths, Columns("click", ("site",)))
    assert set(counts) == {0.0, 1.0, 2.0, 7.0}
    assert sum(counts.values()) * 13 < 3 << 20
    assert describe_not_binary(counts) == "labels are 0, 1, 2 and 7, expected two: 0 and 1, or -1 and 1"


@pytest.mark.parametrize(
    ("labels", "fault"),
    [
        ([0, 1], None),
        ([-1, 1], None),
        ([0], None),
        ([3], None),
        ([1, 2], "labels are 1 and 2, expected"),
        ([0, 0.5, 1], "labels are 0, 0.5 and 1, expected"),
        (range(20), "labels are 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, ..., expected"),
    ],
)
def test_labels_other_than_two_classes_are_described(labels: Sequence[float], fault: str | None) -> None:
    found = describe_not_binary(dict.fromkeys(labels, 5))
    assert found is None if fault is None else str(found).startswith(fault)


def test_a_csv_batch_with_only_categories_has_no_values(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_bytes(CSV)
    with open_dataset(path, "csv", Columns("click", ("site",))) as dataset:
        (batch,) = dataset.read(0, 0, 10)
    assert batch.values is None
    assert batch.keys.tolist() == [key("site", site) for site in ("a.example", 'b, "quoted"\nand broken', "", "ä")]


@pytest.mark.parametrize("shard_bytes", [7, 100, 5000, 70_000, 10**6])
@pytest.mark.parametrize("how", ["plain", "quoted", "carriage returns", "no last newline", "gz"])
def test_each_csv_row_is_in_exactly_one_shard(tmp_path: Path, shard_bytes: int, how: str) -> None:
    """Quotes, shard borders and the order of reading do not change the rows."""
    count = 40 if shard_bytes < 1000 else 5000
    ads = [f'a{i}\n0,"b",{i}' if how == "quoted" and i % 5 == 0 else f"a{i}" for i in range(count)]
    lines = [("click", "site", "ad", "price"), *((str(i % 2), f"s{i}", ad, str(i)) for i, ad in enumerate(ads))]
    out = io.StringIO(newline="")
    csv.writer(out, lineterminator="\r\n" if how == "carriage returns" else "\n").writerows(lines)
    text = out.getvalue().encode()
    path = tmp_path / ("x.csv.gz" if how == "gz" else "x.csv")
    path.write_bytes(gzip.compress(text) if how == "gz" else text[: -1 if how == "no last newline" else None])
    everything = [expected(i % 2, f"s{i}", ads[i], float(i)) for i in range(count)]
    with open_dataset(path, "csv", COLUMNS, shard_bytes=shard_bytes) as dataset:
        assert dataset.num_shards(0) == (None if how == "gz" else -(-path.stat().st_size // shard_bytes))
        assert rows(dataset) == everything
        shards = dataset.ended(0)
        assert shards == -(-(len(text) - (how == "no last newline")) // shard_bytes)
        order = list(range(shards))[:: -1 if shards < 100 else -97]
        random.Random(shard_bytes).shuffle(order)
        found = {shard: [row for b in dataset.read(0, shard, 7) for row in batch_rows(b)] for shard in order}
        if len(order) == shards:
            assert [row for shard in range(shards) for row in found[shard]] == everything
        assert list(dataset.read(0, shards, 7)) == []
    with open_dataset(path, "csv", COLUMNS, shard_bytes=shard_bytes) as dataset:
        assert [row for b in dataset.read(0, shards // 2, 7) for row in batch_rows(b)] == found.get(
            shards // 2, []
        ) or (shards // 2 not in found)
        assert dataset.bad_lines.count == 0


def test_an_endless_row_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_bytes(b'click,site,ad,price\n1,a,b,1\n0,"a,b,1\n' + b"0,a,b,1\n" * (3 << 20))
    with open_dataset(path, "csv", COLUMNS) as dataset, pytest.raises(DataError, match="row of more than 16 MiB, from"):
        rows(dataset)
    path.write_bytes(b'click,site,ad,price\n1,a,b,1\n0,"a,b,1\n0,a,b,1\n')
    with (
        open_dataset(path, "csv", COLUMNS) as dataset,
        pytest.raises(DataError, match="line 3 opens a quote that is never closed"),
    ):
        rows(dataset)
    path.write_bytes(b'click,site,ad,price\n1,a,b,1\n0,"a,b,1\n')
    with open_dataset(path, "csv", COLUMNS) as dataset:
        assert rows(dataset) == [expected(1, "a", "b", 1.0)]
        (line,) = dataset.bad_lines.first
        assert (line.offset, line.reason) == (28, "a quote is opened and not closed")


def test_bad_csv_rows_are_skipped_and_described(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("click,site,ad,price\n1,a,b,1\nmaybe,a,b,1\n,a,b,1\n1,a,b,cheap\n1,a,b,inf\n1,a\n0,a,b,2\n")
    with open_dataset(path, "csv", COLUMNS) as dataset:
        assert rows(dataset) == [expected(1, "a", "b", 1.0), expected(0, "a", "b", 2.0)]
        reasons = {line.reason for line in dataset.bad_lines.first}
        assert dataset.bad_lines.count == 5
    assert reasons == {
        "it has 2 cells where the first row has 4",
        "its label 'click' is neither a finite number nor one of true, t, yes, y, false, f, no, n",
        "its label 'click' is missing",
        "its column 'price' is not a finite number",
    }
    with (
        open_dataset(path, "csv", COLUMNS, strict=True) as dataset,
        pytest.raises(DataError, match="is malformed"),
    ):
        rows(dataset)
    path.write_text("click,site,ad,price\n" + "none,a,b,1\n" * 20)
    with (
        open_dataset(path, "csv", COLUMNS) as dataset,
        pytest.raises(DataError, match="no valid row at its start"),
    ):
        rows(dataset)


def test_a_damaged_csv_file(tmp_path: Path) -> None:
    path = tmp_path / "x.csv.gz"
    path.write_bytes(gzip.compress(b"click,site\n" + b"1,a\n" * 99999)[:-30])
    with pytest.raises(DataError, match="is truncated: its gzip stream ends"):
        rows(open_dataset(path, "csv"))


def table(count: int = 1000) -> Any:
    return pa.table(
        {
            "click": pa.array([i % 3 == 0 for i in range(count)]),
            "site": pa.array([None if i % 5 == 0 else f"s{i % 7}" for i in range(count)]).dictionary_encode(),
            "ad": pa.array(range(count), pa.int32()),
            "price": pa.array([None if i % 4 == 0 else i / 8 for i in range(count)], pa.float64()),
            "tags": pa.array([["x"]] * count),
        }
    )


def table_rows(count: int = 1000) -> list[tuple[int, dict[int, float]]]:
    return [
        expected(int(i % 3 == 0), "" if i % 5 == 0 else f"s{i % 7}", str(i), None if i % 4 == 0 else i / 8)
        for i in range(count)
    ]


def test_parquet_shards_are_row_groups(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(table(), path, row_group_size=300)
    with open_dataset(path, columns=COLUMNS) as dataset:
        assert dataset.format == "parquet"
        assert dataset.num_shards(0) == 4
        assert rows(dataset, 7) == table_rows()
        assert [b.num_examples for b in dataset.read(0, 3, 40)] == [40, 40, 20]
        assert list(dataset.read(0, 4, 40)) == []


@pytest.mark.parametrize("text", [pa.string(), pa.large_string(), pa.string_view()])
def test_parquet_with_other_kinds_of_strings_and_labels(tmp_path: Path, text: Any) -> None:
    path = tmp_path / "x.parquet"
    data = {
        "y": pa.array(["1", "true", None, "0", "x"]),
        "site": pa.array(["a", "", "c", None, "e"]).cast(text),
    }
    pq.write_table(pa.table(data), path)
    with open_dataset(path) as dataset:
        assert dataset.columns == Columns("y", ("site",))
        found = rows(dataset)
        assert dataset.bad_lines.count == 2
        assert [line.row for line in dataset.bad_lines.first] == [3, 5]
    assert found == [(1, {key("site", "a"): 1.0}), (1, {key("site", ""): 1.0}), (0, {key("site", ""): 1.0})]


def test_parquet_columns_are_guessed(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(table(5), path)
    with open_dataset(path) as dataset:
        assert dataset.columns == Columns("click", ("site", "tags"), ("ad", "price"))
        assert len(rows(dataset)) == 5


def test_an_integer_is_the_same_category_in_any_notation(tmp_path: Path) -> None:
    """pandas turns integers into floats if values are missing. Arrow writes large floats with an exponent."""
    values = [3, 99_999_999_999, 2**40, 2**53, -7]
    expected = [key("id", str(value)) for value in values]
    for type in (pa.int64(), pa.float64(), pa.list_(pa.float64())):
        cells: list[Any] = [[value] for value in values] if pa.types.is_list(type) else values
        pq.write_table(pa.table({"y": [0] * 5, "id": pa.array(cells, type)}), tmp_path / "x.parquet")
        with open_dataset(tmp_path / "x.parquet", columns=Columns("y", ("id",))) as dataset:
            assert next(iter(dataset.batches(9))).keys.tolist() == expected
    (tmp_path / "x.csv").write_text("y,id\n" + "".join(f"0,{value}.0\n" for value in values))
    with open_dataset(tmp_path / "x.csv", columns=Columns("y", ("id",))) as dataset:
        assert next(iter(dataset.batches(9))).keys.tolist() == expected


@pytest.mark.parametrize("type", [pa.list_(pa.string()), pa.large_list(pa.large_string())])
def test_lists_in_parquet_are_several_categories(tmp_path: Path, type: Any) -> None:
    """A list has several categories of one column. A missing list or element gives no feature."""
    tags = pa.array([["x", "y"], [], None, ["x", None], ["z"]], type)
    codes = pa.array([[1], [2, 3], None, [], [4]], pa.list_(pa.int32()))
    content = pa.table({"click": [1, 0, 1, None, 0], "tags": tags, "codes": codes, "price": [1.0, 2.0, None, 4.0, 5.0]})
    pq.write_table(content, tmp_path / "x.parquet", row_group_size=3)
    columns = Columns("click", ("tags", "codes"), ("price",))
    with open_dataset(tmp_path / "x.parquet", columns=columns) as dataset:
        assert rows(dataset) == [
            (1, {name_seed("price"): 1.0, key("tags", "x"): 1.0, key("tags", "y"): 1.0, key("codes", "1"): 1.0}),
            (0, {name_seed("price"): 2.0, key("codes", "2"): 1.0, key("codes", "3"): 1.0}),
            (1, {}),
            (0, {name_seed("price"): 5.0, key("tags", "z"): 1.0, key("codes", "4"): 1.0}),
        ]
        assert dataset.bad_lines.count == 1
    with open_dataset(tmp_path / "x.parquet") as dataset:
        assert dataset.columns is not None
        assert dataset.columns.categorical == ("tags", "codes")
    with pytest.raises(UsageError, match=r"column 'tags' has lists.*--categorical tags"):
        open_dataset(tmp_path / "x.parquet", columns=Columns("click", (), ("tags",))).num_shards(0)


def test_damaged_parquet(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(table(), path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match="is not a complete parquet file"):
        open_dataset(path)


def test_invalid_columns(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no feature"):
        Columns("click")
    with pytest.raises(UsageError, match="'a' is named twice"):
        Columns("click", ("a",), ("a",))
    path = tmp_path / "x.csv"
    path.write_bytes(CSV)
    with pytest.raises(UsageError, match="no column 'sites': its columns are ad, click, price, note, site"):
        open_dataset(path, "csv", Columns("click", ("sites",)))
    path.write_text("click,a,a\n1,2,3\n")
    with pytest.raises(UsageError, match="more than one column 'a'"):
        open_dataset(path, "csv", Columns("click", ("a",)))
    path.write_text("1 1:1\n")
    with pytest.raises(UsageError, match="libsvm has no columns"):
        open_dataset(path, columns=COLUMNS)


def test_without_pyarrow_csv_is_read_and_parquet_names_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(table(), tmp_path / "x.parquet")
    (tmp_path / "x.csv").write_bytes(CSV)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with open_dataset(tmp_path / "x.csv", "csv", COLUMNS) as dataset:
        assert rows(dataset) == CSV_ROWS
    with pytest.raises(UsageError, match=r"pip install 'paceline\[parquet\]'"):
        open_dataset(tmp_path / "x.parquet", "parquet")


def test_csv_has_the_keys_and_values_of_an_arrow_table(tmp_path: Path) -> None:
    """Earlier versions read CSV with Arrow; models saved by them stay valid."""
    cells = ["a", "exactly8", "longer than eight", "", "NA", "ä€", 'quo"ted', "two\nlines", " blank "]
    numbers = ["1", "-2.5", "", "nan", "1e-3", "12345678", "123456789", "+7", " 3 ", "0.1"]
    data = [[str(i % 2), cells[i % 9], cells[i * 7 % 9], numbers[i % 10]] for i in range(90)]
    with open(tmp_path / "x.csv", "w", encoding="utf-8", newline="") as out:
        csv.writer(out).writerows([["click", "site", "ad", "price"], *data])
    columns = list(zip(*data, strict=True))
    pq.write_table(pa.table(dict(zip(["click", "site", "ad", "price"], columns, strict=True))), tmp_path / "x.parquet")
    found = []
    for name in ("x.csv", "x.parquet"):
        with open_dataset(tmp_path / name, columns=COLUMNS) as dataset:
            found.append(Batch.concatenate(list(dataset.batches(32))))
    for part in ("labels", "indptr", "keys", "values"):
        np.testing.assert_array_equal(getattr(found[0], part), getattr(found[1], part))
