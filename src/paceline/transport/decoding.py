"""Messages of peers decoded: what cannot be read is a ProtocolError, whatever is wrong with it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, Final, TypeVar

import msgspec

from paceline.errors import ProtocolError

UNREADABLE: Final = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError)
"""What msgspec raises: of a wrong type or bound, of maps nested a thousand deep, of text that is no UTF-8."""

_lock = threading.Lock()
_known: set[Any] = set()
_Kind = TypeVar("_Kind")

if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


def known(kind: _Kind) -> _Kind:
    """Return a type that is to be decoded or converted to, once msgspec knows its fields.

    It looks them up when it first meets a type. Another thread that decodes the same type meanwhile finds half of them,
    and the process dies of that (msgspec 0.22); so one thread at a time has it look.
    """
    if kind not in _known:
        with _lock:
            msgspec.msgpack.Decoder(kind)
            _known.add(kind)
    return kind


def read_meta(meta: bytes | memoryview, kind: Any, name: str) -> Any:
    """Return msgpack decoded as `kind`; `name` says what that is in its ProtocolError."""
    try:
        return msgspec.msgpack.decode(meta, type=known(kind))
    except UNREADABLE as error:
        raise ProtocolError(f"got {name} that cannot be read: {error}") from None


def reader(kind: Any, name: str) -> Callable[[bytes | memoryview], Any]:
    """Return a function that does as :func:`read_meta`, for what is read often."""
    decode = msgspec.msgpack.Decoder(known(kind)).decode

    def read(meta: bytes | memoryview) -> Any:
        try:
            return decode(meta)
        except UNREADABLE as error:
            raise ProtocolError(f"got {name} that cannot be read: {error}") from None

    return read
