"""Vowpal Wabbit's text and JSON lines: kernels against plain readers, bad lines, shards, files."""

from __future__ import annotations

import dataclasses
import json
import random
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.random_examples import num_examples
from tests.reference.json_lines import json_line
from tests.reference.text import vw_line

from paceline.data import Batch, Columns, detect_format, open_dataset
from paceline.data.formats import FORMATS, json_lines
from paceline.data.formats.json_lines import (
    describe_json,
    find_json_columns,
    json_parser,
    sample_objects,
    walk_fields,
)
from paceline.data.formats.vw import vw_parser
from paceline.data.text import Parse
from paceline.errors import DataError, UsageError
from paceline.kernels.hashing import field_of, hash_bytes, name_seed
from paceline.kernels.text.codes import (
    BAD_JSON,
    BAD_JSON_CLASS,
    BAD_JSON_LABEL,
    BAD_JSON_NUMBER,
    BAD_JSON_WEIGHT,
    BAD_VALUE,
    BAD_VW_BASE,
    BAD_VW_HEAD,
    BAD_VW_WEIGHT,
    MISSING_LABEL,
    MISSING_WEIGHT,
    NO_BAR,
    TOO_DEEP,
)
from paceline.kernels.text.values import number_text

COLUMNS = Columns("y", ("id",), weight="w", is_open=True)
Row = tuple[float | None, float, list[int], list[float], list[int]]


def parse(parser: Parse, text: bytes) -> tuple[list[Row], list[int]]:
    """The rows, and the reasons of the first bad lines."""
    buffer = np.zeros(len(text) + 64, np.uint8)
    buffer[: len(text)] = np.frombuffer(text, np.uint8)
    found = parser(buffer, 0, len(text))
    assert found.position == len(text)
    batch = found.batch
    assert batch.fields is not None
    values = np.ones(len(batch.keys)) if batch.values is None else batch.values
    weights = np.ones(batch.num_examples) if batch.weights is None else batch.weights
    rows: list[Row] = []
    for row in range(batch.num_examples):
        pairs = slice(batch.indptr[row], batch.indptr[row + 1])
        label = float(batch.labels[row])
        rows.append(
            (
                None if np.isnan(label) else label,
                float(weights[row]),
                batch.keys[pairs].tolist(),
                values[pairs].tolist(),
                batch.fields[pairs].tolist(),
            )
        )
    assert found.num_bad >= len(found.bad)
    return rows, [why for _, why in found.bad]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b"1 |a x y:2", (1, 1, ["a x", "a y"], [1, 2])),
        (b"-1 0.5 tag|a:3 x:2 y|b z", (-1, 0.5, ["a x", "a y", "b z"], [6, 3, 1])),
        (b"1 2 0 'it|x", (1, 2, [], [])),
        (b"'only_tag| x", (None, 1, [" x"], [1])),
        (b"| x\t y \r", (None, 1, [" x", " y"], [1, 1])),
        (b"  0.25 'tag | x", (0.25, 1, [" x"], [1])),
        (b"1|a", (None, 1, [], [])),
        (b"1 |a b|c d|e:2|f g:-1e2", (1, 1, ["a b", "c d", "f g"], [1, 1, -100])),
        (b"2 |\xc3\xa4 \xff", (2, 1, [(b"\xc3\xa4", b"\xff")], [1])),
        (b"1 x|a", (1, 1, [], [])),
        (b"1 2", NO_BAR),
        (b"yes |a b", BAD_VW_HEAD),
        (b"1 1 0 0 |a", BAD_VW_HEAD),
        (b"1 'tag 1 |a", BAD_VW_HEAD),
        (b"1 -1 |a", BAD_VW_WEIGHT),
        (b"1 1 0.5 |a", BAD_VW_BASE),
        (b"1 |a :1 b :0.5 :2|:3 :4", (1, 1, ["a 0", "a b", "a 1", "a 2", " 0"], [1, 1, 0.5, 2, 12])),
        (b"1 |a x:", BAD_VALUE),
        (b"1 |a x:1:2", BAD_VALUE),
        (b"1 |a x:nan", BAD_VALUE),
        (b"1 |a:1e30 x:1e30", BAD_VALUE),
    ],
)
def test_lines_of_vowpal_wabbit(line: bytes, expected: Any) -> None:
    rows, bad = parse(vw_parser(needs_label=False), b"\n" + line + b"\n")
    assert (rows[0] if rows else bad[0]) == vw_line(line)
    if isinstance(expected, int):
        assert bad == [expected]
    else:
        label, weight, names, values = expected
        pairs = [tuple(part.encode() for part in name.split(" ")) if isinstance(name, str) else name for name in names]
        keys = [hash_bytes(inner, hash_bytes(outer, 0)) for outer, inner in pairs]
        assert rows == [(label, weight, keys, values, [hash_bytes(outer, 0) & 0xFFFFFFFF for outer, _ in pairs])]


_vw_words = st.sampled_from(
    [b" ", b" ", b"|", b" |", b"1", b"-1", b"0", b":", b":2", b":1e9", b"'t", b"a", b"bc", b"name", b"\t", b"\r", b".5"]
)


@num_examples(200)
@given(st.lists(st.lists(_vw_words, max_size=12), min_size=1, max_size=6))
def test_the_vw_kernel_equals_the_reference(words: list[list[bytes]]) -> None:
    lines = [b"".join(line) for line in words]
    expected = [vw_line(line) for line in lines]
    rows, bad = parse(vw_parser(needs_label=False), b"\n".join(lines) + b"\n")
    assert rows == [entry for entry in expected if isinstance(entry, tuple)]
    assert bad == [entry for entry in expected if isinstance(entry, int)][:5]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"y": 1, "a": 2.5, "b": "x"}', (1, 1, [("a", None), ("b", "x")], [2.5, 1])),
        ('{"a": [1, 2.0, "x", true, null], "y": true}', (1, 1, [("a", t) for t in ("1", "2", "x", "true")], [1] * 4)),
        ('{"u": {"v": {"w": 3}, "x": false}, "y": "No"}', (0, 1, [("u.v.w", None), ("u.x", "false")], [3, 1])),
        (
            '{"a": [{"b": 1, "c": "d"}, [2]], "w": "0.5"}',
            (None, 0.5, [("a.b", None), ("a.c", "d"), ("a", "2")], [1, 1, 1]),
        ),
        ('  { } ', (None, 1, [], [])),
        (r'{"\u0061\n": "\ud83d\ude00\"\\\/\b\f\n\r\t\u00e9\u20ac"}', (None, 1, [("a\n", '😀"\\/\b\f\n\r\té€')], [1])),
        (
            '{"id": 12345678901234567890, "big": 1e5}',
            (None, 1, [("id", "12345678901234567890"), ("big", None)], [1, 1e5]),
        ),
        ('{"a": NaN, "b": null, "y": null}', (None, 1, [], [])),
        ('{"a": 1} x', BAD_JSON),
        ('{"a": 1,}', BAD_JSON),
        ('{"a": [1,]}', BAD_JSON),
        ('{"a": [1}', BAD_JSON),
        ('{"a" 1}', BAD_JSON),
        ('{"a": 01}', BAD_JSON),
        ('{"a": 1.}', BAD_JSON),
        ('{"a": +1}', BAD_JSON),
        ('{"a": Infinity}', BAD_JSON),
        ('{"a": "\t"}', BAD_JSON),
        ('{"a": "\\x"}', BAD_JSON),
        ('{"a": "\\u12"}', BAD_JSON),
        ('{"a": "x', BAD_JSON),
        ('[1, 2]', BAD_JSON),
        ('{"a": 1e99}', BAD_JSON_NUMBER),
        ('{"y": "maybe"}', BAD_JSON_LABEL),
        ('{"w": -1}', BAD_JSON_WEIGHT),
        ('{"w": null}', MISSING_WEIGHT),
        ('{"y": 1, "u": {"w": 1}}', MISSING_WEIGHT),
        ('{"a": ' * 40 + "1" + "}" * 40, TOO_DEEP),
        ('{"a": ' * 32 + "1" + "}" * 32, (None, 1, [(".".join("a" * 32), None)], [1])),
    ],
)  # fmt: skip
def test_lines_of_json(line: str, expected: Any) -> None:
    columns = (
        COLUMNS if expected == MISSING_WEIGHT or '], "w"' in line or line.startswith('{"w"') else COLUMNS.unweighted
    )
    rows, bad = parse(json_parser(columns, needs_label=False), line.encode() + b"\n")
    assert (rows[0] if rows else bad[0]) == json_line(line, "y", columns.weight, ("id",))
    if isinstance(expected, int):
        assert bad == [expected]
    else:
        label, weight, pairs, values = expected
        keys = [name_seed(path) if text is None else hash_bytes(text.encode(), name_seed(path)) for path, text in pairs]
        fields = [field_of(path.partition(".")[0]) for path, _ in pairs]
        assert rows == [(label, weight, keys, values, fields)]


_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats(-1e30, 1e30) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)


NUMBERS = r"-?(0|[1-9][0-9]{0,12})(\.[0-9]{1,9})?([eE][+-]?[0-9]{1,2})?"


@pytest.mark.parametrize(
    ("label", "expected"),
    [('"benign"', 0), ('" malignant\\n"', 1), ('"m\\u0061lignant"', 1), ('"Benign"', None), ('""', None), ("1", None)],
)
def test_word_labels_of_json(label: str, expected: int | None) -> None:
    columns, line = (
        dataclasses.replace(COLUMNS.unweighted, classes=("benign", "malignant")),
        f'{{"y": {label}, "a": 2}}',
    )
    rows, bad = parse(json_parser(columns, needs_label=True), line.encode() + b"\n")
    assert (rows[0] if rows else bad[0]) == json_line(line, "y", "", ("id",), columns.classes)
    assert ([row[0] for row in rows], bad) == (([], [BAD_JSON_CLASS]) if expected is None else ([expected], []))


def text_of_numbers(numbers: list[str]) -> list[str]:
    """Return the texts of a list's numbers from the kernel, which must find the keys of these texts."""
    rows, bad = parse(json_parser(COLUMNS.unweighted, needs_label=False), f'{{"a": [{", ".join(numbers)}]}}\n'.encode())
    assert not bad
    expected = list(map(number_text, numbers))
    assert rows[0][2] == [hash_bytes(text.encode(), name_seed("a")) for text in expected]
    return expected


def test_a_number_is_the_same_category_in_any_notation() -> None:
    assert text_of_numbers(["1000", "1000.0", "1e3", "1E+3", "10.00e2", "0.01e5"]) == ["1000"] * 6
    assert text_of_numbers(["0.5", "0.50", "5e-1", "-50E-2", "0.0", "-0e9"]) == ["0.5"] * 3 + ["-0.5", "0", "0"]
    assert text_of_numbers(["1e-6", "1e-7", "12.5e-9", "1e18", "1.5e20"]) == [
        *("0.000001", "1e-7", "1.25e-8", "1e+18", "1.5e+20")
    ]
    assert text_of_numbers(["12345678901234567890", "-7"]) == [
        "12345678901234567890",
        "-7",
    ]  # unchanged


@num_examples(100)
@given(
    st.lists(st.from_regex(r"-?(0|[1-9][0-9]{0,12})(\.[0-9]{1,9})?([eE][+-]?[0-9]{1,2})?", fullmatch=True), min_size=1)
)
def test_numbers_in_lists(numbers: list[str]) -> None:
    numbers = [number for number in numbers if abs(float(number)) < 1e38]
    for number, text in zip(numbers, text_of_numbers(numbers), strict=True):
        assert Decimal(text) == Decimal(number)
        assert text == number_text(text)


def test_categories_equal_the_parquet_categories(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    numbers = [1000.0, 0.5, 1.25e-8, 1e17, -7.0, 0.000001, 1e22]
    parquet.write_table(arrow.table({"y": [0, 1], "a": [numbers, []]}), tmp_path / "x.parquet")
    (tmp_path / "x.json").write_text(f'{{"y": 0, "a": {json.dumps(numbers)}}}\n{{"y": 1}}\n')
    found = [read_all(tmp_path / name) for name in ("x.parquet", "x.json")]
    assert found[0].keys.tolist() == found[1].keys.tolist()
    assert found[0].fields is not None
    assert found[0].fields.tolist() == [field_of("a")] * len(numbers)


@num_examples(150)
@given(
    st.lists(st.dictionaries(st.sampled_from(["y", "w", "id", "a", "é"]) | st.text(max_size=3), _values), max_size=4),
    st.booleans(),
    st.booleans(),
)
def test_the_json_kernel_equals_the_reference(objects: list[dict[str, Any]], ascii: bool, is_weighted: bool) -> None:
    lines = [json.dumps(row, ensure_ascii=ascii) for row in objects]
    columns = COLUMNS if is_weighted else COLUMNS.unweighted
    expected = [json_line(line, "y", columns.weight, ("id",)) for line in lines]
    text = "".join(line + "\n" for line in lines).encode("utf-8", "surrogatepass")
    rows, bad = parse(json_parser(columns, needs_label=False), text)
    assert rows == [entry for entry in expected if isinstance(entry, tuple)]
    assert bad == [entry for entry in expected if isinstance(entry, int)][:5]


@pytest.mark.parametrize("format", ["vw", "jsonl"])
def test_kernel_and_reference_agree_on_hostile_bytes(format: str) -> None:
    """The kernel and the reference agree whether a line is a row, malformed or blank."""
    parser = vw_parser(needs_label=False) if format == "vw" else json_parser(COLUMNS, needs_label=False)
    seed = (
        b"1 0.5 'tag|ns:2 a:1 b |c d" if format == "vw" else
        b'{"y": 1, "a": [1, "x", {"b": null}], "c\\u00e4": "d\\n", "w": 2.5e1, "t": true}'
    )  # fmt: skip
    generator = random.Random(format)
    for _ in range(1000):
        line = bytearray(seed)
        for _ in range(generator.randrange(1, 5)):
            at = generator.randrange(len(line) + 1)
            match generator.randrange(3):
                case 0:
                    line[at : at + generator.randrange(4)] = b""
                case 1:
                    line[at:at] = bytes(generator.choice(b"{}[]\",:\\|' \t0u\xff\x00e-.") for _ in range(3))
                case _:
                    line[at : at + 1] = bytes([generator.randrange(256)])
        text = bytes(line).replace(b"\n", b"")
        rows, bad = parse(parser, text + b"\n")
        if format == "vw":
            expected: Any = vw_line(text)
        else:
            try:
                expected = json_line(text.decode(), "y", "w", ("id",))
            except UnicodeDecodeError:
                continue
        assert (rows, bool(bad)) == ([expected] if isinstance(expected, tuple) else [], isinstance(expected, int)), text


def read_all(path: Path, **options: Any) -> Batch:
    with open_dataset(path, **options) as dataset:
        return Batch.concatenate(list(dataset.batches(100)))


VW = b"".join(b"%d %d 'r%d|a x%d y:%d|b z\n" % (i % 2, 1 + i % 3, i, i % 50, i % 7) for i in range(500))
JSON = b"".join(b'{"click": %d, "site": "s%d", "n": {"k": %d.5}}\n' % (i % 2, i % 9, i) for i in range(500))


@pytest.mark.parametrize(("format", "text"), [("vw", VW), ("jsonl", JSON)])
def test_files_are_detected_read_and_cut_into_shards(tmp_path: Path, format: str, text: bytes) -> None:
    path = tmp_path / "x"
    path.write_bytes(text)
    assert detect_format(path) == format
    whole = read_all(path)
    assert whole.labels.tolist() == [0, 1] * 250
    columns = open_dataset(path).columns
    assert FORMATS[format].sample_labels([str(path)], columns) == {0: 250, 1: 250}
    for shard_bytes in (1, 37, 1000, 10**6):
        with open_dataset(path, shard_bytes=shard_bytes) as dataset:
            parts = [batch for shard in range(dataset.num_shards(0) or 0) for batch in dataset.read(0, shard, 7)]
        found = Batch.concatenate(parts)
        np.testing.assert_array_equal(found.keys, whole.keys)
        np.testing.assert_array_equal(found.indptr, whole.indptr)
    if format == "vw":
        assert whole.weights is not None
        assert whole.weights[:4].tolist() == [1, 2, 3, 1]
    path.write_bytes(text + b"what is this\n" + (b"| a\n" if format == "vw" else b'{"site": "s"}\n'))
    with open_dataset(path) as dataset:
        assert sum(batch.num_examples for batch in dataset.batches(100)) == 500
        assert dataset.bad_lines.count == 2
        assert dataset.bad_lines.first[1].reason == "it has no label"
    found = read_all(path, needs_labels=False)
    assert found.num_examples == 501
    assert np.isnan(found.labels[-1])
    with pytest.raises(DataError, match="line 501 is malformed"):
        read_all(path, strict=True)


def test_names_of_features(tmp_path: Path) -> None:
    for text, expected in (
        (VW, {"a^x3", "a^y", "b^z"}),
        (JSON, {"site=s3", "n.k"}),
        (b'{"click": 1, "l": [1.50, true], "n": null}\n' * 3, {"l=1.5", "l=true"}),
    ):
        path = tmp_path / "x"
        path.write_bytes(text)
        with open_dataset(path) as dataset:
            keys = np.unique(next(dataset.batches(500)).keys)
            names = FORMATS[dataset.format].find_names(dataset.files, dataset.columns, keys)
        assert expected <= set(names.values())
        assert len(names) == len(keys)


def test_fields_of_json_are_described(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text('{"label": 1, "a": {"b": 2.5}, "c": ["x", "y"], "d": null, "e": "f"}\n' * 5 + "no json\n")
    objects = sample_objects([str(path)])
    columns = open_dataset(path).columns
    assert columns == Columns("label", is_open=True)
    guesses = describe_json(objects, columns)
    assert [
        (guess.name, guess.kind, guess.reason, guess.num_distinct, guess.examples) for guess in guesses.guesses
    ] == [
        ("label", "label", "", 1, ("1",)),
        ("a.b", "numeric", "", 1, ("2.5",)),
        ("c", "categorical", "in lists", 2, ("x", "y")),
        ("d", "left out", "", 0, ()),
        ("e", "categorical", "", 1, ("f",)),
    ]


def test_fields_of_identifiers_are_not_numeric(tmp_path: Path) -> None:
    path = tmp_path / "x"
    rows = ({"y": i % 2, "u": {"id": (i * 2654435761) % 10**10}, "n": i % 60 + i % 7, "ids": [i]} for i in range(500))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert open_dataset(path).columns == Columns("y", ("u.id",), is_open=True)


def test_mismatches_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text('{"a": 1}\n' * 5)
    with pytest.raises(
        UsageError, match=r"no field named label, click, clicked, target, y in the sampled rows. Its fields are a"
    ):
        open_dataset(path)
    with pytest.raises(UsageError, match="Leave --numeric out"):
        open_dataset(path, "jsonl", Columns("a", numeric=("b",)))
    path.write_text('[{"a": 1}]\n')
    with pytest.raises(DataError, match="looks like a JSON array"):
        open_dataset(path)


def test_a_missing_label_is_a_separate_reason() -> None:
    rows, bad = parse(vw_parser(needs_label=True), b"| a\n1 | a\n")
    assert rows == [(1.0, 1.0, [hash_bytes(b"a", hash_bytes(b"", 0))], [1.0], [0])]
    assert bad == [MISSING_LABEL]


def test_the_columns_of_json_are_found_in_at_most_two_walks_per_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_walks = 0
    walk = walk_fields

    def count_walks(row: Any) -> Any:
        nonlocal num_walks
        num_walks += 1
        return walk(row)

    monkeypatch.setattr(json_lines, "walk_fields", count_walks)
    objects = [
        {"label": row % 2, "code": 100_000 + row, **{f"w{row}-{at}": 1 for at in range(20)}} for row in range(200)
    ]
    columns = find_json_columns("rows.jsonl", objects)
    assert num_walks <= 2 * len(objects)
    assert columns.label == "label"
    assert columns.categorical == ("code",)
