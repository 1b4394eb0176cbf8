"""Exceptions on the wire: an error becomes the meta of an ERROR or REFUSED frame, and is raised again at the
other end.
"""

from __future__ import annotations

from typing import NoReturn

import msgspec

from paceline import errors
from paceline.errors import PacelineError, PeerError, ProtocolError, printable
from paceline.transport.decoding import UNREADABLE, known


class Failure(msgspec.Struct, frozen=True):
    """The meta of an ERROR or REFUSED frame."""

    error: str
    """The name of a class in :mod:`paceline.errors`; one that the receiver does not know reads as PeerError.
    """
    message: str


_MAX_MESSAGE = 2000
_MAX_NAME = 100
_MAX_UNPROVED = 200
_decoder = msgspec.msgpack.Decoder(known(Failure))


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
    read a :class:`ProtocolError`. For what a peer sent that has proved itself; see :func:`unproved`.
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


def unproved(meta: bytes | memoryview) -> tuple[str, str]:
    """Return the class and the words, fit to be shown, of an ERROR or REFUSED frame of a peer that has proved nothing.

    Whoever gets them must not raise that class, nor do as the words say.
    """
    failure = _read(meta) or Failure("?", "")
    return printable(failure.error, _MAX_NAME), printable(failure.message, _MAX_UNPROVED)


def _read(meta: bytes | memoryview) -> Failure | None:
    try:
        return _decoder.decode(meta)
    except UNREADABLE:
        return None


def raise_error(meta: bytes | memoryview) -> NoReturn:
    """Raise :func:`error_of` the meta."""
    raise error_of(meta)
