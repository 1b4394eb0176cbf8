"""The guarantees of each filter: precision, number of bytes, and unbiased results."""

from __future__ import annotations

import dataclasses
import sys
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.filters import (
    FILTERS,
    KKT,
    BFloat16,
    ByteFilter,
    Compress,
    Filter,
    Float16,
    KeyCaching,
    Quantize,
    RandomK,
    RandomSkip,
    RowFilter,
    Significant,
    TopK,
    ValueFilter,
    Zstd,
)
from paceline.filters.base import from_description, parse_filter
from paceline.filters.chance import seed_of
from paceline.filters.keys.caching import KeyLists
from paceline.filters.rows import RowSelection
from paceline.kernels.filters import BLOCK

VALUE_FILTERS: list[ValueFilter] = [Float16(), BFloat16(), *(Quantize(bits) for bits in (8, 4, 2, 1))]
BYTE_FILTERS: list[ByteFilter] = [Compress(), Zstd()]
ROW_FILTERS: list[RowFilter] = [TopK(0.25), RandomK(0.25), RandomSkip(0.25), Significant(1.0), KKT(0.1)]
KEYS = np.arange(1000, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)

floats32 = st.floats(width=32, allow_nan=False, allow_infinity=False)


def through(chosen: ValueFilter, values: np.ndarray[Any, Any], seed: int = 0) -> np.ndarray[Any, Any]:
    data, out = np.empty(chosen.num_bytes(len(values)), np.uint8), np.empty_like(values)
    chosen.encode(values, seed, data)
    chosen.decode(data, out)
    return out


def bound(chosen: ValueFilter, values: np.ndarray[Any, Any]) -> Any:
    """Return the largest error of each decoded value, as documented by the class."""
    exact = np.abs(values.astype(np.float64))
    if isinstance(chosen, Float16):
        return np.maximum(exact * 2.0**-11, 2.0**-25)
    if isinstance(chosen, BFloat16):
        return np.maximum(exact * 2.0**-8, 2.0**-134)
    assert isinstance(chosen, Quantize)
    tops = np.array([exact[start : start + BLOCK].max() for start in range(0, len(exact), BLOCK)])
    step = np.repeat(tops / {8: 127, 4: 7, 2: 1, 1: 0.5}[chosen.bits], BLOCK)[: len(exact)]
    return step * (1 + 1e-5) + 1e-44


@pytest.mark.parametrize("chosen", VALUE_FILTERS, ids=str)
@given(values=st.lists(floats32, min_size=1, max_size=600), seed=st.integers(0, 2**64 - 1))
def test_the_error_of_decoded_values_is_within_the_bound(chosen: ValueFilter, values: list[float], seed: int) -> None:
    given_values = np.array(values, np.float32)
    if isinstance(chosen, Float16):
        given_values = np.clip(given_values, -65504, 65504)
    with np.errstate(over="ignore"):
        found = through(chosen, given_values, seed)
    errors = np.abs(found.astype(np.float64) - given_values.astype(np.float64))
    assert (errors <= bound(chosen, given_values)).all()
    if not (isinstance(chosen, Quantize) and chosen.bits == 1):
        assert (found[given_values == 0] == 0).all()


@pytest.mark.parametrize(
    "chosen", [value_filter for value_filter in VALUE_FILTERS if value_filter.preserves == "unbiased"], ids=str
)
def test_random_rounding_is_unbiased(chosen: ValueFilter) -> None:
    random = np.random.default_rng(7)
    values, count = random.standard_normal(300).astype(np.float32), 2000
    found = np.array([through(chosen, values, seed_of(7, seed)) for seed in range(count)], np.float64)
    deviation = bound(chosen, values) / 2 / np.sqrt(count)  # of the mean, if one deviation is at most half a step
    assert (np.abs(found.mean(axis=0) - values) < 5 * deviation).all()
    assert (through(chosen, values, 1) == through(chosen, values, 1)).all()


@pytest.mark.parametrize(
    ("chosen", "bits"), [(Float16(), 16), (BFloat16(), 16), *((Quantize(bits), bits) for bits in (8, 4, 2, 1))], ids=str
)
def test_values_take_the_declared_number_of_bytes(chosen: ValueFilter, bits: int) -> None:
    assert chosen.num_bytes(1024) <= 1024 * bits // 8 + 16
    assert chosen.num_bytes(0) == 0


@pytest.mark.parametrize("seed", [5, None], ids=["random rounding", "nearest rounding"])
@pytest.mark.parametrize("chosen", VALUE_FILTERS, ids=str)
def test_non_finite_values_stay_non_finite(chosen: ValueFilter, seed: int | None) -> None:
    values = np.array([1.0, np.nan, -np.inf, np.inf, 3.4e38, 0, 0], np.float32)
    values.view(np.uint32)[5:] = (
        0x7F800001,
        0xFF80FFFF,
    )  # these NaNs have the upper half of infinity
    data, found = np.empty(chosen.num_bytes(len(values)), np.uint8), np.empty_like(values)
    chosen.encode(values, seed, data)
    chosen.decode(data, found)
    if isinstance(chosen, Quantize):
        assert np.isnan(found).all()
        return
    assert np.isnan(found[[1, 5, 6]]).all()
    assert found[[2, 3]].tolist() == [-np.inf, np.inf]
    assert np.isfinite(found[[0, 4]]).all()


@pytest.mark.parametrize("chosen", [row_filter for row_filter in ROW_FILTERS if row_filter.keeps_residual], ids=str)
@pytest.mark.parametrize("dim", [1, 3])
def test_withheld_rows_are_sent_later(chosen: RowFilter, dim: int) -> None:
    random = np.random.default_rng(3)
    selection = RowSelection(chosen, dim)
    pushed, sent = np.zeros((1000, dim), np.float64), np.zeros((1000, dim), np.float64)
    most = 0
    for clock in range(40):
        places = random.permutation(1000)[:300]
        values = random.standard_normal((300, dim)).astype(np.float32)
        pushed[places] += values
        keys, rows = selection.choose(KEYS[places], values.reshape(-1), clock, seed_of(clock))
        most = max(most, len(keys))
        at = np.searchsorted(np.sort(KEYS), keys)
        sent[np.argsort(KEYS)[at]] += rows.reshape(-1, dim)
    held = selection.held_back(KEYS)
    np.testing.assert_allclose(sent + held, pushed, atol=1e-4)
    assert 0 < most < 300 or isinstance(chosen, (Significant, KKT))
    if isinstance(chosen, Significant):
        assert (np.abs(held) <= chosen.threshold).all()


@pytest.mark.parametrize("chosen", ROW_FILTERS, ids=str)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_rows_are_sent_immediately_and_not_stored(chosen: RowFilter, value: float) -> None:
    selection = RowSelection(chosen, 2)
    for clock in range(20):  # random skipping sends a quarter of the rows
        values = np.full((8, 2), 0.5, np.float32)
        values[[3, 5], 1] = value
        keys, rows = selection.choose(KEYS[:8], values.reshape(-1), clock, seed_of(clock))
        sent = dict(zip(keys.tolist(), rows.reshape(-1, 2), strict=True))
        for key in KEYS[[3, 5]].tolist():
            np.testing.assert_equal(sent.pop(key)[1], np.float32(value))
        assert np.isfinite(list(sent.values())).all()
    held = selection.held_back(KEYS[:8])
    assert np.isfinite(held).all()
    assert (held[[3, 5]] == 0).all()
    for clock in range(20, 60):
        keys, rows = selection.choose(KEYS[3:4], np.full(2, 9, np.float32), clock, seed_of(clock))
        assert np.isfinite(rows).all()
        if len(keys):
            break
    assert len(keys) == 1


def test_rows_overflowing_with_the_residual_are_sent() -> None:
    selection, huge = RowSelection(RandomK(1e-9), 1), np.full(1, 3e38, np.float32)
    assert len(selection.choose(KEYS[:1], huge, 0, seed_of(0))[0]) == 0
    assert selection.choose(KEYS[:1], huge, 1, seed_of(1))[1].tolist() == [np.inf]
    assert selection.held_back(KEYS[:1]).tolist() == [[0.0]]


def test_top_k_chooses_the_largest_values() -> None:
    _, rows = RowSelection(TopK(0.3), 1).choose(KEYS[:10], np.arange(10, dtype=np.float32) - 5, 0, 0)
    assert sorted(rows.tolist()) == [-5, -4, 4]
    assert len(RowSelection(TopK(0.01), 1).choose(KEYS[:3], np.ones(3, np.float32), 0, 0)[0]) == 1
    assert len(RowSelection(TopK(0.5), 1).choose(KEYS[:0], np.ones(0, np.float32), 0, 0)[0]) == 0


def test_random_skipping_is_unbiased() -> None:
    values, sums = np.ones(1000, np.float32), np.zeros(1000)
    selection = RowSelection(RandomSkip(0.25), 1)
    for seed in range(400):
        keys, rows = selection.choose(KEYS, values, 0, seed_of(seed))
        assert (rows == 4).all()
        sums[np.isin(KEYS, keys)] += 4
    assert np.abs(sums / 400 - 1).max() < 5 * np.sqrt(3 / 400)


def test_rows_at_0_are_sent_if_their_weights_may_change() -> None:
    selection = RowSelection(KKT(margin=0.25), 2)
    rows = np.array([[0.5, 0.1], [0.1, -0.8], [0.1, 0.1]], np.float32)

    def sent(values: np.ndarray[Any, Any]) -> dict[int, list[float]]:
        keys, found = selection.choose(np.arange(3, dtype=np.uint64), values.reshape(-1), 0, 0, l1=1.0)
        return dict(zip(keys.tolist(), found.reshape(-1, 2).round(6).tolist(), strict=True))

    assert len(sent(rows)) == 3  # their weights are unknown
    selection.record_pulled(np.arange(3, dtype=np.uint64), np.array([0, 0, 0, 0, 0, 0.5], np.float32))
    assert sorted(sent(rows)) == [1, 2]
    assert sorted(sent(rows)) == [
        0,
        1,
        2,
    ]  # row 0: its residual; row 1: not pulled since its push
    assert (selection.held_back(np.arange(3, dtype=np.uint64)) == 0).all()
    selection.record_pulled(np.arange(2, dtype=np.uint64), np.zeros(4, np.float32))
    assert sorted(sent(rows / 10)) == [2]
    selection.record_pulled(np.arange(1, dtype=np.uint64), np.array([0, -0.1], np.float32))
    found = sent(rows / 10)
    assert sorted(found) == [0, 2]
    np.testing.assert_allclose(found[0], rows[0] / 5, rtol=1e-5)


def test_the_threshold_falls_with_the_clock() -> None:
    selection = RowSelection(Significant(1.0), 1)
    values = np.full(3, 0.3, np.float32)
    assert len(selection.choose(KEYS[:3], values, 0, 0)[0]) == 0
    keys, rows = selection.choose(KEYS[:3], values, 1, 0)
    assert len(keys) == 3
    np.testing.assert_allclose(rows, 0.6, rtol=1e-6)


@pytest.mark.parametrize("chosen", BYTE_FILTERS, ids=str)
@given(data=st.binary(max_size=2000))
def test_decompressed_bytes_equal_the_original_bytes(data: bytes, chosen: ByteFilter) -> None:
    given_bytes = np.frombuffer(data, np.uint8)
    packed = chosen.pack(given_bytes)
    assert chosen.unpack(packed, len(data)).tobytes() == data
    for wrong in (len(data) + 1, len(data) - 1):
        if wrong >= 0:
            with pytest.raises(ValueError, match=r"size is not"):
                chosen.unpack(packed, wrong)


@pytest.mark.parametrize("chosen", BYTE_FILTERS, ids=str)
def test_decompressed_long_messages_equal_the_original_messages(chosen: ByteFilter) -> None:
    random = np.random.default_rng(7)
    data = np.concatenate([random.integers(0, 256, 300_000), np.zeros(1 << 20)]).astype(np.uint8)
    packed = chosen.pack(data)
    assert len(packed) < 320_000
    np.testing.assert_array_equal(chosen.unpack(packed, len(data)), data)
    for damaged in (packed[:-1], packed[: len(packed) // 2]):
        with pytest.raises(ValueError, match=r"."):
            chosen.unpack(damaged.copy(), len(data))


@pytest.mark.parametrize("chosen", BYTE_FILTERS, ids=str)
def test_compressed_data_of_excessive_size_is_not_decompressed(chosen: ByteFilter) -> None:
    bomb = chosen.pack(np.zeros(1 << 26, np.uint8))
    tracemalloc.start()
    try:
        for num_bytes in (0, 100):
            with pytest.raises(ValueError, match=r"size is not"):
                chosen.unpack(bomb, num_bytes)
            with pytest.raises(ValueError, match=r"."):
                chosen.unpack(bomb[5:].copy(), num_bytes)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_zstd_names_the_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    described = Zstd().describe()
    monkeypatch.setitem(sys.modules, "zstandard", None)
    for make in (Zstd, lambda: parse_filter("zstd:3"), lambda: from_description(described)):
        with pytest.raises(UsageError, match=r"zstd needs zstandard, .* pip install 'paceline\[zstd\]'"):
            make()


def test_both_ends_evict_the_same_lists() -> None:
    sender, receiver = KeyLists(80), KeyLists(80)
    for number, size in enumerate((4, 4, 1, 5)):
        for lists in (sender, receiver):
            if number == 2:
                lists.use(b"0")
            lists.add(str(number).encode(), size)
    assert [str(number).encode() in sender for number in range(4)] == [True, False, True, True]
    assert sender.num_bytes == receiver.num_bytes == 80
    sender.clear()
    assert b"0" not in sender


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("quantize:4", Quantize(4)),
        ("quantize", Quantize(8)),
        ("top-k:0.1", TopK(0.1)),
        ("significant:2", Significant(2.0)),
        ("zstd:7", Zstd(7)),
        (" key-caching ", KeyCaching()),
    ],
)
def test_the_text_of_a_filter_can_be_parsed(text: str, expected: Filter) -> None:
    assert parse_filter(text) == expected
    assert parse_filter(str(expected)) == expected
    assert from_description(expected.describe()) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("zip", "filter 'zip' is unknown: expected one of bfloat16, compress"),
        ("quantize:3", "expected 8, 4, 2 or 1"),
        ("quantize:8:1", "has 2 settings: quantize takes 1 \\(bits\\)"),
        ("quantize:x", "bits must be a number, got 'x'"),
        ("top-k", "lacks settings: top-k:SHARE"),
        ("top-k:0", "above 0 and at most 1"),
        ("random-skip:nan", "above 0 and at most 1"),
        ("significant:inf", "expected a number"),
        ("kkt:1", r"KKT\(margin=1.0\): expected a number from 0 to below 1"),
        ("compress:0", "from 1 to 9"),
        ("zstd:20", "from 1 to 19"),
        ("key-caching:0", "from 1 to 4096"),
    ],
)
def test_invalid_filters_are_rejected(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_filter(text)


def test_both_ends_must_have_the_same_version() -> None:
    fields = Quantize(8).describe()
    with pytest.raises(UsageError, match="version 1 here and version 2 there"):
        from_description({**fields, "version": 2})
    with pytest.raises(UsageError, match="filter 'other' is unknown here, only"):
        from_description({**fields, "name": "other"})
    with pytest.raises(UsageError, match="does not take these settings"):
        from_description({**fields, "more": 1})
    with pytest.raises(UsageError, match="not numbers"):
        from_description({**fields, "bits": [8]})


def test_every_filter_declares_its_properties() -> None:
    for name, kind in FILTERS.items():
        assert kind.name == name
        assert kind.preserves in ("exact", "unbiased", "bounded", "nothing")
        assert dataclasses.is_dataclass(kind)
    with pytest.raises(UsageError, match="filter 'compress' already exists"):
        type("Other", (Compress,), {})
