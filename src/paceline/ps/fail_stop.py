"""Fail-stop: a server or scheduler that cannot be sure of its state ends, after one line that says why.

A request that cannot be carried out is *refused*: by a :class:`~paceline.errors.PacelineError` that is raised before
anything has changed. Any other exception, and any at all once something has changed, means that the process may
acknowledge what it does not have. Replicas, and a scheduler's restart, are made for a process that ends.

A role is given a function, :data:`Fail`, to which every such exception goes, wherever it is raised: in a frame
(:func:`must_succeed`), in a callback or task of the event loop (:func:`watch_loop`, :func:`watch_task`), in a thread
(:func:`watch_threads`). In a process of its own that is :func:`end_process`; a test takes note instead.
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
"""Takes an exception after which a process must not go on; in production it does not return."""

_logger = logging.getLogger("paceline.ps")
_P = ParamSpec("_P")
_R = TypeVar("_R")


class _CanFail(Protocol):
    def _fail(self, error: BaseException, /) -> None: ...


_Self = TypeVar("_Self", bound=_CanFail)


def must_succeed(method: Callable[Concatenate[_Self, _P], _R]) -> Callable[Concatenate[_Self, _P], _R]:
    """Have every exception of a method end the process: it changes what may be acknowledged."""

    @functools.wraps(method)
    def call(self: _Self, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            self._fail(error)
            raise

    return call


def end_process(who: str, error: BaseException) -> NoReturn:
    """End this process at once, with status 1, after one line on standard error."""
    try:
        _logger.debug("what ends this process", exc_info=error)
        print(f"paceline {who}: {describe(error)}", file=sys.stderr, flush=True)
    finally:
        os._exit(1)


def describe(error: BaseException) -> str:
    """Return the line that says why a process ends, and where in its code that was found out."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    text = " ".join(str(error).split())
    return (
        f"{type(error).__name__}{': ' if text else ''}{text}{where}: what was asked for is perhaps done in part, so "
        "this process ends at once and acknowledges nothing more"
    )


def watch_loop(loop: asyncio.AbstractEventLoop, fail: Fail) -> None:
    """Have exceptions of a loop's callbacks and tasks end the process; what only closes a connection does not."""

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        is_ours = "handle" in context or isinstance(context.get("future"), asyncio.Task)
        # A transport says so when it closes a connection for an exception of ours: for want of memory for what is
        # received, too, which then has not come.
        is_ours |= "protocol" in context and not isinstance(error, MemoryError | OSError)
        if is_ours and isinstance(error, Exception):
            fail(error)
        else:
            loop.default_exception_handler(context)

    loop.set_exception_handler(handle)


def watch_task(task: asyncio.Task[Any], fail: Fail) -> None:
    """Have an exception that ends a task end the process; nobody else would hear of it."""

    def done(task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            fail(error)

    task.add_done_callback(done)


def watch_threads(fail: Fail) -> None:
    """Have an exception that ends a thread of this process end the process."""

    def ended(arguments: threading.ExceptHookArgs) -> None:
        if isinstance(arguments.exc_value, Exception):
            fail(arguments.exc_value)

    threading.excepthook = ended
