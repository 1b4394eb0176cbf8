"""Encode the arguments and results of calls.

An encoded message has two parts. The first part contains the values in msgpack; each array in it is an extension with
the dtype and the shape. The second part, the body, is the memory of the arrays in order, without a copy. Each array is
padded to a multiple of 8 bytes. The receiver's arrays are views of the body.

Received data is not trusted: sizes are checked before an array is created, :class:`paceline.rpc.allowed.Allowed` checks
the names of functions and classes, and pickles are read only if this process has enabled them.

:func:`add_kind` registers more kinds of values.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceline.errors import PacelineError, ProtocolError, UsageError, printable
from paceline.rpc.allowed import Allowed
from paceline.transport import PADS, UNREADABLE, Buffer, padded

MAX_DEPTH: Final = 100
REFERENCE, TENSOR, OF_TORCH = 20, 21, 22
"""The msgpack extension codes of RRefs, tensors and torch's other values. The module `kinds` has the lower codes."""

_PLAIN: Final = frozenset({type(None), bool, float, str, bytes})
_NUMERIC = "?bhilqBHILQefdFD"
DTYPES: Final = {np.dtype(code).name: np.dtype(code).newbyteorder("<") for code in _NUMERIC}
Pack = Callable[["Encoding", Any], Any]
Unpack = Callable[["Decoding", memoryview], Any]
_packs: dict[type, Pack] = {}
_packs_of_subclasses: dict[type, Pack] = {}
_unpacks: dict[int, Unpack] = {}
FindPack = Callable[[Any, bool], Pack]
"""A function ``(type, pickle)`` that returns the encoding function for a type that is not registered.

``pickle`` states whether values may be pickled. Raises CannotSendError if values of the type cannot be sent.
"""
_load_values: Callable[[], FindPack]
_load_tensors: Callable[[], None]


def set_loaders(load_values: Callable[[], FindPack], load_tensors: Callable[[], None]) -> None:
    """Set the functions that import the modules `kinds` and `tensors`.

    The encoder calls these functions at the first value whose type is not registered.
    """
    global _load_values, _load_tensors
    _load_values, _load_tensors = load_values, load_tensors


def add_pack(types: Sequence[type], pack: Pack) -> None:
    for kind in types:
        _packs[kind] = pack


def add_pack_of_subclasses(base: type, pack: Pack) -> None:
    _packs_of_subclasses[base] = pack


def add_kind(code: int, types: Sequence[type], pack: Pack, unpack: Unpack) -> None:
    add_pack(types, pack)
    _unpacks[code] = unpack


class CannotSendError(Exception):
    """Raised if a value cannot be sent. For the error's text, `place` is the path of the value in the message."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason, self.place = reason, ""


def _msgpack(packed: Any) -> bytes:
    try:
        return msgspec.msgpack.encode(packed)
    except (UnicodeEncodeError, OverflowError) as error:
        raise CannotSendError(f"it contains a value that msgpack cannot encode: {printable(str(error), 200)}") from None


class Encoding:
    """Encodes one message."""

    def __init__(self, *, pickle: bool = False, records: bool = False, agent: Any = None) -> None:
        """With `records`, collect the tensors that require a gradient. `agent` sends the message's RRefs."""
        self.parts: list[Buffer] = []
        """The body of the message: the memory of the arrays, without copies, and padding."""
        self.references: list[Any] = []
        self.tensors: list[Any] = []
        """The tensors of the message that require a gradient, if `records` is set."""
        self.pickle, self.records, self.agent = pickle, records, agent
        self._depth = 0

    def encode(self, value: Any, description: str = "the value") -> bytes:
        """Return the msgpack part of the message. `description` names the value in the text of a UsageError."""
        try:
            return _msgpack(self.pack(value))
        except CannotSendError as error:
            raise UsageError(f"{description}{error.place} cannot be sent: {error.reason}") from None

    def encode_call(self, before: Sequence[Any], target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bytes:
        part = "target"
        try:
            packed: list[Any] = [*before, target if type(target) is str else [self.pack(target[0]), target[1]]]
            part = "args"
            packed.append(self.pack_all(args) if args else [])
            part = "kwargs"
            packed.append(self.pack(kwargs) if kwargs else {})
            part = "args or kwargs"
            return _msgpack(packed)
        except CannotSendError as error:
            if part == "target":
                reason = error.reason.partition(";")[0]
                raise UsageError(
                    f"{target[1]}() is a method of an object of this process that cannot be sent ({reason}); create "
                    "the object with remote() and call rref.rpc_sync().method(...)"
                ) from None
            raise UsageError(f"{part}{error.place} of the call cannot be sent: {error.reason}") from None

    def add_array(self, array: NDArray[Any]) -> None:
        size = array.nbytes
        if size:
            self.parts.append(array.reshape(-1).view(np.uint8))
            if size & 7:
                self.parts.append(PADS[-size & 7])

    def nested(self, value: Any) -> bytes:
        return _msgpack(value)

    def pack(self, value: Any) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        pack = _packs.get(kind)
        if pack is None:
            pack = self._find(value, kind)
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise CannotSendError(f"it is nested deeper than {MAX_DEPTH} levels")
        packed = pack(self, value)
        self._depth -= 1
        return packed

    def pack_all(self, values: Iterable[Any]) -> list[Any]:
        packed: list[Any] = []
        try:
            for value in values:
                packed.append(self.pack(value))
        except CannotSendError as error:
            error.place = f"[{len(packed)}]{error.place}"
            raise
        return packed

    def pack_fields(self, names: Sequence[str], value: Any) -> dict[str, Any]:
        packed: dict[str, Any] = {}
        for name in names:
            try:
                packed[name] = self.pack(getattr(value, name))
            except CannotSendError as error:
                error.place = f".{name}{error.place}"
                raise
        return packed

    def _find(self, value: Any, kind: type) -> Pack:
        find_pack = _load_values()
        if kind in _packs:  # the imported module has registered the type
            return _packs[kind]
        if kind.__module__.partition(".")[0] == "torch" or _is_tensor(value):
            _load_tensors()
            if kind in _packs:
                return _packs[kind]
            for base, pack in _packs_of_subclasses.items():
                if issubclass(kind, base):
                    return pack
        return find_pack(value, self.pickle)


class Decoding:
    """Decodes one message."""

    def __init__(self, body: memoryview, allowed: Allowed, *, pickle: bool = False, agent: Any = None) -> None:
        """The decoded arrays are views of `body`. `agent` is this process's agent, for RRefs in the message."""
        self.allowed, self.pickle, self.agent = allowed, pickle, agent
        self.tensors: list[Any] = []
        """The tensors that the sender has recorded for a backward pass, in the sender's order."""
        self._body = body
        self._next = 0
        self._depth = 0

    def decode(self, meta: bytes | memoryview) -> Any:
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
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ProtocolError(f"got a value that is nested deeper than {MAX_DEPTH} levels")
        value = msgspec.msgpack.decode(data, ext_hook=self._unpack)
        self._depth -= 1
        return value

    def take_array(self, name: Any, shape: Any) -> NDArray[Any]:
        dtype = DTYPES.get(name) if isinstance(name, str) else None
        if dtype is None or not isinstance(shape, list) or len(shape) > 32:
            raise ProtocolError(f"got an array of dtype {printable(repr(name), 60)} with an invalid dtype or shape")
        if not all(type(size) is int and 0 <= size < 1 << 62 for size in shape):
            raise ProtocolError("got an array with an invalid shape")
        nbytes = math.prod(shape) * dtype.itemsize
        start = self._next
        if nbytes > len(self._body) - start:
            raise ProtocolError(f"got an array that claims {nbytes} bytes, the body has {len(self._body) - start} left")
        self._next = min(start + padded(nbytes), len(self._body))
        if not nbytes:
            return np.empty(shape, dtype)
        return np.frombuffer(self._body[start : start + nbytes], dtype).reshape(shape)

    def _unpack(self, code: int, data: memoryview) -> Any:
        unpack = _unpacks.get(code)
        if unpack is None:
            _load_values()
            if code in (TENSOR, OF_TORCH):
                _load_tensors()
            unpack = _unpacks.get(code)
        if unpack is None:
            raise ProtocolError(f"got a value of kind {code}, which this version does not support")
        return unpack(self, data)


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def as_sent(array: NDArray[Any]) -> NDArray[Any]:
    """Return the array in the form that is sent: contiguous and little-endian, without a copy if possible."""
    if array.dtype.name not in DTYPES:
        raise CannotSendError(f"its elements are of dtype {array.dtype}; {', '.join(DTYPES)} are sent")
    dtype = array.dtype.newbyteorder("<")
    return array if array.flags.c_contiguous and array.dtype == dtype else np.ascontiguousarray(array, dtype)
