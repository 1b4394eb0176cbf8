"""Values of calls as bytes and back: msgpack for what is small, the memory of arrays beside it without a copy.

A message is a msgpack part and a body. Arrays stand in the msgpack part as an extension that says their dtype and
shape, and their elements in the body, in the order of the extensions, each padded to 8 bytes; who decodes makes views
of the body. Nothing that comes is believed: sizes are checked before an array is made, names of functions and classes
go through :class:`paceline.rpc.allowed.Allowed`, and nothing is unpickled unless this process has said so.

Other modules add kinds of values by :func:`add_kind`: `references` the RRefs, `tensors` what is PyTorch's.
"""

from __future__ import annotations

import datetime
import decimal
import enum
import math
import pickle as _pickle
import struct
import sys
import types
import uuid
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Final

import msgspec
import numpy as np
from msgspec.msgpack import Ext
from numpy.typing import NDArray

from paceline.errors import PacelineError, ProtocolError, UsageError, printable
from paceline.rpc.allowed import Allowed, qualified_name
from paceline.transport import PADS, UNREADABLE, Buffer, known, padded

MAX_DEPTH: Final = 100
"""How deep lists, tuples, dictionaries and dataclasses may stand in one another."""

TUPLE, SET, FROZENSET, DICT, BIG_INT, COMPLEX, ARRAY, NAMED, RECORD, TEXT, PICKLED = range(1, 12)
REFERENCE, TENSOR = 20, 21

_INT_MIN, _INT_MAX = -(1 << 63), (1 << 64) - 1
_MAX_BIG_INT_BYTES = 1 << 16
_COMPLEX = struct.Struct("<dd")
_NUMERIC = "?bhilqBHILQefdFD"
DTYPES: Final = {np.dtype(code).name: np.dtype(code).newbyteorder("<") for code in _NUMERIC}
"""The types of elements that may be sent, by name."""
_TEXT_TYPES: Final = (
    datetime.datetime,
    datetime.date,
    datetime.time,
    datetime.timedelta,
    uuid.UUID,
    decimal.Decimal,
)

Pack = Callable[["Encoding", Any], Any]
Unpack = Callable[["Decoding", memoryview], Any]
_packs: dict[type, Pack] = {}
_unpacks: dict[int, Unpack] = {}


def add_kind(code: int, types: Sequence[type], pack: Pack, unpack: Unpack) -> None:
    """Send values of exactly these types by `pack`, which returns an ``Ext`` of this code, and read it by `unpack`."""
    for kind in types:
        _packs[kind] = pack
    _unpacks[code] = unpack


class _CannotSendError(Exception):
    """A value that cannot be sent; `place` grows from the inside out."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason, self.place = reason, ""


def _msgpack(packed: Any) -> bytes:
    try:
        return msgspec.msgpack.encode(packed)
    except (UnicodeEncodeError, OverflowError) as error:
        raise _CannotSendError(f"it holds what has no encoding: {printable(str(error), 200)}") from None


class Encoding:
    """One message that is being encoded."""

    def __init__(self, *, pickle: bool = False, records: bool = False, agent: Any = None) -> None:
        """`records`: keep the tensors that require a gradient, so that one can come back for them. `agent`: whose RRefs
        may go (see `rref`).
        """
        self.parts: list[Buffer] = []
        """The body: memory of the arrays, not copied, and what pads it."""
        self.references: list[Any] = []
        """The RRefs of the message."""
        self.tensors: list[Any] = []
        """The tensors of the message that require a gradient, if it records."""
        self.pickle, self.records, self.agent = pickle, records, agent
        self._depth = 0

    def encode(self, value: Any, what: str = "the value") -> bytes:
        """Return the msgpack part; `what` names the value in a :class:`UsageError`."""
        try:
            return _msgpack(self.pack(value))
        except _CannotSendError as error:
            raise UsageError(f"{what}{error.place} cannot be sent: {error.reason}") from None

    def encode_call(self, before: Sequence[Any], target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bytes:
        """Return the msgpack part of a call; ``before`` stands in front of it as it is."""
        what = "target"
        try:
            packed: list[Any] = [*before, target if type(target) is str else [self.pack(target[0]), target[1]]]
            what = "args"
            packed.append(self.pack_all(args) if args else [])
            what = "kwargs"
            packed.append(self.pack(kwargs) if kwargs else {})
            what = "args or kwargs"
            return _msgpack(packed)
        except _CannotSendError as error:
            raise UsageError(f"{what}{error.place} of the call cannot be sent: {error.reason}") from None

    def add_array(self, array: NDArray[Any]) -> None:
        """Append the elements of a contiguous little-endian array to the body."""
        size = array.nbytes
        if size:
            self.parts.append(array.reshape(-1).view(np.uint8))
            if size & 7:
                self.parts.append(PADS[-size & 7])

    def nested(self, value: Any) -> bytes:
        """Return a value as the msgpack of an extension's own."""
        return _msgpack(value)

    def pack(self, value: Any) -> Any:
        """Return the value as msgspec encodes it."""
        kind = type(value)
        if kind in _PLAIN:
            return value
        pack = _packs.get(kind)
        if pack is None:
            pack = self._find(value, kind)
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _CannotSendError(f"it is nested deeper than {MAX_DEPTH} levels")
        packed = pack(self, value)
        self._depth -= 1
        return packed

    def pack_all(self, values: Sequence[Any]) -> list[Any]:
        """Return the items of a list or tuple, each packed."""
        packed: list[Any] = []
        try:
            for value in values:
                packed.append(self.pack(value))
        except _CannotSendError as error:
            error.place = f"[{len(packed)}]{error.place}"
            raise
        return packed

    def pack_fields(self, names: Sequence[str], value: Any) -> dict[str, Any]:
        """Return the named attributes of a value, each packed."""
        packed: dict[str, Any] = {}
        for name in names:
            try:
                packed[name] = self.pack(getattr(value, name))
            except _CannotSendError as error:
                error.place = f".{name}{error.place}"
                raise
        return packed

    def _find(self, value: Any, kind: type) -> Pack:
        """Return how to send a value whose type was not seen before."""
        if kind.__module__.partition(".")[0] == "torch" or _is_tensor(value):
            import paceline.rpc.tensors  # noqa: F401  (it adds the kinds of torch's)

            for base in kind.__mro__:
                if base in _packs:
                    return _packs[base]
        if isinstance(value, np.ma.MaskedArray):
            raise _CannotSendError("it is a masked array; send its data and its mask")
        if isinstance(value, np.ndarray) and kind is not np.ndarray:
            return _packs[np.ndarray]
        if isinstance(value, np.generic):
            return _pack_scalar
        if isinstance(value, enum.Enum):
            return _pack_enum
        if isinstance(value, msgspec.Struct) or (is_dataclass(value) and not isinstance(value, type)):
            return _pack_record
        if isinstance(value, (types.FunctionType, types.BuiltinFunctionType, type)) and "<" not in value.__qualname__:
            return _pack_named
        if self.pickle:
            return _pack_pickled
        raise _CannotSendError(
            f"it is of type {printable(f'{kind.__module__}.{kind.__qualname__}', 200)}; numbers, text, bytes, None, "
            "lists, tuples, sets, dictionaries, arrays, tensors, RRefs, dataclasses, msgspec structs and named "
            "functions are sent (others only between processes that both set pickle=True)"
        )


class Decoding:
    """One message that is being decoded."""

    def __init__(self, body: memoryview, allowed: Allowed, *, pickle: bool = False, agent: Any = None) -> None:
        """`body`: the arrays are views of it. `agent`: whose RRefs come (see `rref`)."""
        self.allowed, self.pickle, self.agent = allowed, pickle, agent
        self.tensors: list[Any] = []
        """The tensors for which the sender keeps the way back of a gradient, in its order."""
        self._body = body
        self._next = 0
        self._depth = 0

    def decode(self, meta: bytes | memoryview) -> Any:
        """Return the value. Raises ProtocolError, or UsageError for a name that is not allowed."""
        try:
            value = msgspec.msgpack.decode(meta, ext_hook=self._unpack)
        except PacelineError:
            raise
        except (*UNREADABLE, TypeError, ValueError, ArithmeticError) as error:
            raise ProtocolError(f"got a value that cannot be read: {printable(str(error), 300)}") from None
        if self._next != len(self._body):
            raise ProtocolError(f"got a body of {len(self._body)} bytes, its arrays take {self._next}")
        return value

    def nested(self, data: memoryview) -> Any:
        """Return the msgpack of an extension's own, decoded."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ProtocolError(f"got a value that is nested deeper than {MAX_DEPTH} levels")
        value = msgspec.msgpack.decode(data, ext_hook=self._unpack)
        self._depth -= 1
        return value

    def take_array(self, name: Any, shape: Any) -> NDArray[Any]:
        """Return the next array of the body as a view of it."""
        dtype = DTYPES.get(name) if isinstance(name, str) else None
        if dtype is None or not isinstance(shape, list) or len(shape) > 32:
            raise ProtocolError(f"got an array of dtype {printable(repr(name), 60)} and a shape that cannot be")
        if not all(type(size) is int and 0 <= size < 1 << 62 for size in shape):
            raise ProtocolError("got an array whose shape cannot be")
        nbytes = math.prod(shape) * dtype.itemsize
        start = self._next
        if nbytes > len(self._body) - start:
            raise ProtocolError(f"got an array that claims {nbytes} bytes, {len(self._body) - start} are left of it")
        self._next = min(start + padded(nbytes), len(self._body))
        if not nbytes:
            return np.empty(shape, dtype)
        return np.frombuffer(self._body[start : start + nbytes], dtype).reshape(shape)

    def _unpack(self, code: int, data: memoryview) -> Any:
        unpack = _unpacks.get(code)
        if unpack is None and code == TENSOR:
            import paceline.rpc.tensors  # noqa: F401  (it adds the kinds of torch's)

            unpack = _unpacks.get(code)
        if unpack is None:
            raise ProtocolError(f"got a value of kind {code}, which this version does not know")
        return unpack(self, data)


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def as_sent(array: NDArray[Any]) -> NDArray[Any]:
    """Return the array as it is sent: contiguous and little-endian, itself where it is so already."""
    if array.dtype.name not in DTYPES:
        raise _CannotSendError(f"its elements are of dtype {array.dtype}; {', '.join(DTYPES)} are sent")
    dtype = array.dtype.newbyteorder("<")
    return array if array.flags.c_contiguous and array.dtype == dtype else np.ascontiguousarray(array, dtype)


def cannot_send(reason: str) -> Exception:
    """Return what a kind's `pack` raises for a value that cannot be sent; its place in the arguments is added."""
    return _CannotSendError(reason)


# the kinds that need no other package


def _pack_list(encoding: Encoding, value: list[Any]) -> Any:
    return encoding.pack_all(value)


def _pack_dict(encoding: Encoding, value: dict[Any, Any]) -> Any:
    packed: dict[Any, Any] = {}
    key: Any = None
    try:
        for key, item in value.items():
            packed[key] = encoding.pack(item)
    except _CannotSendError as error:
        error.place = f"[{printable(repr(key), 60)}]{error.place}"
        raise
    if all(type(key) is str for key in packed):
        return packed
    flat = [part for key, item in packed.items() for part in (encoding.pack(key), item)]
    return Ext(DICT, encoding.nested(flat))


def _unpack_dict(decoding: Decoding, data: memoryview) -> Any:
    flat = decoding.nested(data)
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _pack_int(encoding: Encoding, value: int) -> Any:
    if _INT_MIN <= value <= _INT_MAX:
        return value
    size = value.bit_length() // 8 + 1
    if size > _MAX_BIG_INT_BYTES:
        raise _CannotSendError(f"it is a whole number of {size} bytes, at most {_MAX_BIG_INT_BYTES} are sent")
    return Ext(BIG_INT, value.to_bytes(size, "little", signed=True))


def _unpack_int(decoding: Decoding, data: memoryview) -> int:
    if len(data) > _MAX_BIG_INT_BYTES:
        raise ProtocolError(f"got a whole number of {len(data)} bytes, at most {_MAX_BIG_INT_BYTES} are allowed")
    return int.from_bytes(data, "little", signed=True)


def _pack_array(encoding: Encoding, value: NDArray[Any]) -> Any:
    array = as_sent(np.asarray(value))
    encoding.add_array(array)
    return Ext(ARRAY, encoding.nested((value.dtype.name, value.shape)))


def _pack_scalar(encoding: Encoding, value: np.generic) -> Any:
    array = as_sent(np.asarray(value))
    encoding.add_array(array)
    return Ext(ARRAY, encoding.nested((array.dtype.name, None)))


def _unpack_array(decoding: Decoding, data: memoryview) -> Any:
    name, shape = decoding.nested(data)
    return decoding.take_array(name, []).reshape(())[()] if shape is None else decoding.take_array(name, shape)


def _pack_named(encoding: Encoding, value: Any) -> Any:
    return Ext(NAMED, qualified_name(value).encode())


def _unpack_named(decoding: Decoding, data: memoryview) -> Any:
    return decoding.allowed.resolve(bytes(data).decode())


def _pack_enum(encoding: Encoding, value: enum.Enum) -> Any:
    return Ext(RECORD, encoding.nested((qualified_name(type(value)), value.name)))


def _pack_record(encoding: Encoding, value: Any) -> Any:
    kind = type(value)
    names = kind.__struct_fields__ if isinstance(value, msgspec.Struct) else [f.name for f in fields(value) if f.init]
    return Ext(RECORD, encoding.nested((qualified_name(kind), encoding.pack_fields(names, value))))


def _unpack_record(decoding: Decoding, data: memoryview) -> Any:
    name, values = decoding.nested(data)
    kind = decoding.allowed.resolve_class(name)
    if issubclass(kind, enum.Enum):
        if values not in kind.__members__:
            raise ProtocolError(f"got {printable(repr(values), 60)}, which is no member of {kind.__qualname__}")
        return kind.__members__[values]
    if not isinstance(values, dict) or not (is_dataclass(kind) or issubclass(kind, msgspec.Struct)):
        raise ProtocolError(f"got a value of {kind.__qualname__}, which is no dataclass, struct or enumeration")
    try:
        return kind(**values)
    except Exception as error:
        text = printable(f"{type(error).__name__}: {error}", 300)
        raise ProtocolError(f"got a {kind.__qualname__} that cannot be made: {text}") from None


def _pack_text(encoding: Encoding, value: Any) -> Any:
    return Ext(TEXT, encoding.nested((_TEXT_TYPES.index(type(value)), msgspec.to_builtins(value))))


def _unpack_text(decoding: Decoding, data: memoryview) -> Any:
    number, text = decoding.nested(data)
    if not isinstance(number, int) or not 0 <= number < len(_TEXT_TYPES):
        raise ProtocolError("got a value of a kind that this version does not know")
    return msgspec.convert(text, known(_TEXT_TYPES[number]))


def _pack_pickled(encoding: Encoding, value: Any) -> Any:
    try:
        return Ext(PICKLED, _pickle.dumps(value, protocol=5))
    except Exception as error:
        raise _CannotSendError(f"it cannot be pickled: {printable(str(error), 200)}") from None


def _unpack_pickled(decoding: Decoding, data: memoryview) -> Any:
    if not decoding.pickle:
        raise UsageError(
            "got a pickled value, which this process does not read: unpickling runs whatever its sender wants; set "
            "pickle=True in init_rpc here too if every process that holds the token may do so"
        )
    try:
        return _pickle.loads(data)
    except Exception as error:
        raise ProtocolError(f"got a pickled value that cannot be read: {printable(str(error), 200)}") from None


_PLAIN: Final = frozenset({type(None), bool, float, str, bytes})

add_kind(0, (list,), _pack_list, lambda decoding, data: decoding.nested(data))
del _unpacks[0]  # a list is msgpack's own
add_kind(
    TUPLE,
    (tuple,),
    lambda encoding, value: Ext(TUPLE, encoding.nested(encoding.pack_all(value))),
    lambda decoding, data: tuple(decoding.nested(data)),
)
add_kind(
    SET,
    (set,),
    lambda encoding, value: Ext(SET, encoding.nested(encoding.pack_all(list(value)))),
    lambda decoding, data: set(decoding.nested(data)),
)
add_kind(
    FROZENSET,
    (frozenset,),
    lambda encoding, value: Ext(FROZENSET, encoding.nested(encoding.pack_all(list(value)))),
    lambda decoding, data: frozenset(decoding.nested(data)),
)
add_kind(DICT, (dict,), _pack_dict, _unpack_dict)
add_kind(BIG_INT, (int,), _pack_int, _unpack_int)
add_kind(
    COMPLEX,
    (complex,),
    lambda encoding, value: Ext(COMPLEX, _COMPLEX.pack(value.real, value.imag)),
    lambda decoding, data: complex(*_unpack_complex(data)),
)
add_kind(ARRAY, (np.ndarray,), _pack_array, _unpack_array)
add_kind(NAMED, (), _pack_named, _unpack_named)
add_kind(RECORD, (), _pack_record, _unpack_record)
add_kind(TEXT, _TEXT_TYPES, _pack_text, _unpack_text)
add_kind(PICKLED, (), _pack_pickled, _unpack_pickled)


def _unpack_complex(data: memoryview) -> tuple[float, float]:
    if len(data) != _COMPLEX.size:
        raise ProtocolError(f"got a complex number of {len(data)} bytes, {_COMPLEX.size} were expected")
    real, imaginary = _COMPLEX.unpack(data)
    return real, imaginary
