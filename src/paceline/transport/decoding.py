"""Decode the messages of peers, and encode and decode exceptions. Malformed messages raise ProtocolError."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec

from paceline import errors
from paceline.decoded_types import register_type
from paceline.errors import PacelineError, PeerError, ProtocolError, printable

UNREADABLE: Final = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError)
"""The errors that msgspec raises for values of a wrong type or size, for too deep nesting, and for invalid UTF-8."""


def read_meta(meta: bytes | memoryview, kind: Any, name: str) -> Any:
    """Decode msgpack bytes to a value of the type `kind`. `name` describes the value in the text of a ProtocolError."""
    try:
        return msgspec.msgpack.decode(meta, type=register_type(kind))
    except UNREADABLE as error:
        raise ProtocolError(f"got {name} that cannot be read: {error}") from None


def reader(kind: Any, name: str) -> Callable[[bytes | memoryview], Any]:
    """Return a fast function that decodes like :func:`read_meta`, for one type and name."""
    decode = msgspec.msgpack.Decoder(register_type(kind)).decode

    def read(meta: bytes | memoryview) -> Any:
        try:
            return decode(meta)
        except UNREADABLE as error:
            raise ProtocolError(f"got {name} that cannot be read: {error}") from None

    return read


class Failure(msgspec.Struct, frozen=True):
    """The content of an ERROR or REFUSED frame."""

    error: str
    """The name of the error's class in :mod:`paceline.errors`. The receiver replaces an unknown class by PeerError."""
    message: str


_MAX_MESSAGE = 2000
_MAX_NAME = 100
_MAX_UNPROVED = 200
_decoder = msgspec.msgpack.Decoder(register_type(Failure))


def error_meta(error: Exception) -> bytes:
    """Return the content of the ERROR frame that reports ``error``.

    An exception whose class is not in `paceline.errors` is reported as InternalError.
    """
    if isinstance(error, PacelineError):
        failure = Failure(type(error).__name__, str(error)[:_MAX_MESSAGE])
    else:
        text = f"internal error in the server: {type(error).__name__}: {error}. Its log has the details"
        failure = Failure("InternalError", text[:_MAX_MESSAGE])
    return msgspec.msgpack.encode(failure)


def error_of(meta: bytes | memoryview) -> PacelineError:
    """Return the error in an ERROR or REFUSED frame, as an object of its class in :mod:`paceline.errors`.

    An unknown class becomes a :class:`PeerError` whose message has the class name. An unreadable report becomes a
    :class:`ProtocolError`. This function is only for authenticated peers. For other peers, use
    :func:`unauthenticated_error`.
    """
    failure = _read(meta)
    if failure is None:
        return ProtocolError("the peer sent an error report that cannot be read")
    lines = (printable(line, _MAX_MESSAGE) for line in failure.message[:_MAX_MESSAGE].split("\n"))
    message = "\n".join(lines)
    kind = getattr(errors, failure.error, None)
    if isinstance(kind, type) and issubclass(kind, PacelineError):
        return kind(message)
    return PeerError(f"{printable(failure.error, _MAX_NAME)}: {message}")


def unauthenticated_error(meta: bytes | memoryview) -> tuple[str, str]:
    """Return the class name and message in an unauthenticated peer's ERROR or REFUSED frame, in printable form.

    The caller must neither raise this class nor trust the message.
    """
    failure = _read(meta) or Failure("?", "")
    return printable(failure.error, _MAX_NAME), printable(failure.message, _MAX_UNPROVED)


def _read(meta: bytes | memoryview) -> Failure | None:
    try:
        return _decoder.decode(meta)
    except UNREADABLE:
        return None
