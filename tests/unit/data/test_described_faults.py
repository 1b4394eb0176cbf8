"""Messages about unusual files: encodings, separators, quotes, words as labels, truncated lines."""

from __future__ import annotations

import gzip
import io
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from paceline.data import detect_format, open_dataset
from paceline.data.labels import describe_no_numbers
from paceline.data.streams import standard_input
from paceline.errors import PacelineError
from paceline.training.bad_data import BadData
from paceline.training.files.converting import convert_data
from paceline.training.files.data_files import sample_data
from paceline.training.files.describing import describe_data, show_description

ROWS = "site,price,outcome\n" + "a,1.5,won\nb,2,lost\n" * 20


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (ROWS.encode("utf-16"), "has a byte-order mark of UTF-16.*iconv -f UTF-16 -t UTF-8"),
        (ROWS.encode("utf-32"), "has a byte-order mark of UTF-32"),
        (b'{\n"a": 1\n}\n{\n"a": 2\n}\n', "looks like JSON with objects of several lines"),
        (b"a,a,click\n1,2,0\n3,4,1\n", "more than one column 'a' in its header"),
        (
            b"site,label\n" + b"".join(b"a,name %d\n" % at for at in range(200)),
            "labels, column 'label', are texts such as 'name 0', 'name 1', 'name 2': expected numbers, or",
        ),
        (b'{"click": "won", "a": 1}\n' * 3, "labels, column 'click', are text, 'won': expected numbers"),
    ],
)
def test_unusual_files_are_rejected(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "x"
    path.write_bytes(content)
    with pytest.raises(PacelineError, match=expected):
        sample_data([path])


def test_weights_that_are_text_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("site,price,click\n,1.5,1\n" + "b,2,0\n" * 20)
    with pytest.raises(PacelineError, match="the weights, column 'site', are text, 'b': expected numbers"):
        sample_data([path], weight="site")
    columns = sample_data([path]).columns
    assert columns is not None
    assert columns.describe_fault("click", is_missing=True) == "its label 'click' is missing"


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        (["a", "1"], None),
        (["", "na"], None),
        (["a", "no"], None),
        (["a", "", "a"], "text, 'a'"),
        (["a", "b", "c"], "texts, 'a', 'b' and 'c'"),
        (["a", "b", "c", "d"], "texts such as 'a', 'b', 'c'"),
    ],
)
def test_texts_in_numeric_columns_are_reported(cells: Sequence[str], expected: str | None) -> None:
    assert describe_no_numbers(cells) == expected


@pytest.mark.parametrize(
    ("text", "format"),
    [
        ("site|price|click\n|1.5|1\nb c|2|0\n", "csv"),
        ("1|2|3\n0|5|6\n", "csv"),
        ("1 |f a:1 b\n0 |f a b:2\n", "vw"),
        ("1 |\n0 |\n", "vw"),
        ("1|f\n0|f a b\n", "vw"),
        ("tag|f a\nother|f b c\n", "vw"),
        ("1,a|b|c|d\n0,a|b|c|d\n", "csv"),
        ('{"y": 1, "a": 2}\n{"y": 0, "a"\n{"y": 0, "a"\n', "jsonl"),
    ],
)
def test_formats_of_files_with_bars_and_truncated_lines(tmp_path: Path, text: str, format: str) -> None:
    path = tmp_path / "x"
    path.write_text(text)
    assert detect_format(path) == format


def test_cells_may_be_separated_by_bars(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text('site|price|click\na,b|1.5|1\n"c|d"|2|0\n')
    with open_dataset(path) as dataset:
        assert next(dataset.batches(10)).labels.tolist() == [1, 0]
        assert dataset.columns is not None
        assert dataset.columns.names == ["click", "site", "price"]


def test_lines_with_stray_quotes_are_malformed(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("site,price,click\na,1,0\n'b,c',2,1\nd,e,2,1\n" + "a,1,0\n" * 5)
    with open_dataset(path) as dataset:
        assert sum(batch.num_examples for batch in dataset.batches(10)) == 6
        reasons = [line.reason for line in dataset.bad_lines.first]
    assert reasons == [
        "it has 4 cells where the first row has 3. The quote of csv is \", not '",
        "it has 4 cells where the first row has 3",
    ]


def test_a_large_share_of_malformed_lines_is_reported() -> None:
    assert BadData(40, []).sentence(60).startswith("40 malformed lines, 40% of all, were skipped (--strict")
    assert BadData(1, []).sentence(2).startswith("1 malformed line, 33% of all, was skipped (--strict")
    assert BadData(40, []).sentence(1000).startswith("40 malformed lines were skipped (--strict")


@pytest.mark.parametrize("name", ["x.csv", "x.csv.gz"])
def test_malformed_rows_are_described(tmp_path: Path, name: str) -> None:
    content = ("site,price,click\n" + "a,1.5,0\nb,2,1\n,3\n" * 20).encode()
    path = tmp_path / name
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    found = describe_data([str(path)])
    first = f"{path}, line 4: it has 2 cells where the first row has 3: ',3'"
    assert found["malformed"] == {"rows_read": 60, "count": 20, "first": first}
    convert_data([str(path)], tmp_path / "out", sample_data([path]))
    again = describe_data([str(tmp_path / "out")])["malformed"]
    assert again == {"rows_read": 60, "count": 20, "first": f"{path}: it has 2 cells where the first row has 3: ',3'"}


def test_description_of_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(
        '{"click": 0, "site": "", "price": 0.30000000000000004}\n{"click": 1, "site": "a", "price": 2}\n{\n'
    )
    found = describe_data([str(path)])
    assert [feature["column"] for feature in found["first_row"]["features"]] == ["site=", "price"]
    console = Console(width=120, file=io.StringIO())
    show_description(console, found)
    assert isinstance(console.file, io.StringIO)
    output = console.file.getvalue()
    assert "bad rows 1 of the 3 rows read (33%) are malformed" in output
    assert "''" in output
    assert "0.3, 2" in output
    assert "unscaled values" in output


def test_standard_input_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = standard_input.make_folder()
    path = standard_input.keep(io.BytesIO(gzip.compress(b"1 1:1\n")), folder.path)
    assert path.name == "stdin.gz"
    assert standard_input.name_for_people(f"{path} is odd: {path}") == "standard input is odd: standard input"
    assert standard_input.name_for_people(f"{tmp_path}/stdin is odd") == f"{tmp_path}/stdin is odd"
