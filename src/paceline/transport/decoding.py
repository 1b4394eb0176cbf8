"""Messages of peers decoded: what cannot be read is a ProtocolError, whatever is wrong with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec

from paceline.errors import ProtocolError

UNREADABLE: Final = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError)
"""What msgspec raises: of a wrong type or bound, of maps nested a thousand deep, of text that is no UTF-8."""


def read_meta(meta: bytes | memoryview, kind: Any, name: str) -> Any:
    """Return msgpack decoded as `kind`; `name` says what that is in its ProtocolError."""
    try:
        return msgspec.msgpack.decode(meta, type=kind)
    except UNREADABLE as error:
        raise ProtocolError(f"got {name} that cannot be read: {error}") from None


def reader(kind: Any, name: str) -> Callable[[bytes | memoryview], Any]:
    """Return a function that does as :func:`read_meta`, for what is read often."""
    decode = msgspec.msgpack.Decoder(kind).decode

    def read(meta: bytes | memoryview) -> Any:
        try:
            return decode(meta)
        except UNREADABLE as error:
            raise ProtocolError(f"got {name} that cannot be read: {error}") from None

    return read
