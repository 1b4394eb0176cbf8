"""The target of a call: a function by its name, or a method and its object."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from paceline.errors import UsageError, printable
from paceline.rpc.allowed import home_of, qualified_name
from paceline.rpc.futures import Future
from paceline.rpc.rref import RemoteMethod, RRef
from paceline.rpc.running import Target


class Call(NamedTuple):
    """A call that is not encoded yet."""

    target: Target
    args: Sequence[Any]
    kwargs: dict[str, Any] | None

    def check(self) -> None:
        args, kwargs = self.args, self.kwargs
        if not isinstance(args, Sequence) or isinstance(args, (str, bytes, bytearray)):
            shown = printable(repr(args), 100)
            raise UsageError(f"args is {shown}, expected a tuple of arguments: args=({shown},)")
        if kwargs is not None and not (isinstance(kwargs, dict) and all(isinstance(name, str) for name in kwargs)):
            raise UsageError(f"kwargs is {printable(repr(kwargs), 100)}, expected a dictionary of arguments by name")


def call_of(func: Callable[..., Any] | str, args: Sequence[Any] | None, kwargs: dict[str, Any] | None) -> Call:
    """Return the call of a function or method. The arguments of a ``functools.partial`` come before `args`."""
    call_args = () if args is None else args
    if isinstance(func, functools.partial):
        inner = call_of(func.func, func.args, func.keywords)
        outer = Call(inner.target, call_args, kwargs)
        outer.check()
        return Call(inner.target, (*inner.args, *call_args), {**(inner.kwargs or {}), **(kwargs or {})})
    return Call(target_of(func), call_args, kwargs)


def target_of(func: Callable[..., Any] | str) -> Target:
    if isinstance(func, RemoteMethod):
        return func.rref, func.name
    if isinstance(func, str):
        return qualified_name(func)
    owner = getattr(func, "__self__", None)
    if owner is not None and not isinstance(owner, (type, types.ModuleType)):
        return owner, str(getattr(func, "__name__", ""))
    return qualified_name(func) if home_of(func)[1] else (func, "__call__")


def creation_of(target: Target) -> Future[Any] | None:
    return target[0].creation if isinstance(target, tuple) and isinstance(target[0], RRef) else None


def description_of(target: Target) -> str:
    if isinstance(target, str):
        return target
    owner, method = target
    return f"{method}() of {owner!r}" if isinstance(owner, RRef) else f"{type(owner).__qualname__}.{method}"
