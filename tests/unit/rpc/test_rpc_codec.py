"""Arguments of calls: decoded values equal the sent values, and invalid bytes are rejected."""

from __future__ import annotations

import datetime
import enum
import math
import random
import tracemalloc
import uuid
from collections import OrderedDict
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.random_examples import num_examples

from paceline.errors import PacelineError, ProtocolError, UsageError
from paceline.rpc import allow
from paceline.rpc.allowed import Allowed
from paceline.rpc.wire.codec import MAX_DEPTH, Decoding, Encoding
from paceline.rpc.workers import WorkerInfo


@allow
@dataclass
class Point:
    x: float
    y: Any = None
    norm: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self.norm = abs(self.x)


@allow
class Pair(msgspec.Struct):
    left: Any
    right: Any


@allow
class Colour(enum.Enum):
    RED = "r"
    BLUE = "b"


@allow
class Step(NamedTuple):
    at: int
    values: Any


@dataclass
class Unregistered:
    x: int


def body_of(encoding: Encoding) -> memoryview:
    return memoryview(bytearray(b"".join(bytes(memoryview(part)) for part in encoding.parts)))  # type: ignore[arg-type]


def round_trip(value: Any, *, pickle: bool = False) -> Any:
    encoding = Encoding(pickle=pickle)
    meta = encoding.encode(value)
    return Decoding(body_of(encoding), Allowed(), pickle=pickle).decode(meta)


hashable = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=8),
    st.binary(max_size=8),
    st.complex_numbers(allow_nan=False),
    st.datetimes(),
    st.timedeltas(),
    st.uuids(),
    st.decimals(allow_nan=False),
    st.sampled_from(Colour),
)
keys = st.one_of(hashable, st.tuples(hashable, hashable), st.frozensets(hashable, max_size=2))
values = st.recursive(
    st.one_of(hashable, st.sets(hashable, max_size=3), st.builds(Point, st.floats(allow_nan=False))),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.builds(Pair, inner, inner),
    ),
    max_leaves=12,
)


@num_examples(150)
@given(values)
def test_values_return_unchanged(value: Any) -> None:
    assert round_trip(value) == value


@pytest.mark.parametrize("dtype", ["?", "i1", "<i2", ">i4", "u8", "f2", "f4", ">f8", "c8", "c16"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (4, 0, 2)])
def test_decoded_arrays_are_equal_and_writable(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.arange(math.prod(shape)).reshape(shape).astype(dtype)
    back = round_trip([array, {"a": array[..., None]}])
    for found, sent in zip((back[0], back[1]["a"]), (array, array[..., None]), strict=True):
        np.testing.assert_array_equal(found, sent)
        assert found.dtype == sent.dtype.newbyteorder("<")
        assert found.shape == sent.shape
        assert found.flags.writeable


def test_arrays_in_dictionaries_keep_their_keys() -> None:
    sent = {np.int64(3): np.arange(2.0), (np.float32(0.5), 1): np.ones(3)}
    back = round_trip(sent)
    assert list(back) == list(sent)
    for found, item in zip(back.values(), sent.values(), strict=True):
        np.testing.assert_array_equal(found, item)


def test_named_tuples_and_ordered_dictionaries_keep_the_type() -> None:
    back = round_trip([Step(3, np.arange(2.0)), OrderedDict([("b", np.ones(1)), ("a", 2)])])
    assert type(back[0]) is Step
    assert back[0].at == 3
    np.testing.assert_array_equal(back[0].values, np.arange(2.0))
    assert type(back[1]) is OrderedDict
    assert list(back[1]) == ["b", "a"]
    assert round_trip(WorkerInfo("w", 1)) == WorkerInfo("w", 1)
    with pytest.raises(UsageError, match="cannot be created"):
        Decoding(memoryview(b""), Allowed()).decode(packed(9, [f"{__name__}:Step", {"at": 1}]))


def test_arrays_are_sent_separately_from_the_message_without_a_copy() -> None:
    array, odd = np.arange(1000.0), np.arange(3, dtype=np.uint8)
    encoding = Encoding()
    meta = encoding.encode((odd, array))
    assert len(meta) < 100
    assert any(np.shares_memory(np.asarray(part), array) for part in encoding.parts if isinstance(part, np.ndarray))
    body = body_of(encoding)
    assert len(body) == 8 + array.nbytes
    back = Decoding(body, Allowed()).decode(meta)
    assert np.shares_memory(back[1], np.frombuffer(body, np.uint8))
    back[0][:] = 7


def test_non_contiguous_arrays_can_be_sent() -> None:
    array = np.arange(12.0).reshape(3, 4)
    np.testing.assert_array_equal(round_trip(array.T), array.T)
    scalar = round_trip(np.float32(2.5))
    assert type(scalar) is np.float32
    assert scalar == np.float32(2.5)


def test_tensors() -> None:
    torch = pytest.importorskip("torch")
    sent = [torch.arange(6.0).view(2, 3).T, torch.ones(3, dtype=torch.bfloat16), torch.tensor(5), torch.empty(0, 2)]
    for found, tensor in zip(round_trip(sent), sent, strict=True):
        assert found.dtype == tensor.dtype
        assert torch.equal(found, tensor)
    parameter = torch.nn.Parameter(torch.ones(2))
    assert not round_trip(parameter).requires_grad
    encoding = Encoding(records=True)
    meta = encoding.encode([parameter, torch.ones(2)])
    assert encoding.tensors == [parameter]
    decoding = Decoding(body_of(encoding), Allowed())
    back = decoding.decode(meta)
    assert back[0].requires_grad
    assert decoding.tensors[0] is back[0]
    assert len(decoding.tensors) == 1
    for bad in (torch.ones(2).to_sparse(), torch.empty(2, device="meta")):
        with pytest.raises(UsageError, match=r"value\[0\] cannot be sent: it is a tensor o[nf]"):
            Encoding().encode([bad])


def test_other_objects_of_torch() -> None:
    torch = pytest.importorskip("torch")
    sent = [torch.float64, torch.device("cpu"), torch.device("cuda:1"), torch.Size([2, 3])]
    back = round_trip(sent)
    assert back == sent
    assert type(back[3]) is torch.Size
    largest = round_trip(torch.ones(2, 2).max(0))
    assert type(largest) is torch.return_types.max
    assert largest.indices.tolist() == [0, 0]
    round_trip(Step(1, largest))
    key = torch.ones(2)
    (found, item), *_ = round_trip({key: torch.zeros(3)}).items()  # get_gradients returns this form
    assert torch.equal(found, key)
    assert torch.equal(item, torch.zeros(3))
    state = torch.nn.Linear(2, 3).state_dict()
    again = torch.nn.Linear(2, 3)
    again.load_state_dict(round_trip(state))
    assert torch.equal(again.weight, state["weight"])
    with pytest.raises(UsageError, match=r"Linear; .* remote\(\) .*state_dict\(\)"):
        round_trip(again)
    for bad in (
        ["dtype", "load"],
        ["device", "nowhere"],
        ["device", 3],
        ["Size", ["x"]],
        ["Size", 3],
        ["load", "x"],
        ["max", [1]],
    ):
        with pytest.raises(ProtocolError):
            Decoding(memoryview(b""), Allowed()).decode(packed(22, bad))


def test_named_functions_and_other_types() -> None:
    assert round_trip(Point) is Point
    stamp = datetime.datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=datetime.timezone.utc)
    assert round_trip([stamp, datetime.date(2026, 1, 2), datetime.time(1, 2), uuid.UUID(int=5), Decimal("1.5")]) == [
        stamp,
        datetime.date(2026, 1, 2),
        datetime.time(1, 2),
        uuid.UUID(int=5),
        Decimal("1.5"),
    ]


@pytest.mark.parametrize("offset", [{"hours": -5, "seconds": 30}, {"seconds": 1, "microseconds": 7}])
def test_time_zones_of_any_offset(offset: dict[str, int]) -> None:
    zone = datetime.timezone(datetime.timedelta(**offset))
    stamp, time = datetime.datetime(1890, 1, 2, 3, 4, 5, 6, zone), datetime.time(1, 2, 3, 4, zone)
    back = round_trip([stamp, time])
    assert back == [stamp, time]
    assert back[0].utcoffset() == stamp.utcoffset()


class Plain:
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plain)

    __hash__ = None  # type: ignore[assignment]


def test_pickle_is_used_only_if_both_processes_enable_it() -> None:
    assert round_trip([Plain()], pickle=True) == [Plain()]
    with pytest.raises(UsageError, match=r"\[0\]\['k'\]\[1\] cannot be sent: it is of type .*Plain"):
        round_trip([{"k": (1, Plain())}])
    encoding = Encoding(pickle=True)
    meta = encoding.encode(Plain())
    with pytest.raises(UsageError, match="pickle=True"):
        Decoding(memoryview(b""), Allowed()).decode(meta)


def test_errors_about_unsendable_objects_name_the_position() -> None:
    encoding = Encoding()
    with pytest.raises(UsageError, match=r"args\[1\]\.y\[0\] of the call cannot be sent: it is of type .*Plain"):
        encoding.encode_call((), "m:f", (1, Point(1.0, [Plain()])), {})
    with pytest.raises(UsageError, match=r"kwargs\['k'\] of the call cannot be sent: its elements are of dtype object"):
        encoding.encode_call((), "m:f", (), {"k": np.array([object()])})
    deep: Any = 1
    for _ in range(MAX_DEPTH + 1):
        deep = (deep,)
    with pytest.raises(UsageError, match="nested deeper"):
        Encoding().encode(deep)
    with pytest.raises(UsageError, match="whole number of"):
        Encoding().encode(1 << (1 << 20))
    with pytest.raises(UsageError, match=r"value\[0\] cannot be sent: it is a masked array"):
        Encoding().encode([np.ma.masked_array([1.0, 2.0], [True, False])])
    for text in ("\ud800", ("\ud800",), {1: "\ud800"}, {"\ud800": 1}, Point(1.0, "\ud800")):
        with pytest.raises(UsageError, match=r"value.* cannot be sent: it contains .*'utf-8'"):
            Encoding().encode(text)
        with pytest.raises(UsageError, match=r"args.* of the call cannot be sent: it contains"):
            Encoding().encode_call((), "m:f", (text,), {})


def test_a_class_without_permission_is_refused() -> None:
    encoding = Encoding()
    meta = encoding.encode(Unregistered(1))
    with pytest.raises(UsageError, match=r"Unregistered' is not allowed here"):
        Decoding(memoryview(b""), Allowed()).decode(meta)
    found = Decoding(memoryview(b""), Allowed([__name__])).decode(meta)
    assert found == Unregistered(1)


def packed(code: int, value: Any) -> bytes:
    return msgspec.msgpack.encode(msgspec.msgpack.Ext(code, msgspec.msgpack.encode(value)))


@pytest.mark.parametrize(
    "meta",
    [
        packed(7, ["float32", [1 << 61, 8]]),
        packed(7, ["float32", [-1]]),
        packed(7, ["float32", [5]]),
        packed(7, ["object", [1]]),
        packed(7, ["float32"]),
        packed(7, ["float32", [True]]),
        packed(2, [[1]]),
        packed(4, [1]),
        packed(4, [[1], 2]),
        packed(6, 1),
        packed(9, ["os:system", {}]),
        packed(9, [f"{__name__}:Colour", "GREEN"]),
        packed(9, [f"{__name__}:Point", {"z": 1}]),
        packed(9, [f"{__name__}:Point", [1]]),
        packed(10, [99, "x"]),
        packed(10, [0, "no date"]),
        packed(10, [0, 5]),
        packed(10, [2, None]),
        packed(21, ["float32", [4], True]),
        packed(21, ["nothing", [1], True]),
        packed(99, 1),
        msgspec.msgpack.encode(msgspec.msgpack.Ext(8, b"builtins:eval")),
        msgspec.msgpack.encode(msgspec.msgpack.Ext(8, b"\xff")),
        b"\xdd\xff\xff\xff\xff",
        b"",
        b"\x91" * 5000,
    ],
)
def test_invalid_values_are_rejected(meta: bytes) -> None:
    with pytest.raises((ProtocolError, UsageError)):
        Decoding(memoryview(bytearray(8)), Allowed()).decode(meta)


def test_a_body_longer_than_needed_is_rejected() -> None:
    with pytest.raises(ProtocolError, match="body of 8 bytes"):
        Decoding(memoryview(bytearray(8)), Allowed()).decode(msgspec.msgpack.encode(1))


def test_deeply_nested_extensions_are_rejected() -> None:
    data = msgspec.msgpack.encode([1])
    for _ in range(MAX_DEPTH + 5):
        data = msgspec.msgpack.encode([msgspec.msgpack.Ext(1, data)])
    with pytest.raises(ProtocolError, match="nested deeper"):
        Decoding(memoryview(b""), Allowed()).decode(data)


def test_altered_bytes_raise_an_error_and_use_little_memory() -> None:
    rng = random.Random(5)
    encoding = Encoding()
    meta = encoding.encode(
        [1, "text", (2, {3: 4}), {5}, Point(1.0, np.ones(3)), Colour.RED, Decimal(2), 1 << 80, np.arange(5), Point]
    )
    body = body_of(encoding)
    num_read = 0
    tracemalloc.start()
    try:
        for _ in range(3000):
            altered = bytearray(meta)
            for _ in range(rng.randint(1, 4)):
                altered[rng.randrange(len(altered))] = rng.randrange(256)
            if rng.random() < 0.2:
                del altered[rng.randrange(len(altered)) :]
            try:
                Decoding(body, Allowed()).decode(bytes(altered))
                num_read += 1
            except PacelineError:
                pass
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    assert 0 < num_read < 3000


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_without_elements_are_refused_with_the_position() -> None:
    torch = pytest.importorskip("torch")
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    for value, why in ((nested, "nested tensor"), (torch._efficientzerotensor(2), "cannot be read")):
        with pytest.raises(UsageError, match=rf"args\[1\] of the call cannot be sent: it is a .*{why}"):
            Encoding().encode_call((), "m:f", (1, value), {})
