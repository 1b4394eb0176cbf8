"""The decorator for functions that return a future."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from paceline.errors import UsageError
from paceline.rpc.futures import Future

_Function = TypeVar("_Function", bound=Callable[..., Any])


def async_execution(function: _Function) -> _Function:
    """Mark a function that returns a :class:`Future`, so that a remote call of it returns the future's result.

    The reply is sent when the future is done, and no thread waits for it. The decorator may be above or below
    ``@staticmethod`` and ``@classmethod``. The future may also come from ``torch.futures`` or ``concurrent.futures``.
    """
    inner: Any = getattr(function, "__func__", function)
    inner.__paceline_async__ = True
    return function


def is_async(function: Callable[..., Any]) -> bool:
    return bool(getattr(function, "__paceline_async__", False))


def promise_of(value: Any) -> Future[Any]:
    if isinstance(value, Future):
        return value
    read = getattr(value, "value", None) or getattr(value, "result", None)
    if not callable(read) or not callable(getattr(value, "add_done_callback", None)):
        raise UsageError(f"a function under async_execution returned {type(value).__name__}, expected a Future")
    promise: Future[Any] = Future()
    value.add_done_callback(functools.partial(_copy_outcome, promise, read))
    return promise


def _copy_outcome(promise: Future[Any], read: Callable[[], Any], _: Any) -> None:
    try:
        result = read()
    except BaseException as error:  # includes CancelledError, which may derive from BaseException only
        promise.resolve(None, error)
    else:
        promise.resolve(result, None)
