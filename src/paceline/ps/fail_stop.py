"""Fail-stop: a server or scheduler that may have an inconsistent state ends after one line with the reason.

A :class:`~paceline.errors.PacelineError` *rejects* an invalid request before any change. After any other exception, or
an exception after a change, the process might acknowledge data that it does not have, so it must end. Replicas replace
a server that ends, and a restarted scheduler replaces a scheduler.

Servers and schedulers pass every such exception to a function, :data:`Fail`. This function is :func:`end_process`,
except in tests, which record the exception.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, Concatenate, NoReturn, ParamSpec, Protocol, TypeAlias, TypeVar

Fail: TypeAlias = Callable[[BaseException], None]
"""A function for an exception after which the process must not continue. It returns only in tests."""

_logger = logging.getLogger("paceline.ps")
_P = ParamSpec("_P")
_R = TypeVar("_R")


class _CanFail(Protocol):
    def _fail(self, error: BaseException, /) -> None: ...


_Self = TypeVar("_Self", bound=_CanFail)


def must_succeed(method: Callable[Concatenate[_Self, _P], _R]) -> Callable[Concatenate[_Self, _P], _R]:
    """Decorate a method that changes state on which acknowledgements depend: every exception ends the process."""

    @functools.wraps(method)
    def call(self: _Self, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            self._fail(error)
            raise

    return call


def end_process(role: str, error: BaseException) -> NoReturn:
    """End this process immediately with status 1, after one line on standard error."""
    try:
        _logger.debug("this process ends", exc_info=error)
        print(f"paceline {role}: {describe(error)}", file=sys.stderr, flush=True)
    finally:
        os._exit(1)


def describe(error: BaseException) -> str:
    """Return the message for an exception that ends a process, with its place in the code."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    text = " ".join(str(error).split())
    return (
        f"{type(error).__name__}{': ' if text else ''}{text}{where}: the request may be partly applied, so this "
        "process ends without an acknowledgement"
    )


def watch_loop(loop: asyncio.AbstractEventLoop, fail: Fail) -> None:
    """Pass exceptions of a loop's callbacks and tasks to `fail`, unless an exception only closes a connection."""

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        is_own = "handle" in context or isinstance(context.get("future"), asyncio.Task)
        # asyncio also reports exceptions of our asyncio.Protocol objects, and closes their connections. A MemoryError
        # or OSError of such an object only means that a message was not received.
        is_own |= "protocol" in context and not isinstance(error, MemoryError | OSError)
        if is_own and isinstance(error, Exception):
            fail(error)
        else:
            loop.default_exception_handler(context)

    loop.set_exception_handler(handle)


def watch_task(task: asyncio.Task[Any], fail: Fail) -> None:
    """Pass an exception that ends a task to `fail`; otherwise the exception would stay unnoticed."""

    def done(task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            fail(error)

    task.add_done_callback(done)


def watch_threads(fail: Fail) -> None:
    """Pass an exception that ends a thread of this process to `fail`."""

    def ended(arguments: threading.ExceptHookArgs) -> None:
        if isinstance(arguments.exc_value, Exception):
            fail(arguments.exc_value)

    threading.excepthook = ended
