"""Chains: what a message looks like behind several filters, and what a peer may not say."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import ProtocolError, UsageError
from paceline.filters import (
    ByteFilter,
    Compress,
    DeltaKeys,
    FilterChain,
    Float16,
    KeyCaching,
    KeyFilter,
    KeyNumbers,
    Quantize,
    RandomSkip,
    TopK,
    base,
    parse_filters,
)
from paceline.filters.chain import HEAD_BYTES, UnknownKeysError, from_descriptions
from paceline.filters.modules import modules_of
from paceline.ps.client.filtered import TableFilters

CHAINS = [
    FilterChain(),
    FilterChain([KeyCaching()]),
    FilterChain([DeltaKeys()]),
    FilterChain([Float16()]),
    FilterChain([KeyNumbers()]),
    FilterChain([KeyCaching(), KeyNumbers(), Quantize(8), Compress()]),
    FilterChain([Compress()]),
    FilterChain([KeyCaching(), DeltaKeys(), Quantize(4), Compress()]),
    FilterChain([DeltaKeys(), Quantize(1), Compress(9)]),
]
MOST = 1 << 20


def keys_of(numbers: list[int], *, rising: bool) -> np.ndarray[Any, Any]:
    return np.array(sorted(numbers) if rising else numbers, np.uint64)


@pytest.mark.parametrize("chain", CHAINS, ids=str)
@settings(max_examples=50)
@given(
    numbers=st.lists(st.integers(0, 2**64 - 1), max_size=300, unique=True),
    dim=st.sampled_from([0, 1, 3]),
    seed=st.integers(0, 2**64 - 1),
)
def test_messages_come_back(chain: FilterChain, numbers: list[int], dim: int, seed: int) -> None:
    keys = keys_of(numbers, rising=chain.sorts)
    values = np.random.default_rng(seed).standard_normal(dim * len(keys)).astype(np.float32)
    ours, theirs = chain.memory(sends=True), chain.memory(sends=False)
    sizes = []
    for _ in range(2):
        body = chain.encode(keys, values, seed, ours)
        sizes.append(len(body))
        found = chain.decode(body, theirs, MOST)
        assert not found.is_range
        np.testing.assert_array_equal(found.keys, keys)
        np.testing.assert_array_equal(found.values, chain.round_trip(values, seed))
        if chain.is_exact:
            np.testing.assert_array_equal(found.values, values)
        assert found.body.tobytes() == found.keys.tobytes() + found.values.tobytes()
    assert ours is None or len(keys) <= 40 or sizes[1] < sizes[0]
    answer, out = chain.encode_values(values, seed), np.empty_like(values)
    chain.decode_values(answer, out)
    np.testing.assert_array_equal(out, chain.round_trip(values, seed))


def test_ranges_keep_their_bounds() -> None:
    chain = FilterChain([DeltaKeys(), Quantize(8), Compress()])
    body = chain.encode(np.array([5, 2], np.uint64), np.ones(7, np.float32), 0, None, is_range=True)
    found = chain.decode(body, None, MOST)
    assert found.is_range
    assert found.keys.tolist() == [5, 2]
    np.testing.assert_allclose(found.values, 1, rtol=1e-6)


def test_a_list_that_was_forgotten_is_asked_for() -> None:
    chain = FilterChain([KeyCaching()])
    ours, theirs = chain.memory(sends=True), chain.memory(sends=False)
    assert theirs is not None
    keys, nothing = np.arange(10, dtype=np.uint64), np.empty(0, np.float32)
    chain.decode(chain.encode(keys, nothing, 0, ours), theirs, MOST)
    known = chain.encode(keys, nothing, 0, ours)
    assert len(known) == HEAD_BYTES + 16
    assert chain.decode(known, theirs, MOST).keys.tolist() == keys.tolist()
    theirs.clear()
    with pytest.raises(UnknownKeysError):
        chain.decode(known, theirs, MOST)


@pytest.mark.parametrize("chain", CHAINS, ids=str)
@given(data=st.data())
def test_whatever_a_peer_sends_is_refused_or_read(chain: FilterChain, data: st.DataObject) -> None:
    keys = np.arange(20, dtype=np.uint64)
    memory = chain.memory(sends=False)
    body = bytearray(chain.encode(keys, np.ones(20, np.float32), 1, chain.memory(sends=True)))
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    cut = np.frombuffer(body, np.uint8)[: data.draw(st.integers(0, len(body)))].copy()
    out = np.empty(20, np.float32)
    for read in (lambda: chain.decode(cut, memory, MOST), lambda: chain.decode_values(cut, out)):
        try:
            read()
        except (ProtocolError, UnknownKeysError):
            pass


def test_numbers_are_those_of_both_ends() -> None:
    chain = FilterChain([KeyNumbers(1)])
    ours, theirs = chain.memory(sends=True), chain.memory(sends=False)
    assert theirs is not None
    nothing = np.empty(0, np.float32)
    random = np.random.default_rng(1)
    for size in (200_000, 3000, 3000, 10):
        keys = random.integers(0, 300_000, size, np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        body = chain.encode(keys, nothing, 0, ours)
        np.testing.assert_array_equal(chain.decode(body, theirs, 1 << 24).keys, keys)
    assert theirs.num_bytes == 1 << 20
    lost = chain.encode(keys, nothing, 0, ours)
    theirs.clear()
    with pytest.raises(UnknownKeysError):
        chain.decode(lost, theirs, MOST)
    new = chain.encode(keys + np.uint64(1), nothing, 0, chain.memory(sends=True))
    chain.decode(new, theirs, MOST)
    with pytest.raises(UnknownKeysError):
        chain.decode(new, theirs, MOST)


def test_no_more_memory_is_taken_than_allowed() -> None:
    chain = FilterChain([Compress()])
    body = chain.encode(np.arange(1000, dtype=np.uint64), np.ones(1000, np.float32), 0, None)
    with pytest.raises(ProtocolError, match="1000 keys in 8000 bytes"):
        chain.decode(body, None, 11_999)


@pytest.mark.parametrize(
    ("filters", "message"),
    [
        ([Compress(), Quantize(8)], "expected each once, those that choose rows first"),
        ([Quantize(8), KeyCaching()], "expected each once"),
        ([Compress(), Compress(2)], "expected each once"),
        ([Float16(), Quantize(8)], "float16 and quantize do the same"),
        ([DeltaKeys(), KeyNumbers()], "delta-keys and key-numbers do the same"),
        (["quantize:8"], "expected filters such as"),
    ],
)
def test_what_is_no_chain(filters: list[Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        FilterChain(filters)


def test_what_is_no_filter_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "FILTERS", dict(base.FILTERS))

    @dataclasses.dataclass(frozen=True)
    class Halves(KeyFilter):
        name: ClassVar[str] = "halves"

    with pytest.raises(UsageError, match="'halves' is one of keys, and there are only key-caching"):
        FilterChain([Halves()])

    class Plain(ByteFilter):
        name: ClassVar[str] = "plain"
        pack = unpack = None  # type: ignore[assignment]

    with pytest.raises(UsageError, match="'plain': its class is no dataclass"):
        FilterChain([Plain()])
    assert modules_of([KeyCaching(), Halves()]) == [__name__]


def test_chains_have_a_text() -> None:
    chain = FilterChain([TopK(0.5), RandomSkip(0.5), KeyCaching(), Quantize(2), Compress()])
    assert str(chain) == "top-k:0.5,random-skip:0.5,key-caching:64,quantize:2,compress:1"
    assert str(parse_filters(str(chain))) == str(chain)
    assert str(from_descriptions(chain.describe())) == str(chain)
    assert not parse_filters("")
    assert not chain.is_exact


@pytest.mark.parametrize(("bits", "pulled"), [(8, 8), (4, 4), (2, 4), (1, 4)])
def test_what_is_pulled_keeps_four_bits_unless_it_is_said_otherwise(bits: int, pulled: int) -> None:
    """Of pulled values no error is kept, so fewer bits would be a model of noise."""
    requests = [KeyCaching(), Quantize(bits=bits)]
    assert str(TableFilters(requests).answers) == f"quantize:{pulled}"
    assert str(TableFilters(requests, [Quantize(bits=bits)]).answers) == f"quantize:{bits}"
