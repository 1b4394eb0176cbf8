"""Chains: messages that pass several filters, and invalid messages of a peer."""

from __future__ import annotations

import dataclasses
import types
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.random_examples import num_examples

from paceline.errors import ProtocolError, UsageError
from paceline.filters import (
    ByteFilter,
    Compress,
    DeltaKeys,
    Filter,
    FilterChain,
    Float16,
    KeyCaching,
    KeyFilter,
    KeyNumbers,
    Quantize,
    RandomSkip,
    RowFilter,
    TopK,
    ValueFilter,
    base,
    parse_filters,
)
from paceline.filters.calls import num_bytes_of, read_values, write_values
from paceline.filters.chain import HEAD_BYTES, UnknownKeysError, from_descriptions
from paceline.filters.modules import modules_of
from paceline.filters.rows import RowSelection
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


def read_of(chain: FilterChain, values: np.ndarray[Any, Any], seed: int) -> np.ndarray[Any, Any]:
    """Return the values as the other end decodes them."""
    data, out = np.empty(num_bytes_of(chain.values, len(values)), np.uint8), np.empty_like(values)
    write_values(chain.values, values, seed, data)
    read_values(chain.values, data, out)
    return out


@pytest.mark.parametrize("chain", CHAINS, ids=str)
@num_examples(50)
@given(
    numbers=st.lists(st.integers(0, 2**64 - 1), max_size=300, unique=True),
    dim=st.sampled_from([0, 1, 3]),
    seed=st.integers(0, 2**64 - 1),
)
def test_decoded_messages_equal_the_sent_messages(chain: FilterChain, numbers: list[int], dim: int, seed: int) -> None:
    keys = keys_of(numbers, rising=chain.sorts)
    values = np.random.default_rng(seed).standard_normal(dim * len(keys)).astype(np.float32)
    sender, receiver = chain.memory(sends=True), chain.memory(sends=False)
    sizes = []
    for _ in range(2):
        body = chain.encode(keys, values, seed, sender)
        sizes.append(len(body))
        found = chain.decode(body, receiver, MOST)
        assert not found.is_range
        np.testing.assert_array_equal(found.keys, keys)
        np.testing.assert_array_equal(found.values, read_of(chain, values, seed))
        if all(chosen.preserves == "exact" for chosen in chain.filters):
            np.testing.assert_array_equal(found.values, values)
        assert found.body.tobytes() == found.keys.tobytes() + found.values.tobytes()
    assert sender is None or len(keys) <= 40 or sizes[1] < sizes[0]
    answer, out = chain.encode_values(values, seed), np.empty_like(values)
    chain.decode_values(answer, out)
    np.testing.assert_array_equal(out, read_of(chain, values, seed))


def test_the_bounds_of_ranges_are_sent_unchanged() -> None:
    chain = FilterChain([DeltaKeys(), Quantize(8), Compress()])
    body = chain.encode(np.array([5, 2], np.uint64), np.ones(7, np.float32), 0, None, is_range=True)
    found = chain.decode(body, None, MOST)
    assert found.is_range
    assert found.keys.tolist() == [5, 2]
    np.testing.assert_allclose(found.values, 1, rtol=1e-6)


def test_a_receiver_without_the_list_of_keys_reports_it() -> None:
    chain = FilterChain([KeyCaching()])
    sender, receiver = chain.memory(sends=True), chain.memory(sends=False)
    assert receiver is not None
    keys, nothing = np.arange(10, dtype=np.uint64), np.empty(0, np.float32)
    chain.decode(chain.encode(keys, nothing, 0, sender), receiver, MOST)
    known = chain.encode(keys, nothing, 0, sender)
    assert len(known) == HEAD_BYTES + 16
    assert chain.decode(known, receiver, MOST).keys.tolist() == keys.tolist()
    receiver.clear()
    with pytest.raises(UnknownKeysError):
        chain.decode(known, receiver, MOST)


@pytest.mark.parametrize("chain", CHAINS, ids=str)
@given(data=st.data())
def test_any_bytes_of_a_peer_are_rejected_or_decoded(chain: FilterChain, data: st.DataObject) -> None:
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


def test_numbers_are_equal_at_both_ends() -> None:
    chain = FilterChain([KeyNumbers(1)])
    sender, receiver = chain.memory(sends=True), chain.memory(sends=False)
    assert receiver is not None
    nothing = np.empty(0, np.float32)
    random = np.random.default_rng(1)
    for size in (200_000, 3000, 3000, 10):
        keys = random.integers(0, 300_000, size, np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        body = chain.encode(keys, nothing, 0, sender)
        np.testing.assert_array_equal(chain.decode(body, receiver, 1 << 24).keys, keys)
    assert receiver.num_bytes == 1 << 20
    lost = chain.encode(keys, nothing, 0, sender)
    receiver.clear()
    with pytest.raises(UnknownKeysError):
        chain.decode(lost, receiver, MOST)
    new = chain.encode(keys + np.uint64(1), nothing, 0, chain.memory(sends=True))
    chain.decode(new, receiver, MOST)
    with pytest.raises(UnknownKeysError):
        chain.decode(new, receiver, MOST)


def test_a_message_that_needs_too_much_memory_is_rejected() -> None:
    chain = FilterChain([Compress()])
    body = chain.encode(np.arange(1000, dtype=np.uint64), np.ones(1000, np.float32), 0, None)
    with pytest.raises(ProtocolError, match="1000 keys in 8000 bytes"):
        chain.decode(body, None, 11_999)


@pytest.mark.parametrize(
    ("filters", "message"),
    [
        ([Compress(), Quantize(8)], "expected each filter once, .* rows, keys"),
        ([Quantize(8), KeyCaching()], "expected each filter once"),
        ([Compress(), Compress(2)], "expected each filter once"),
        ([Float16(), Quantize(8)], "float16 and quantize do the same"),
        ([DeltaKeys(), KeyNumbers()], "delta-keys and key-numbers do the same"),
        (["quantize:8"], "expected filters such as"),
    ],
)
def test_invalid_chains_are_rejected(filters: list[Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        FilterChain(filters)


def test_invalid_user_filters_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "FILTERS", dict(base.FILTERS))

    @dataclasses.dataclass(frozen=True)
    class Halves(KeyFilter):
        name: ClassVar[str] = "halves"

    with pytest.raises(UsageError, match=r"'halves' .*only key-caching"):
        FilterChain([Halves()])

    class Plain(ByteFilter):
        name: ClassVar[str] = "plain"
        pack = unpack = None  # type: ignore[assignment]

    with pytest.raises(UsageError, match=r"'plain': .* not a dataclass"):
        FilterChain([Plain()])
    assert modules_of([KeyCaching(), Halves()]) == [__name__]


def test_the_text_of_a_chain_can_be_parsed() -> None:
    chain = FilterChain([TopK(0.5), RandomSkip(0.5), KeyCaching(), Quantize(2), Compress()])
    assert str(chain) == "top-k:0.5,random-skip:0.5,key-caching:64,quantize:2,compress:1"
    assert str(parse_filters(str(chain))) == str(chain)
    assert str(from_descriptions(chain.describe())) == str(chain)
    assert not parse_filters("")


@pytest.mark.parametrize(("bits", "pulled"), [(8, 8), (4, 4), (2, 4), (1, 4)])
def test_pulled_values_have_at_least_four_bits_by_default(bits: int, pulled: int) -> None:
    """Pulled values have no error feedback, so fewer bits would give a noisy model."""
    requests = [KeyCaching(), Quantize(bits=bits)]
    assert str(TableFilters(requests).answers) == f"quantize:{pulled}"
    assert str(TableFilters(requests, [Quantize(bits=bits)]).answers) == f"quantize:{bits}"


def own(kind: Any, **members: Any) -> Any:
    """Return a user's filter `own` with these members; its other members change no values."""
    defaults: dict[type[Filter], dict[str, Any]] = {
        ValueFilter: {
            "num_bytes": lambda self, count: 4 * count,
            "encode": lambda self, values, seed, out: out.__setitem__(slice(None), values.view(np.uint8)),
            "decode": lambda self, data, out: out.__setitem__(slice(None), data.view(np.float32)),
        },
        ByteFilter: {"pack": lambda self, data: data[:1], "unpack": lambda self, data, num_bytes: data},
        RowFilter: {"keeps_residual": False, "choose": lambda self, keys, rows, clock, seed: np.ones(len(keys), bool)},
    }
    namespace = {"name": "own", "preserves": "nothing", "__annotations__": {}}
    made: Any = types.new_class(
        "Own", (kind,), {"is_abstract": True}, lambda space: space.update(namespace | defaults[kind] | members)
    )
    return dataclasses.dataclass(frozen=True)(made)()


@pytest.mark.parametrize(
    ("kind", "members", "message"),
    [
        (ValueFilter, {"num_bytes": lambda self, count: 3}, r"failed in encode.* of 4 values to 3 bytes: ValueError: "),
        (ValueFilter, {"num_bytes": lambda self, count: "4"}, r"failed in num_bytes\(4\): TypeError: "),
        (ValueFilter, {"num_bytes": lambda self, count: -4}, r": num_bytes\(4\) is -4, expected 0 or more"),
        (
            ValueFilter,
            {"decode": lambda self, data, out: out.__setitem__(slice(None), data)},
            r"failed in decode.* of 16 bytes to 4 values: ValueError: could not broadcast .* \(16,\) into shape \(4,\)",
        ),
        (ByteFilter, {"pack": lambda self, data: b"1"}, r": pack returned bytes, expected an array, uint8 \[n\]"),
        (ByteFilter, {"pack": lambda self, data: 1 / 0}, r"failed in pack\(\) of .* bytes: "),
        (ByteFilter, {"unpack": lambda self, data, n: np.zeros(n)}, r": unpack returned float64 \[\d+\], expected"),
        (
            RowFilter,
            {"choose": lambda self, keys, *_: np.arange(len(keys))},
            r": choose returned int64 \[4\], expected",
        ),
        (RowFilter, {"choose": lambda self, *_: None}, r": choose returned NoneType, expected an array, bool \[4\]"),
        (RowFilter, {"choose": lambda self, *_: 1 / 0}, r"failed in choose\(\) of 4 rows: ZeroDivisionError: "),
        (RowFilter, {"rescale": lambda self: np.nan}, r": rescale\(\) is nan, expected a finite number"),
    ],
)
def test_errors_of_user_filters_name_the_filter(kind: type[Filter], members: dict[str, Any], message: str) -> None:
    keys, values = np.arange(4, dtype=np.uint64), np.ones(4, np.float32)

    def send(chosen: Any) -> Any:
        if kind is RowFilter:
            return RowSelection(chosen, 1).choose(keys, values, 0, 0)[1]
        chain = FilterChain([chosen])
        return chain.decode(chain.encode(keys, values, 0, None, read=values.copy()), None, MOST).values

    with np.errstate(all="ignore"):
        if kind is not ByteFilter:
            np.testing.assert_array_equal(send(own(kind)), values)
        with pytest.raises(UsageError, match=f"filter 'own' ?{message}"):
            send(own(kind, **members))
