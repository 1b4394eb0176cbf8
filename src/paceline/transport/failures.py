"""Exceptions on the wire: an error becomes the meta of an ERROR or REFUSED frame, and is raised again at the
other end.
"""

from __future__ import annotations

from typing import NoReturn

import msgspec

from paceline import errors
from paceline.errors import PacelineError, PeerError, ProtocolError
from paceline.transport.decoding import UNREADABLE


class Failure(msgspec.Struct, frozen=True):
    """The meta of an ERROR or REFUSED frame."""

    error: str
    """The name of a class in :mod:`paceline.errors`; one that the receiver does not know reads as PeerError.
    """
    message: str


_MAX_MESSAGE = 2000
_decoder = msgspec.msgpack.Decoder(Failure)


def error_meta(error: Exception) -> bytes:
    """Return the meta of the frame that reports ``error``; what is no PacelineError is an internal error."""
    if isinstance(error, PacelineError):
        failure = Failure(type(error).__name__, str(error)[:_MAX_MESSAGE])
    else:
        text = f"internal error in the server: {type(error).__name__}: {error}; its log has the details"
        failure = Failure("InternalError", text[:_MAX_MESSAGE])
    return msgspec.msgpack.encode(failure)


def error_of(meta: bytes | memoryview) -> PacelineError:
    """Return the error that an ERROR or REFUSED frame carries, as its class of :mod:`paceline.errors`.

    One of a class that is not known here is a :class:`PeerError` with the name in its message, one that cannot be
    read a :class:`ProtocolError`.
    """
    try:
        failure = _decoder.decode(meta)
    except UNREADABLE as error:
        return ProtocolError(f"the peer sent an error report that cannot be read: {error}")
    kind = getattr(errors, failure.error, None)
    if isinstance(kind, type) and issubclass(kind, PacelineError):
        return kind(failure.message)
    return PeerError(f"{failure.error}: {failure.message}")


def raise_error(meta: bytes | memoryview) -> NoReturn:
    """Raise :func:`error_of` the meta."""
    raise error_of(meta)
