"""The text kernels equal their references in Python."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.random_examples import num_examples
from tests.reference import text as reference

from paceline.kernels.hashing import hash_bytes, name_seed
from paceline.kernels.text import lines as kernels
from paceline.kernels.text.criteo import criteo_tables, field_seed, integer_category, log_thresholds
from paceline.kernels.text.values import powers_of_ten

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")  # without the JIT

Criteo = tuple[list[float], list[list[int]], list[tuple[int, int]]]
Libsvm = tuple[list[float], list[list[int]], list[list[float]], list[tuple[int, int]]]


def padded(text: bytes) -> npt.NDArray[np.uint8]:
    return np.frombuffer(bytearray(text + b"\xa5" * 16), dtype=np.uint8)


def run_criteo(text: bytes, capacity: int = 50, start: int = 0) -> tuple[Criteo, list[int]]:
    labels, keys = np.full(capacity, -1, np.float32), np.zeros(capacity * 39, np.uint64)
    bad_at, bad_why, counts = np.zeros(20, np.int64), np.zeros(20, np.int64), np.zeros(5, np.int64)
    tables = criteo_tables()
    kernels.parse_criteo(padded(text), start, len(text), 1, *tables, labels, keys, bad_at, bad_why, counts)
    rows, bad = int(counts[0]), int(counts[1])
    table: list[list[int]] = keys[: rows * 39].reshape(rows, 39).tolist()
    found = list(zip(bad_at[:bad].tolist(), bad_why[:bad].tolist(), strict=True))
    return (labels[:rows].tolist(), table, found), counts.tolist()


def expect_criteo(text: bytes) -> Criteo:
    labels, keys, bad, at = [], [], [], 0
    for line in text.split(b"\n")[:-1]:
        result = reference.criteo_line(line)
        if isinstance(result, int):
            bad.append((at, result))
        elif result is not None:
            labels.append(result[0])
            keys.append(result[1])
        at += len(line) + 1
    return labels, keys, bad


def run_libsvm(text: bytes, rows_room: int = 50, pairs_room: int = 500) -> tuple[Libsvm, list[int]]:
    labels, indptr = np.full(rows_room, -1, np.float32), np.zeros(rows_room + 1, np.int64)
    keys, values = np.zeros(pairs_room, np.uint64), np.zeros(pairs_room, np.float32)
    bad_at, bad_why, counts = np.zeros(20, np.int64), np.zeros(20, np.int64), np.zeros(5, np.int64)
    powers = powers_of_ten()
    kernels.parse_libsvm(padded(text), 0, len(text), 1, powers, labels, indptr, keys, values, bad_at, bad_why, counts)
    rows, bad = int(counts[0]), int(counts[1])
    spans = [slice(int(indptr[i]), int(indptr[i + 1])) for i in range(rows)]
    found = list(zip(bad_at[:bad].tolist(), bad_why[:bad].tolist(), strict=True))
    parts = ([keys[span].tolist() for span in spans], [values[span].tolist() for span in spans])
    return (labels[:rows].tolist(), *parts, found), counts.tolist()


def check_libsvm(text: bytes) -> None:
    (labels, keys, values, bad), _ = run_libsvm(text)
    rows, faults, at = [], [], 0
    for line in text.split(b"\n")[:-1]:
        result = reference.libsvm_line(line)
        if isinstance(result, int):
            faults.append((at, result))
        elif result is not None:
            rows.append(result)
        at += len(line) + 1
    assert bad == faults
    assert (labels, keys) == ([row[0] for row in rows], [row[1] for row in rows])
    for values_found, python_values in zip(values, rows, strict=True):
        assert_within_an_ulp(values_found, python_values[2])


def assert_within_an_ulp(values_found: list[float], python_values: list[float]) -> None:
    a, b = np.array(values_found, np.float32), np.array(python_values, np.float32)
    assert np.isfinite(a).all()
    assert (np.abs(a.astype(float) - b.astype(float)) <= np.spacing(np.abs(b)).astype(float)).all(), (a, b)


def row(label: bytes = b"1", integers: bytes = b"7", category: bytes = b"05db9164") -> bytes:
    return b"\t".join([label, *[integers] * 13, *[category] * 26])


GOLDEN = {
    b"": 0x11255066E6F2082F,
    b"a": 0x587C1C62F82A4274,
    b"05db9164": 0xAFAE71BA77CE6A27,
    b"longer than eight bytes": 0xC79186BBD9773F23,
}


def test_the_hash_of_a_string_never_changes() -> None:
    keys = {string: hash_bytes(string, 1) for string in GOLDEN}
    assert keys == GOLDEN
    assert name_seed("site") == 0x70470CB9346DE738
    assert [field_seed(field) for field in (1, 39)] == [0xBA90995B8A5688A9, 0xC3761FF8E99371AC]


def test_the_keys_of_a_row_never_change() -> None:
    (_, [keys], _), _ = run_criteo(row(integers=b"100") + b"\n")
    assert [keys[at] for at in (0, 38)] == [0xB4F54BB9588D515C, 0x027C6789959282B6]


def test_hashes_spread_over_all_bits() -> None:
    strings = [str(i).encode() for i in range(20000)]
    keys = reference.hash_strings(strings, 5)
    assert len(set(keys.tolist())) == len(strings)
    bits = (keys[:, np.newaxis] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)
    assert np.abs(bits.mean(axis=0) - 0.5).max() < 0.02
    flipped = reference.hash_strings([bytes([string[0] ^ 1]) + string[1:] for string in strings], 5) ^ keys
    changed = ((flipped[:, np.newaxis] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)).mean(axis=0)
    assert np.abs(changed - 0.5).max() < 0.02


def test_log_thresholds_are_where_the_squared_logarithm_passes_an_integer() -> None:
    with localcontext() as context:
        context.prec = 40
        thresholds = log_thresholds()
        exact = [Decimal(k).sqrt().exp() for k in range(1, len(thresholds) + 2)]
        assert thresholds == tuple(math.ceil(threshold) for threshold in exact[:-1])
        assert exact[-1] > 10**18
        for k, threshold in enumerate(thresholds[::37]):
            square = k * 37 + 1
            assert Decimal(threshold).ln() ** 2 >= square
            assert Decimal(threshold - 1).ln() ** 2 < square
    assert [integer_category(x) for x in (-5, 0, 1, 2, 3, 8, 23255, 10**18 - 1)] == [
        -5, 0, 1, 2, 11, 14, 111, 1727,
    ]  # fmt: skip


CRITEO_CASES = {
    "a row": row() + b"\n",
    "all fields empty": b"0" + b"\t" * 39 + b"\n",
    "carriage returns": row() + b"\r\n" + row(category=b"") + b"\r\n",
    "integers": b"".join(row(integers=str(x).encode()) + b"\n" for x in (-3, 0, 2, 3, 4095, 4096, 10**18 - 1)),
    "categories of other lengths": b"".join(
        row(category="xyzäöü-1234567890".encode()[:n]) + b"\n" for n in range(1, 19)
    ),
    "invalid UTF-8": row(category=b"\xff\xfe\x80") + b"\n",
    "blank lines": b"\n\r\n  \n" + row() + b"\n\n",
    "too few fields": row()[:-9] + b"\n" + row() + b"\n",
    "too many fields": row() + b"\tx\n" + row() + b"\n",
    "ends among the integers": b"1\t1\t2\n1\t\n1\t1\t-\n1\t\r\n",
    "labels": b"2" + row()[1:] + b"\n" + b"11" + row()[1:] + b"\n1\n\t\n1 \n",
    "bad integers": b"".join(row(integers=x) + b"\n" for x in (b"1.5", b"-", b"+1", b"1" * 19, b"--1", b" 1", b"a")),
    "control bytes": row(category=b"a\0b") + b"\n" + row(category=b"1234567\x01") + b"\n" + row() + b"\n",
    "a carriage return in the middle": row(category=b"ab\rcd") + b"\n",
}


@pytest.mark.parametrize("text", CRITEO_CASES.values(), ids=CRITEO_CASES.keys())
def test_criteo(text: bytes) -> None:
    found, counts = run_criteo(text)
    assert found == expect_criteo(text)
    assert counts[kernels.POSITION] == len(text)


_integer = st.one_of(st.just(b""), st.integers(-(10**6), 10**18).map(lambda x: str(x).encode()))
_category = st.one_of(st.just(b""), st.lists(st.integers(32, 255), min_size=1, max_size=20).map(bytes))
_row = st.builds(
    lambda label, integers, categories, end: b"\t".join([label, *integers, *categories]) + end,
    st.sampled_from([b"0", b"1"]),
    st.lists(_integer, min_size=13, max_size=13),
    st.lists(_category, min_size=26, max_size=26),
    st.sampled_from([b"", b"\r", b"\t"]),
)
_dirt = st.lists(st.sampled_from([b"0", b"1", b"\t", b"\r", b" ", b"a", b"\0", b"-"]), max_size=50).map(b"".join)


@num_examples(60)
@given(st.lists(st.one_of(_row, _row, _dirt), max_size=8))
def test_criteo_on_random_lines(lines: list[bytes]) -> None:
    text = b"".join(line + b"\n" for line in lines)
    assert run_criteo(text)[0] == expect_criteo(text)


@pytest.mark.parametrize("capacity", [1, 2, 3])
def test_the_criteo_parser_continues_at_the_position(capacity: int) -> None:
    text = b"".join(row(b"01"[i % 2 : i % 2 + 1], str(i).encode()) + b"\n" for i in range(7))
    labels, keys, at = [], [], 0
    while at < len(text):
        (parsed_labels, parsed_keys, _), counts = run_criteo(text, capacity, at)
        assert len(parsed_labels) <= capacity
        labels += parsed_labels
        keys += parsed_keys
        at = counts[kernels.POSITION]
    assert (labels, keys, []) == expect_criteo(text)


LIBSVM_CASES = {
    "a row": b"+1 3:1 11:0.5\n-1 2:1e-3\n",
    "labels": b"0 1:1\n1 1:1\n0.5 1:1\n-3e2 1:1\n+2. 1:1\n",
    "label alone": b"1\n0  \n1\t\n",
    "comments": b"# a comment\n1 1:2 # three:4\n0#x\n1 1:2#\n  # x\n",
    "query numbers": b"1 qid:17 1:2\n0 qid: 1:2\n1 qid:x 1:2\n1 1:1 qid:3\n1 qid:1:2\n",
    "carriage returns and blanks": b"1 1:2\r\n\r\n \t \n  0\t 5:6  7:8 \t\r\n",
    "large indices": b"1 18446744073709551615:1\n1 18446744073709551616:1\n1 99999999999999999999999:1\n",
    "zeros before an index": b"1 00000000000000000000000018446744073709551615:1\n",
    "bad labels": b"x 1:1\nnan 1:1\ninf\n1e\n1x 1:2\n+ 1:1\n. 1:1\n1e400 1:1\n1:1 2:1\n",
    "bad indices": b"1 a:1\n1 :1\n1 -1:1\n1 5\n1 5 6:1\n1 1.5:2\n",
    "bad values": b"1 1:\n1 1:x\n1 1:nan\n1 1:-inf\n1 1:1e39\n1 1:3.5e38\n1 1:2:3\n1 1:0x1\n1 1:1_0\n",
    "bad exponents": b"1 1:1e+\n1 1:1e\n1 1:e1\n1 1:1e1.5\n",
    "NUL": b"1 1:1\0\n\0\n",
    "not UTF-8": b"\xff\xfe 1:1\n",
}


@pytest.mark.parametrize("text", LIBSVM_CASES.values(), ids=LIBSVM_CASES.keys())
def test_libsvm(text: bytes) -> None:
    check_libsvm(text)


_number = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False, width=32).map(repr),
    st.floats().map(repr),
    st.from_regex(r"[+-]?[0-9]{0,25}(\.[0-9]{0,45})?([eE][+-]?[0-9]{1,3})?", fullmatch=True),
)
_pairs = st.lists(st.tuples(st.integers(0, 2**65), _number), max_size=5)


@num_examples(150)
@given(st.lists(st.tuples(_number, st.lists(st.tuples(st.integers(0, 2**65), _number), max_size=5)), max_size=6))
def test_libsvm_on_random_numbers(rows: list[tuple[str, list[tuple[int, str]]]]) -> None:
    lines = [" ".join([label, *(f"{index}:{value}" for index, value in pairs)]) for label, pairs in rows]
    check_libsvm("".join(f"{line}\n" for line in lines).encode())


@num_examples(150)
@given(st.lists(st.sampled_from(list("01:.e- \t\n#qid\r\0")), max_size=60).map("".join))
def test_libsvm_on_random_text(text: str) -> None:
    check_libsvm(text.encode() + b"\n")


def test_libsvm_stops_before_a_row_that_does_not_fit() -> None:
    text = b"1 1:1 2:2\n0 3:3 4:4\n"
    found, counts = run_libsvm(text, pairs_room=3)
    assert (found[1], counts[kernels.POSITION]) == ([[1, 2]], 10)
    found, counts = run_libsvm(text, pairs_room=1)
    assert (found[1], counts[kernels.POSITION]) == ([], 0)
    found, counts = run_libsvm(text, rows_room=1)
    assert (found[1], counts[kernels.POSITION]) == ([[1, 2]], 10)


def test_libsvm_reports_whether_all_values_are_one() -> None:
    assert run_libsvm(b"1 1:1 2:1.0\n")[1][kernels.ALL_ONES] == 1
    assert run_libsvm(b"1 1:1 2:1.5\n")[1][kernels.ALL_ONES] == 0


def arrow(strings: list[bytes]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    offsets = np.cumsum([0, *(len(string) for string in strings)]).astype(np.int64)
    data = np.frombuffer(b"".join(strings), np.uint8)
    return kernels.read_only(data), kernels.read_only(offsets)


@settings(deadline=None)
@given(st.lists(st.binary(max_size=40), max_size=20), st.integers(0, 2**64 - 1))
def test_hash_strings(strings: list[bytes], seed: int) -> None:
    out = np.zeros(2 * len(strings) + 1, np.uint64)
    kernels.hash_strings(*arrow(strings), np.uint64(seed), out, 1, 2)
    assert out[1::2].tolist() == reference.hash_strings(strings, seed).tolist()
    assert not out[::2].any()


@settings(deadline=None)
@given(st.lists(st.one_of(_number, st.sampled_from(["", " ", " 1 ", "x", "1 2", "1\r"])), max_size=20))
def test_floats_are_parsed_like_in_python(texts: list[str]) -> None:
    numbers, status = np.zeros(len(texts)), np.zeros(len(texts), np.uint8)
    data, offsets = arrow([text.encode() for text in texts])
    kernels.parse_floats(data, offsets, powers_of_ten(), numbers, status)
    for text, number, code in zip(texts, numbers.tolist(), status.tolist(), strict=True):
        expected = reference.parse_float(text.strip(" \r").encode())
        missing = not text.strip(" \r")
        good = kernels.FLOAT_OK if expected is not None else kernels.FLOAT_BAD
        assert code == (kernels.FLOAT_MISSING if missing else good)
        assert_within_an_ulp([number], [expected or 0.0])


@num_examples(300)
@given(
    st.lists(
        st.tuples(st.sampled_from(["", "-", "+"]), st.from_regex(r"[0-9]{1,15}", fullmatch=True), st.integers(0, 15)),
        min_size=1,
        max_size=30,
    ),
    st.integers(-7, 12),
)
def test_numbers_of_up_to_15_digits_equal_the_numbers_of_python(
    parts: list[tuple[str, str, int]], exponent: int
) -> None:
    """Equal to the last bit, because digits and power of ten are exact (Clinger 1990)."""
    texts = []
    for sign, digits, point in parts:
        text = digits if point >= len(digits) else f"{digits[:point]}.{digits[point:]}"
        texts.append(f"{sign}{text}" + (f"e{exponent}" if exponent else ""))
    texts = [text for text in texts if abs(float(text)) < 3e38 and any(map(str.isdigit, text.split("e")[0]))]
    numbers, status = np.zeros(len(texts)), np.zeros(len(texts), np.uint8)
    kernels.parse_floats(*arrow([text.encode() for text in texts]), powers_of_ten(), numbers, status)
    assert (status == kernels.FLOAT_OK).all()
    for text, number in zip(texts, numbers.tolist(), strict=True):
        assert number.hex() == float(text).hex(), text


def test_compiling_gives_every_kernel_one_signature() -> None:
    kernels.compile_kernels()
    for kernel in kernels.KERNELS:
        assert len(getattr(kernel, "signatures", [0])) == 1, kernel
