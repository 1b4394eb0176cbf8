"""The csv kernels equal a reference in Python that uses the csv module."""

from __future__ import annotations

import csv
import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.random_examples import num_examples
from tests.reference import text as reference

from paceline.kernels.hashing import name_seed
from paceline.kernels.text import csv as kernels
from paceline.kernels.text.codes import (
    BAD_QUOTE,
    BAD_WIDTH,
    DETAIL,
    LABEL_SLOT,
    NO_LABEL,
    NO_LABEL_NUMBER,
    NO_NUMBER,
    NO_WEIGHT,
    NO_WEIGHT_NUMBER,
    OPTIONAL_LABEL_SLOT,
    SKIPPED_SLOT,
    WEIGHT_SLOT,
)
from paceline.kernels.text.values import powers_of_ten

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")  # without the JIT

SLOTS = [1, LABEL_SLOT, 3, SKIPPED_SLOT, 0, 2, WEIGHT_SLOT]
SEEDS = [name_seed(name) for name in "abcd"]
NUM_NUMERIC = 2
CELLS = st.one_of(
    st.sampled_from(["", "1", "0", "-2.5", " 7 ", "NA", "nan", "True", "x", '"', '""', '"a', 'a"b', "1e5", "12345678"]),
    st.sampled_from(["exactly8", "nine char", "\n", "\r\n", "a\rb", "inf", "1e999", "\t5", "ä€😀"]),
    st.text(st.sampled_from(' ,;\t"\r\nab1.-'), max_size=20),
    st.integers(-(10**12), 10**12).map(str),
)
ROWS = st.lists(st.one_of(st.lists(CELLS, min_size=7, max_size=7), st.lists(CELLS, min_size=1, max_size=8)), max_size=8)
Rows = list[tuple[float, float, list[int], list[float]]]


def padded(text: bytes) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.frombuffer(bytearray(text + b"\n" + b"\xa5" * 16), dtype=np.uint8)


def parse(
    text: bytes,
    separator: str,
    *,
    last: bool = True,
    capacity: int = 20,
    start: int = 0,
    limit: int = 1 << 40,
    classes: tuple[str, ...] = (),
    slots: list[int] = SLOTS,
    trims: bool = False,
) -> tuple[Rows, list[int], int]:
    """Return the rows, the errors of malformed rows, and the position; `text` is the input of the kernel."""
    array = padded(text)
    labels, weights = np.empty(capacity, np.float32), np.empty(capacity, np.float32)
    indptr = np.empty(capacity + 1, np.int64)
    keys, values = np.empty(capacity * len(SEEDS), np.uint64), np.empty(capacity * len(SEEDS), np.float32)
    words, fields = np.empty(len(text), np.uint64), np.empty(len(text), np.uint32)
    ends = np.empty(capacity + 1, np.int64)
    bad_at, bad_why, counts = np.empty(50, np.int64), np.empty(50, np.int64), np.empty(kernels.NUM_COUNTS, np.int64)
    kernels.parse_csv(
        *(array, start, len(text), limit, int(last), ord(separator), int(trims)),
        *(np.array(slots), np.array(SEEDS, np.uint64), np.zeros((4, NUM_NUMERIC)), powers_of_ten()),
        *(
            np.array([name_seed(word) for word in classes], np.uint64),
            np.array(SEEDS[:2], np.uint64),
            np.empty(len(array), np.uint8),
            labels,
            weights,
            indptr,
            keys,
            values,
            words,
            fields,
            ends,
            bad_at,
            bad_why,
            counts,
        ),
    )
    count, bad, position, pairs = counts.tolist()
    assert indptr[count] == pairs
    rows = [
        (float(labels[i]), float(weights[i]), keys[a:b].tolist(), values[a:b].tolist())
        for i, (a, b) in enumerate(zip(indptr[:count].tolist(), indptr[1 : count + 1].tolist(), strict=True))
    ]
    return rows, bad_why[:bad].tolist(), position


def expect(
    text: bytes, separator: str, classes: tuple[str, ...] = (), slots: list[int] = SLOTS, *, trims: bool = False
) -> tuple[Rows, list[int]]:
    rows, bad = [], []
    for cells in csv.reader(io.StringIO(text.decode(), newline=""), delimiter=separator):
        if cells:
            found = reference.csv_row(cells, slots, SEEDS, NUM_NUMERIC, classes, trims=trims)
            if isinstance(found, int):
                bad.append(found)
            else:
                rows.append(found)
    return rows, bad


@num_examples(400)
@given(
    rows=ROWS,
    separator=st.sampled_from(",;\t"),
    end=st.sampled_from(["\n", "\r\n", "\r"]),
    quoting=st.booleans(),
    trims=st.booleans(),
)
def test_numbers_written_by_python_are_read_exactly(
    rows: list[list[str]], separator: str, end: str, quoting: bool, trims: bool
) -> None:
    out = io.StringIO(newline="")
    if quoting:
        csv.writer(out, delimiter=separator, lineterminator=end, quoting=csv.QUOTE_ALL).writerows(rows)
    else:
        csv.writer(out, delimiter=separator, lineterminator=end).writerows(rows)
    text = out.getvalue().encode()
    assert parse(text + b"\n", separator, trims=trims)[:2] == expect(text, separator, trims=trims)


@num_examples(400)
@given(text=st.text(st.sampled_from(',"\r\nab1.'), max_size=60))
def test_rows_are_parsed_as_by_pythons_csv(text: str) -> None:
    """Python closes an unclosed quote at the end; the kernel reports this row as malformed."""
    found, bad, _ = parse(text.encode() + b"\n", ",")
    if bad and bad[-1] == BAD_QUOTE:
        bad.pop()
        rows, faults = expect(text.encode(), ",")
        assert len(rows) + len(faults) == len(found) + len(bad) + 1
        assert (found, bad) == (rows[: len(found)], faults[: len(bad)])
    else:
        assert (found, bad) == expect(text.encode(), ",")


@num_examples(200)
@given(rows=ROWS, cut=st.integers(0, 400), capacity=st.integers(1, 3))
def test_an_unfinished_row_waits_for_more_text(rows: list[list[str]], cut: int, capacity: int) -> None:
    out = io.StringIO(newline="")
    csv.writer(out, lineterminator="\n").writerows(rows)
    text = out.getvalue().encode() + b"\n"
    cut = min(cut, len(text))
    whole, bad, _ = parse(text, ",")
    first, first_bad, position = parse(text[:cut], ",", last=False)
    assert position <= cut
    tail, tail_bad, end = parse(text, ",", start=position)
    assert (first + tail, first_bad + tail_bad, end) == (whole, bad, len(text))
    at, pieces = 0, []
    while at < len(text):
        piece, _, at = parse(text, ",", start=at, capacity=capacity)
        pieces += piece
    assert pieces == whole


@num_examples(200)
@given(rows=ROWS, limit=st.integers(0, 300))
def test_rows_before_and_after_a_limit(rows: list[list[str]], limit: int) -> None:
    out = io.StringIO(newline="")
    csv.writer(out, lineterminator="\n").writerows(rows)
    text = out.getvalue().encode() + b"\n"
    limit = min(limit, len(text))
    whole, bad, _ = parse(text, ",")
    array = padded(text)
    reached = kernels.skip_rows(array, 0, len(text), limit, 44, np.empty(len(array), np.uint8))
    assert reached >= limit
    before, bad_before, _ = parse(text, ",", limit=limit)
    second, second_bad, _ = parse(text, ",", start=reached)
    assert (before + second, bad_before + second_bad) == (whole, bad)


def test_errors_of_rows_have_a_reason_and_a_column() -> None:
    bad = [b"a,1,2,,b,c,1", b"a,,2,,b,3,1", b"a,x,2,,b,3,1", b"a,1,2,,b,3,", b"a,1,2,,b,3,-1"]
    bad += [b"a,1", b"a,1,2,,b,3,4,5", b'"a,1,2,,b,3']
    _, why, _ = parse(b"\n".join(bad) + b"\n", ",")
    assert [divmod(code, DETAIL) for code in why] == [
        (5, NO_NUMBER),
        (1, NO_LABEL),
        (1, NO_LABEL_NUMBER),
        (6, NO_WEIGHT),
        (6, NO_WEIGHT_NUMBER),
        (2, BAD_WIDTH),
        (8, BAD_WIDTH),
        (0, BAD_QUOTE),
    ]


@num_examples(150)
@given(
    cells=st.lists(
        st.from_regex(r"-?[0-9]{0,9}\.?[0-9]{0,9}", fullmatch=True).filter(lambda cell: any(map(str.isdigit, cell))),
        min_size=1,
        max_size=20,
    )
)
def test_numbers_equal_the_numbers_of_python(cells: list[str]) -> None:
    """All bits of the float32 are equal, for cells shorter and longer than a machine word."""
    text = "".join(f"x,1,{cell},,y,7,1\n" for cell in cells).encode()
    rows, bad, _ = parse(text, ",")
    assert not bad
    for cell, (_, _, _, values) in zip(cells, rows, strict=True):
        assert np.float32(values[-1]).tobytes() == np.float32(float(cell)).tobytes(), cell


@num_examples(100)
@given(rows=st.lists(st.tuples(st.sampled_from(["ham", " spam\t", "egg", "", "Ham", "1", "a long word; two"]), CELLS)))
def test_word_labels(rows: list[tuple[str, str]]) -> None:
    out = io.StringIO(newline="")
    csv.writer(out).writerows(["0", label, "1", cell, "a", "2", "1"] for label, cell in rows)
    text, classes = out.getvalue().encode(), ("egg", "ham", "spam", "a long word; two")
    found, bad, _ = parse(text + b"\n", ",", capacity=len(rows) + 1, classes=classes)
    assert (found, bad) == expect(text, ",", classes)
    known = [classes.index(label.strip()) for label, _ in rows if label.strip() in classes]
    assert [label for label, *_ in found] == known


@pytest.mark.parametrize("classes", [(), ("egg", "na")])
def test_labels_may_be_missing(classes: tuple[str, ...]) -> None:
    num_missing = 9 if classes else 10  # with these classes, "na" is a label
    labels = ["", "1", " NA ", "na", "N/A", "nan", "null", "None", "?", ".", "yes", "x", "egg", '"NA"', "0"]
    text = "".join(f"a,{label},2,,b,3,1\n" for label in labels).encode()
    slots = [OPTIONAL_LABEL_SLOT if slot == LABEL_SLOT else slot for slot in SLOTS]
    found, bad, _ = parse(text + b"\n", ",", classes=classes, slots=slots)
    rows, faults = expect(text, ",", classes, slots)
    np.testing.assert_array_equal([label for label, *_ in found], [label for label, *_ in rows])
    assert ([row[1:] for row in found], bad) == ([row[1:] for row in rows], faults)
    assert sum(label != label for label, *_ in found) == num_missing
    assert len(parse(text + b"\n", ",", classes=classes)[0]) == len(found) - num_missing
