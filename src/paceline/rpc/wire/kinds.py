"""Encode special values that need no other package (for example sets and dataclasses).

This module is imported when the first special value is sent or received.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import pickle as _pickle
import struct
import types
import uuid
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Final

import msgspec
import numpy as np
from msgspec.msgpack import Ext
from numpy.typing import NDArray

from paceline.errors import ProtocolError, UsageError, printable
from paceline.rpc.allowed import qualified_name
from paceline.rpc.wire.codec import CannotSendError, Decoding, Encoding, Pack, add_kind, add_pack, as_sent
from paceline.transport import register_type

TUPLE, SET, FROZENSET, DICT, BIG_INT, COMPLEX, ARRAY, NAMED, RECORD, TEXT, PICKLED, ORDERED = range(1, 13)

_INT_MIN, _INT_MAX = -(1 << 63), (1 << 64) - 1
_MAX_BIG_INT_BYTES = 1 << 16
_COMPLEX = struct.Struct("<dd")
_TEXT_TYPES: Final = (
    datetime.datetime,
    datetime.date,
    datetime.time,
    datetime.timedelta,
    uuid.UUID,
    decimal.Decimal,
)
_ISO_TYPES: Final = _TEXT_TYPES[:3]
"""The date and time types that are converted to text and back by Python, because msgspec rejects time zones whose
offset has a fraction of a minute.
"""


def find_pack(value: Any, pickle: bool) -> Pack:
    kind = type(value)
    if isinstance(value, np.ma.MaskedArray):
        raise CannotSendError("it is a masked array; send its data and its mask")
    if isinstance(value, np.ndarray):
        return _pack_array
    if isinstance(value, np.generic):
        return _pack_scalar
    if isinstance(value, enum.Enum):
        return _pack_enum
    if not isinstance(value, type) and _is_record(kind):
        return _pack_record
    if isinstance(value, (types.FunctionType, types.BuiltinFunctionType, type)) and "<" not in value.__qualname__:
        return _pack_named
    if pickle:
        return _pack_pickled
    if callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
        raise CannotSendError(
            f"it is of type {printable(f'{kind.__module__}.{kind.__qualname__}', 200)}; create it in the other process "
            "with remote() and send the RRef, or send its state_dict() and load the state there"
        )
    raise CannotSendError(
        f"it is of type {printable(f'{kind.__module__}.{kind.__qualname__}', 200)}; numbers, text, bytes, None, "
        "lists, tuples, sets, dictionaries, arrays, tensors, RRefs, dataclasses, named tuples, msgspec "
        "structs and named functions can be sent; send an RRef to any other object (or the object itself, between "
        "processes that both set pickle=True)"
    )


def _is_record(kind: type) -> bool:
    is_named_tuple = issubclass(kind, tuple) and hasattr(kind, "_fields")
    return is_named_tuple or is_dataclass(kind) or issubclass(kind, msgspec.Struct)


def _fields_of(kind: Any) -> Sequence[str]:
    if issubclass(kind, msgspec.Struct):
        return tuple(kind.__struct_fields__)
    if issubclass(kind, tuple):
        return tuple(kind._fields)
    return [field.name for field in fields(kind) if field.init]


def _pack_dict(encoding: Encoding, value: dict[Any, Any]) -> Any:
    flat = _flat(encoding, value)
    if not all(type(key) is str for key in value):
        return Ext(DICT, encoding.nested(flat))
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _flat(encoding: Encoding, value: dict[Any, Any]) -> list[Any]:
    """Return a list of the encoded keys and values of a dictionary in turn: key, value, key, value and so on."""
    packed: list[Any] = []
    key: Any = None
    try:
        for key, item in value.items():
            packed.append(encoding.pack(key))
            packed.append(encoding.pack(item))
    except CannotSendError as error:
        error.place = f"[{printable(repr(key), 60)}]{error.place}"
        raise
    return packed


def _unpack_dict(decoding: Decoding, data: memoryview) -> Any:
    flat = decoding.nested(data)
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _pack_int(encoding: Encoding, value: int) -> Any:
    if _INT_MIN <= value <= _INT_MAX:
        return value
    size = value.bit_length() // 8 + 1
    if size > _MAX_BIG_INT_BYTES:
        raise CannotSendError(f"it is a whole number of {size} bytes, at most {_MAX_BIG_INT_BYTES} are sent")
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
    return Ext(RECORD, encoding.nested((qualified_name(kind), encoding.pack_fields(_fields_of(kind), value))))


def _unpack_record(decoding: Decoding, data: memoryview) -> Any:
    name, values = decoding.nested(data)
    kind = decoding.allowed.resolve_class(name)
    if issubclass(kind, enum.Enum):
        if values not in kind.__members__:
            raise UsageError(f"got {printable(repr(values), 60)}, which is not a member of {kind.__qualname__}")
        return kind.__members__[values]
    if not isinstance(values, dict) or not _is_record(kind):
        raise ProtocolError(
            f"got an unreadable value of {kind.__qualname__}: expected the fields of a dataclass, named tuple or "
            "msgspec.Struct, or a member of an enumeration"
        )
    try:
        return kind(**values)
    except Exception as error:
        text = printable(f"{type(error).__name__}: {error}", 300)
        raise UsageError(f"got a {kind.__qualname__} that cannot be created: {text}") from None


def _pack_text(encoding: Encoding, value: Any) -> Any:
    kind = type(value)
    text = value.isoformat() if kind in _ISO_TYPES else msgspec.to_builtins(value)
    return Ext(TEXT, encoding.nested((_TEXT_TYPES.index(kind), text)))


def _unpack_text(decoding: Decoding, data: memoryview) -> Any:
    number, text = decoding.nested(data)
    if not isinstance(number, int) or not 0 <= number < len(_TEXT_TYPES):
        raise ProtocolError("got a value of a kind that this version does not support")
    kind: Any = _TEXT_TYPES[number]
    return kind.fromisoformat(text) if kind in _ISO_TYPES else msgspec.convert(text, register_type(kind))


def _pack_pickled(encoding: Encoding, value: Any) -> Any:
    try:
        return Ext(PICKLED, _pickle.dumps(value, protocol=5))
    except Exception as error:
        raise CannotSendError(f"it cannot be pickled: {printable(str(error), 200)}") from None


def _unpack_pickled(decoding: Decoding, data: memoryview) -> Any:
    if not decoding.pickle:
        raise UsageError(
            "got a pickled value, which this process does not accept: unpickling can run any code of the sender; set "
            "pickle=True in init_rpc here too if every holder of the token may do so"
        )
    try:
        return _pickle.loads(data)
    except Exception as error:
        raise UsageError(f"got a pickled value that cannot be read: {printable(str(error), 200)}") from None


def _unpack_complex(decoding: Decoding, data: memoryview) -> complex:
    if len(data) != _COMPLEX.size:
        raise ProtocolError(f"got a complex number of {len(data)} bytes, expected {_COMPLEX.size}")
    real, imaginary = _COMPLEX.unpack(data)
    return complex(real, imaginary)


def _add_collection(code: int, kind: type[Any]) -> None:
    add_kind(
        code,
        (kind,),
        lambda encoding, value: Ext(code, encoding.nested(encoding.pack_all(value))),
        lambda decoding, data: kind(decoding.nested(data)),
    )


add_pack((list,), Encoding.pack_all)  # a list is msgpack's own type, so it needs no code
_add_collection(TUPLE, tuple)
_add_collection(SET, set)
_add_collection(FROZENSET, frozenset)
add_kind(DICT, (dict,), _pack_dict, _unpack_dict)
add_kind(
    ORDERED,
    (collections.OrderedDict,),
    lambda encoding, value: Ext(ORDERED, encoding.nested(_flat(encoding, value))),
    lambda decoding, data: collections.OrderedDict(_unpack_dict(decoding, data)),
)
add_kind(BIG_INT, (int,), _pack_int, _unpack_int)
add_kind(
    COMPLEX,
    (complex,),
    lambda encoding, value: Ext(COMPLEX, _COMPLEX.pack(value.real, value.imag)),
    _unpack_complex,
)
add_kind(ARRAY, (np.ndarray,), _pack_array, _unpack_array)
add_kind(NAMED, (), _pack_named, _unpack_named)
add_kind(RECORD, (), _pack_record, _unpack_record)
add_kind(TEXT, _TEXT_TYPES, _pack_text, _unpack_text)
add_kind(PICKLED, (), _pack_pickled, _unpack_pickled)
