"""The messages between two workers: the kinds of frames, and the reports of failed calls."""

from __future__ import annotations

import builtins
import contextlib
import functools
import traceback
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import msgspec

from paceline import errors
from paceline.errors import PacelineError, PeerError, UsageError, printable
from paceline.rpc.allowed import Allowed, home_of
from paceline.transport import FIRST_APPLICATION_KIND, Limits, reader

LIMITS = Limits(max_frame_bytes=1 << 32, max_meta_bytes=1 << 26)
_MAX_TEXT = 4000
_MAX_TRACE = 20_000
_MAX_ARGUMENTS_BYTES = 1 << 14
_PLAIN = frozenset({type(None), bool, int, float, str, bytes})


class RpcKind(IntEnum):
    """The kinds of frames. In the frame's header, ``request`` is the number of the call, ``sequence`` the number of the
    autograd context, and ``epoch`` the number of the message in this context.
    """

    CALL = FIRST_APPLICATION_KIND
    """A request to run a function or method, and to reply with the result."""
    REMOTE = FIRST_APPLICATION_KIND + 1
    """A request to run a function or method, and to keep the result in the callee under the reference in the request.
    """
    FETCH = FIRST_APPLICATION_KIND + 2
    """A request for the object of a reference."""
    SHARE = FIRST_APPLICATION_KIND + 3
    """A request to count another worker as a holder of references."""
    RELEASE = FIRST_APPLICATION_KIND + 4
    """A notification that the sender has released references. There is no reply."""
    WATCH = FIRST_APPLICATION_KIND + 5
    """A request without an answer. It fails when the callee dies, so that the caller detects the death."""
    RESULT = FIRST_APPLICATION_KIND + 6
    FAILED = FIRST_APPLICATION_KIND + 7


class CallFailure(msgspec.Struct, frozen=True, array_like=True):
    """The content of a FAILED frame: the exception of a failed call."""

    error: str
    """The exception's class as ``module:name``.

    Built-in classes and classes of :mod:`paceline.errors` have no module.
    """
    message: str
    trace: str = ""
    """The traceback of the called function. It is empty if the function itself did not raise the exception."""
    arguments: list[Any] | None = None
    """The arguments of the exception; None if some are not plain values (numbers, text, bytes or None)."""


decode_failure = reader(CallFailure, "a report of a failed call")


class RemoteError(PeerError):
    """Raised in the caller if the called function raised an exception; see :attr:`remote_traceback`.

    The error is also an instance of the original exception's class, if that class is built in, defined in
    :mod:`paceline.errors`, or allowed in this process: ``except ValueError`` catches a remote ``ValueError``. The error
    has the original exception's ``args`` (and the ``errno`` and ``filename`` of an ``OSError``), if these values are
    numbers, text, bytes or None.
    """

    remote_traceback: str = ""
    """The traceback as the other process printed it."""
    shown: str = ""
    """The text that ``str(error)`` returns: the exception, the worker that raised it, and the traceback."""

    def __str__(self) -> str:
        return self.shown


def failure_meta(error: BaseException, *, with_trace: bool) -> bytes:
    """Return the content of a FAILED frame. `with_trace` adds the traceback, if user code raised the error."""
    kind = type(error)
    if isinstance(error, RemoteError):
        name = _name_of(kind.__bases__[1]) if kind is not RemoteError else "PeerError"
    else:
        name = _name_of(kind)
    trace = ""
    if with_trace:
        trace = "".join(traceback.format_exception(kind, error, error.__traceback__))[-_MAX_TRACE:]
    failure = CallFailure(name, _text(error), _encodable(trace))
    arguments = _arguments_of(error) if with_trace else None
    if arguments is not None:
        with contextlib.suppress(UnicodeEncodeError, OverflowError):  # msgpack rejects surrogates and huge integers
            meta = msgspec.msgpack.encode(msgspec.structs.replace(failure, arguments=arguments))
            if len(meta) < _MAX_ARGUMENTS_BYTES + _MAX_TEXT + _MAX_TRACE:
                return meta
    return msgspec.msgpack.encode(failure)


def _name_of(kind: type) -> str:
    is_known = getattr(builtins, kind.__name__, None) is kind or getattr(errors, kind.__name__, None) is kind
    return kind.__name__ if is_known else ":".join(home_of(kind))


def _arguments_of(error: BaseException) -> list[Any] | None:
    """Return the arguments with which the exception can be created again; None if they are not plain values."""
    try:
        arguments: Any = error.args
        if isinstance(error, OSError) and type(error).__reduce__ is OSError.__reduce__:
            arguments = error.__reduce__()[1]  # they include the file names of an OSError, which error.args lacks
        return list(arguments) if _are_plain(arguments) else None
    except Exception:  # a user's exception class may raise any error here
        return None


def _are_plain(arguments: Sequence[Any]) -> bool:
    return all(type(argument) in _PLAIN for argument in arguments)


def _encodable(text: str) -> str:
    """Return the text with escaped surrogates. File names may contain surrogates, which UTF-8 cannot encode."""
    return text.encode("utf-8", "backslashreplace").decode()


def _text(error: BaseException) -> str:
    try:
        return _encodable(str(error)[:_MAX_TEXT])
    except Exception:
        return "(its message is unavailable)"


def failure_of(
    meta: bytes | memoryview, worker: str, description: str, allowed: Allowed | None = None
) -> PacelineError:
    """Return the exception that a FAILED frame of `worker` reports.

    It has the original class if this class is built in, defined by Paceline, or `allowed` in this process.
    """
    failure: CallFailure = decode_failure(meta)
    message = "\n".join(printable(line, _MAX_TEXT) for line in failure.message.split("\n"))
    if not failure.trace:
        kind = getattr(errors, failure.error, PeerError)
        if not (isinstance(kind, type) and issubclass(kind, PacelineError)):
            kind = PeerError
        return kind(f"{description} on worker {worker!r}: {message}")
    lines = [printable(line, 500) for line in failure.trace.split("\n")]
    trace = "\n".join(lines).rstrip()
    name = printable(failure.error.replace(":", "."), 200)
    shown = f"{name}: {message}\n\n{description} failed on worker {worker!r}:\n{trace}"
    arguments = [shown] if failure.arguments is None or not _are_plain(failure.arguments) else failure.arguments
    error = _create(_kind_of(_class_of(failure.error, allowed)), arguments)
    error.remote_traceback, error.shown = trace, shown
    return error


def _create(kind: type[RemoteError], arguments: Sequence[Any]) -> RemoteError:
    for candidate in (kind, RemoteError):
        with contextlib.suppress(Exception):  # the constructor of the class may need other arguments
            return candidate(*arguments)
    raise AssertionError("RemoteError takes any arguments")


def _class_of(name: str, allowed: Allowed | None) -> Any:
    if ":" not in name:
        return getattr(errors, name, None) or getattr(builtins, name, None)
    if allowed is not None:
        with contextlib.suppress(UsageError):
            return allowed.resolve_class(name)
    return None


@functools.lru_cache(maxsize=256)
def _kind_of(kind: Any) -> type[RemoteError]:
    if not (isinstance(kind, type) and issubclass(kind, Exception)) or issubclass(RemoteError, kind):
        return RemoteError
    try:
        return type(f"Remote{kind.__name__}", (RemoteError, kind), {"__module__": __name__})
    except TypeError:
        return RemoteError
