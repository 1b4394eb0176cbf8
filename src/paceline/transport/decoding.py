"""Decoding of peers' messages; every malformed message becomes a ProtocolError."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, Final, TypeVar

import msgspec

from paceline.errors import ProtocolError

UNREADABLE: Final = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError)
"""Errors of msgspec for wrong types or bounds, maps nested a thousand deep, and invalid UTF-8."""

_lock = threading.Lock()
_known: set[Any] = set()
_Kind = TypeVar("_Kind")

if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


def register_type(kind: _Kind) -> _Kind:
    """Register a type with msgspec and return it. Call this before the first decoding of the type.

    msgspec collects the fields of a type at its first use. If a second thread decodes the type at that moment, the
    process crashes (msgspec 0.22). The lock prevents this.
    """
    if kind not in _known:
        with _lock:
            msgspec.msgpack.Decoder(kind)
            _known.add(kind)
    return kind


def read_meta(meta: bytes | memoryview, kind: Any, name: str) -> Any:
    """Return msgpack decoded as `kind`; `name` describes the value in a ProtocolError."""
    try:
        return msgspec.msgpack.decode(meta, type=register_type(kind))
    except UNREADABLE as error:
        raise ProtocolError(f"got {name} that cannot be read: {error}") from None


def reader(kind: Any, name: str) -> Callable[[bytes | memoryview], Any]:
    """Return :func:`read_meta` for one type and name as a function. It is faster for frequent use."""
    decode = msgspec.msgpack.Decoder(register_type(kind)).decode

    def read(meta: bytes | memoryview) -> Any:
        try:
            return decode(meta)
        except UNREADABLE as error:
            raise ProtocolError(f"got {name} that cannot be read: {error}") from None

    return read
