"""Files written by other programs: libffm, blanks as separators, Excel's first line, headers with blanks, text."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data import Batch, Columns, Sample, detect_format, open_dataset
from paceline.data.dialect import BLANKS, guess_dialect, mark_blanks, parse_rows, read_dialect
from paceline.data.formats import FORMATS
from paceline.data.formats.vw import vw_parser
from paceline.data.guessing import ReadOptions
from paceline.errors import DataError, UsageError
from paceline.kernels.hashing import field_of, hash_bytes, name_seed
from paceline.kernels.text import lines as kernels
from paceline.kernels.text.values import split_words
from paceline.training.files.data_files import sample_data

WORDS = [("cheap", "pills", "offer"), ("meeting", "agenda", "notes")]


def read(path: Path, columns: Columns | None = None, *, needs_labels: bool = True) -> Batch:
    with open_dataset(path, columns=columns, needs_labels=needs_labels, labels="numbers") as dataset:
        return Batch.concatenate(list(dataset.batches(1000)))


def sample_of_text(path: Path, content: str, **options: object) -> Sample:
    path.write_text(content)
    return sample_data([path], reading=ReadOptions(**options))  # type: ignore[arg-type]


def plain(text: bytes) -> bytes:
    return text


def with_mark(text: bytes) -> bytes:
    return b"\xef\xbb\xbf" + text


def with_returns(text: bytes) -> bytes:
    return text.replace(b"\n", b"\r\n")


@pytest.mark.parametrize("written", [plain, gzip.compress, with_mark, with_returns])
@pytest.mark.parametrize(
    ("text", "format"),
    [
        ("1 0:3:1 7:17:0.5\n0 0:4:1\n1\t2:7:-2 0:3:1\n", "libffm"),
        ("1 | :0.5 :2\n-1 | :1 a\n", "vw"),
        (" click , city , age \n" + "1 , c1 , 20\n0,c2,30\n" * 30, "csv"),
        ("  0.5   c1  1\n\t 0.25 \t c2 0 \n" * 30, "csv"),
        ("sep=;\nclick;city;age\n" + "1;c1;20\n0;c2;30\n" * 30, "csv"),
    ],
)
def test_a_file_is_read_with_any_compression_mark_or_line_ending(
    tmp_path: Path, text: str, format: str, written: Callable[[bytes], bytes]
) -> None:
    first, second = tmp_path / "first", tmp_path / ("x.gz" if written is gzip.compress else "x")
    first.write_text(text)
    second.write_bytes(written(text.encode()))
    assert detect_format(first) == detect_format(second) == format
    label = "-1" if text.startswith("  ") else None
    columns = sample_data([first], reading=ReadOptions(label=label)).columns
    assert columns == sample_data([second], reading=ReadOptions(label=label)).columns
    one, other = read(first, columns), read(second, columns)
    assert len(one.keys)
    np.testing.assert_array_equal(one.keys, other.keys)
    np.testing.assert_array_equal(one.labels, other.labels)


def test_libffm_has_the_features_of_vowpal_wabbit_by_fields(tmp_path: Path) -> None:
    (tmp_path / "x.ffm").write_text("1 0:3:1 user:17:0.5\n0 user:4:-2e1\n\n-1\n")
    (tmp_path / "x.vw").write_text("1 |0 3:1 |user 17:0.5\n0 |user 4:-2e1\n\n-1 |\n")
    one, other = read(tmp_path / "x.ffm"), read(tmp_path / "x.vw")
    for name in ("labels", "indptr", "keys", "values", "fields"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    path = str(tmp_path / "x.ffm")
    assert FORMATS["libffm"].sample_fields([path]) == ("0", "user")
    assert sample_data([path]).fields == ("0", "user")
    assert [*FORMATS["libffm"].find_names([path], None, one.keys).values()] == ["0^3", "user^17", "user^4"]
    (tmp_path / "unlabelled").write_text("0:3:1 user:17:0.5\n")
    found = read(tmp_path / "unlabelled", needs_labels=False)
    assert np.isnan(found.labels).all()
    np.testing.assert_array_equal(found.keys, one.keys[:2])


@pytest.mark.parametrize(
    "line",
    [b"1 0:3", b"1 0:3:", b"1 0::1", b"1 0:3:x", b"1 0:3:1:2", b"x 0:3:1", b"1 a", b"0:3:1", b"1 0:3:1e99", b":"],
)
def test_malformed_lines_of_libffm(line: bytes) -> None:
    text = b"1 0:3:1\n" + line + b"\n0 1:1:1\n"
    buffer = np.zeros(len(text) + 64, np.uint8)
    buffer[: len(text)] = np.frombuffer(text, np.uint8)
    found = vw_parser(needs_label=True, is_ffm=True)(buffer, 0, len(text))
    assert (found.batch.num_examples, found.num_bad, found.position) == (2, 1, len(text))
    assert found.bad[0][0] == 8


@pytest.mark.parametrize("line", ["1:-3:0.2 | a b", "1:-3:0.2 2:1:0.5 |x a", "shared | a"])
def test_the_contextual_bandit_format_is_rejected(tmp_path: Path, line: str) -> None:
    (tmp_path / "x").write_text(f"{line}\n2:1:0.5 | c\n" * 5)
    with pytest.raises(DataError, match="contextual bandit format of Vowpal Wabbit, which is not supported"):
        detect_format(tmp_path / "x")


def test_lines_of_vowpal_wabbit_without_labels_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "x.vw"
    path.write_text("| a b\n" * 20 + "1 | a\n-1 | b\n" * 5)
    with open_dataset(path) as dataset:
        assert sum(batch.num_examples for batch in dataset.batches(100)) == 10
        assert dataset.bad_lines.count == 20
    path.write_text("| a b\n" * 20)
    with pytest.raises(DataError, match="has no label in the sampled lines"):
        sample_data([path])


# Headers.

_CLOTHES = [
    (c, s, m, "sold" if c == "red" else "kept") for c in ("red", "blue") for s in "SML" for m in ("wool", "silk")
]


@pytest.mark.parametrize("first", range(0, 12, 5))
def test_a_first_row_with_repeated_values_is_data(tmp_path: Path, first: int) -> None:
    rows = [_CLOTHES[first], *_CLOTHES * 5]
    sample = sample_of_text(tmp_path / "x.csv", "".join(",".join(row) + "\n" for row in rows), label="-1")
    assert sample.columns is not None
    assert sample.columns.names[0] == "c4"
    assert sample.header_note is not None
    assert "has no header: its columns are c1 to c4" in sample.header_note
    assert read(tmp_path / "x.csv", sample.columns).num_examples == len(rows)


@pytest.mark.parametrize(
    ("text", "has_header"),
    [
        ("x,y\n" + "x1,0\nx2,1\n" * 9, True),
        ("0.5,y\n" + "0.25,n\n0.5,y\n" * 9, False),  # y is a label in the rows below, so it is not a name
        ("y,n,y\n" + "n,n,y\ny,y,n\n" * 9, False),
        ("y,age\n" + "y,20\nn,30\n" * 9, True),  # only the first row has a word in a numeric column
        ("city,colour\nParis,red\nRome,blue\n", True),
    ],
)
def test_a_header_is_found_by_comparison_with_the_rows_below(text: str, has_header: bool) -> None:
    dialect = guess_dialect(text)
    assert dialect is not None
    assert dialect.has_header == has_header


def test_the_option_for_a_header_is_used_and_stored(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    named = sample_of_text(path, "red,7,1\n" + "blue,8,0\nred,9,1\n" * 30, label="-1", header="yes")
    assert named.columns is not None
    assert (named.columns.names, named.header_note) == (["1", "red", "7"], None)
    text = "city,age,click\n" + "blue,8,0\nred,9,1\n" * 30
    plain_rows = sample_of_text(path, text, label="-1", header="no").columns
    assert plain_rows is not None
    assert plain_rows.header == "no"
    assert Columns.from_fields(plain_rows.to_fields()) == plain_rows
    assert read_dialect(str(path), plain_rows.names, "no").has_header is False
    headed = sample_of_text(path, text.partition("\n")[2], label="-1").columns
    assert headed is not None
    path.write_text(text)  # the columns of a file without a header are named by position, so a header can be skipped
    dialect = read_dialect(str(path), headed.names, "yes")
    assert (dialect.names, dialect.has_header) == (("c1", "c2", "c3"), True)
    with pytest.raises(UsageError, match="--header maybe: expected one of auto, yes, no"):
        ReadOptions(header="maybe")


def test_values_such_as_c1_are_not_taken_for_a_header(tmp_path: Path) -> None:
    sample = sample_of_text(tmp_path / "x.csv", "c1,5,0\n" + "c2,6,1\nc1,7,0\n" * 30, label="-1")
    assert sample.columns is not None
    assert read(tmp_path / "x.csv", sample.columns).num_examples == 61


def test_models_saved_with_blanks_in_names_still_read_them(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("click, city\n" + "1, a\n0, b\n" * 3)
    before = Columns.from_fields({"label": "click", "categorical": [" city"], "numeric": []})
    assert not before.trims
    assert read(tmp_path / "x.csv", before).keys[0] == hash_bytes(b" a", name_seed(" city"))
    now = sample_data([tmp_path / "x.csv"]).columns
    assert read(tmp_path / "x.csv", now).keys[0] == hash_bytes(b"a", name_seed("city"))


# Blanks between cells.


def test_rows_of_a_file_with_blanks_and_a_tab_between_cells(tmp_path: Path) -> None:
    path = tmp_path / "cars.data"
    rows = "".join(f"18.{i}   8   307.0      130.0\t\"chevrolet 'malibu' {i % 3}\"  {i % 2}\n" for i in range(100))
    sample = sample_of_text(path, rows, label="-1")
    assert sample.columns is not None
    assert len(sample.columns.names) == 6
    assert sample.columns.categorical == ("c5",)
    names = FORMATS["csv"].find_names([str(path)], sample.columns, read(path, sample.columns).keys)
    assert {"c5=chevrolet 'malibu' 0", "c5=chevrolet 'malibu' 2"} <= {*names.values()}


def test_text_between_tabs_is_not_split_at_blanks(tmp_path: Path) -> None:
    (tmp_path / "x.tsv").write_text("1\tNew York 5\n0\tSan Juan 7\n" * 9)
    assert read_dialect(str(tmp_path / "x.tsv")).separator == "\t"
    (tmp_path / "prose").write_text("it was the best of times\nit was the worst of times\n" * 9)
    with pytest.raises(DataError, match="looks like none of"):
        detect_format(tmp_path / "prose")


@settings(deadline=None)
@given(
    st.lists(st.lists(st.text(st.sampled_from("ab1.,;"), min_size=1, max_size=3), min_size=1, max_size=5)), st.data()
)
def test_marking_blanks_changes_neither_cells_nor_length(rows: list[list[str]], data: st.DataObject) -> None:
    blanks = st.text(st.sampled_from(" \t"), max_size=3)
    text = ""
    for row in rows:
        between = [data.draw(blanks) + " " for _ in row[1:]] + [""]
        text += " " + "".join(map("".join, zip(row, between, strict=True))) + " \n"
    marked = mark_blanks(text.encode())
    assert len(marked) == len(text)
    assert mark_blanks(marked) == marked
    assert parse_rows(text, BLANKS) == rows


# Words.


def text_rows(count: int = 200) -> str:
    return "label,text\n" + "".join(f"{i % 2},{' '.join(WORDS[i % 2][: 2 + i % 3])} {i}\n" for i in range(count))


def test_a_column_of_messages_is_guessed_as_text(tmp_path: Path) -> None:
    sample = sample_of_text(tmp_path / "x.csv", text_rows())
    assert sample.columns is not None
    assert (sample.columns.text, sample.columns.categorical) == (("text",), ())
    assert sample.guesses is not None
    assert [(guess.kind, guess.reason) for guess in sample.guesses.guesses][1] == ("text", "each word is a feature")
    found = read(tmp_path / "x.csv", sample.columns)
    expected = [hash_bytes(word.encode(), name_seed("text")) for word in WORDS[0][:2]]
    assert found.keys[: found.indptr[1]].tolist() == expected
    names = FORMATS["csv"].find_names([str(tmp_path / "x.csv")], sample.columns, found.keys)
    assert {*names.values()} == {f"text={word}" for words in WORDS for word in words}


@pytest.mark.parametrize("cell", ["ord-{0:x}", "user{0}@example.com", "2024-01-01 10:00:{0}", "https://e.org/a/{0}"])
def test_columns_of_distinct_identifiers_are_left_out(tmp_path: Path, cell: str) -> None:
    sample = sample_of_text(
        tmp_path / "x.csv", "label,a,b\n" + "".join(f"{i % 2},{cell.format(i)},{i / 8}\n" for i in range(99))
    )
    assert sample.columns is not None
    assert sample.columns.names == ["label", "b"]


def test_text_next_to_other_columns_and_in_quotes(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text('y,a,note,n,more\n1,p,"Say ""Hi"", to\nMAX!",2,x\n0,q,,,Été “été”\n0,r,z,bad,z\n')
    columns = Columns("y", ("a",), ("n",), text=("more", "note"))
    found = read(tmp_path / "x.csv", columns)
    words = {name: [*map(str.encode, words)] for name, words in (("note", ["say", "hi", "to", "max"]), ("more", ["x"]))}
    pairs = [(name, hash_bytes(word, name_seed(name))) for name in ("note", "more") for word in words[name]]
    assert found.keys[: found.indptr[1]].tolist() == [
        hash_bytes(b"p", name_seed("a")), *(key for _, key in pairs), name_seed("n")
    ]  # fmt: skip
    assert found.fields is not None
    assert found.fields[: found.indptr[1]].tolist() == [
        field_of("a"),
        *(field_of(name) for name, _ in pairs),
        field_of("n"),
    ]
    assert found.values is not None
    assert found.values[: found.indptr[1]].tolist() == [1] * 6 + [2]
    last = found.keys[found.indptr[1] :].tolist()
    assert last[1:] == [hash_bytes(word, name_seed("more")) for word in ("Été".encode(), "été".encode())]


def test_text_of_parquet_has_the_features_of_csv(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    from pyarrow import csv, parquet

    (tmp_path / "x.csv").write_text(text_rows())
    parquet.write_table(csv.read_csv(tmp_path / "x.csv"), tmp_path / "x.parquet")
    columns = sample_data([tmp_path / "x.parquet"]).columns
    assert columns is not None
    assert columns.text == ("text",)
    one, other = read(tmp_path / "x.csv", columns), read(tmp_path / "x.parquet", columns)
    for name in ("labels", "indptr", "keys", "fields"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


def test_texts_of_one_letter_in_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pyarrow.table({"y": [0, 1] * 500, "grade": ["a", "b"] * 500})
    parquet.write_table(table, tmp_path / "x.parquet")
    found = read(tmp_path / "x.parquet", Columns("y", text=("grade",)))
    seed = name_seed("grade")
    assert found.keys.tolist() == [hash_bytes(b"a", seed), hash_bytes(b"b", seed)] * 500


@settings(deadline=None)
@given(st.lists(st.one_of(st.binary(max_size=30), st.text(max_size=30).map(str.encode)), max_size=8))
def test_the_kernel_of_words_equals_the_reference(texts: list[bytes]) -> None:
    offsets = np.cumsum([0, *map(len, texts)]).astype(np.int64)
    data = np.frombuffer(b"".join(texts), np.uint8)
    words, lengths = np.empty(len(data) + 1, np.uint64), np.empty(len(texts), np.int64)
    count = kernels.split_strings(kernels.read_only(data), kernels.read_only(offsets), np.uint64(5), words, lengths)
    expected = [split_words(text) for text in texts]
    assert lengths.tolist() == list(map(len, expected))
    assert words[:count].tolist() == [hash_bytes(word, 5) for row in expected for word in row]


def test_words_are_runs_of_letters() -> None:
    assert split_words("It's 2 Naïve—cafés, “Ünd” x2y".encode()) == [
        word.encode() for word in ("it", "s", "naïve", "cafés", "Ünd", "x", "y")
    ]


# Given columns.


def test_given_columns_are_used_and_the_other_columns_are_guessed(tmp_path: Path) -> None:
    text = "site,age,zip,note,click\n" + "".join(f"s{i % 4},{i % 50},{i % 7},a b {i},{i % 2}\n" for i in range(200))
    sample = sample_of_text(tmp_path / "x.csv", text, categorical=("age",), ignore=("note",))
    assert sample.columns is not None
    assert sample.columns.categorical == ("site", "age", "zip")
    assert sample.guesses is not None
    assert {guess.name: guess.reason for guess in sample.guesses.guesses if guess.reason in ("named", "ignored")} == {
        "age": "named",
        "note": "ignored",
    }
    only = sample_of_text(tmp_path / "x.csv", text, numeric=("age",), text=("note",), ignore=("*",)).columns
    assert only is not None
    assert only.names == ["click", "age", "note"]
    for options, expected in (
        ({"categorical": ("age",), "numeric": ("1",)}, "--numeric 1: --categorical names this column too"),
        ({"text": ("click",)}, "--text click: this column is the label"),
        ({"ignore": ("nobody",)}, "--ignore nobody: "),
    ):
        with pytest.raises(UsageError, match=expected):
            sample_of_text(tmp_path / "x.csv", text, **options)


def test_predict_skips_a_header_if_the_model_was_trained_without_one(tmp_path: Path) -> None:
    rows = "red,1\nblue,0\n" * 30
    columns = sample_of_text(tmp_path / "x.csv", rows, label="-1").columns
    assert columns is not None
    (tmp_path / "headed.csv").write_text("colour,click\n" + rows)
    found = read(tmp_path / "headed.csv", replace(columns, header="yes"))
    np.testing.assert_array_equal(found.keys, read(tmp_path / "x.csv", columns).keys)
