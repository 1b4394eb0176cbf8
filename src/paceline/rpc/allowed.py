"""Which functions and classes others may name: those of the modules that this process has allowed, and no others.

A name is ``module:qualified.name``. An allowed module gives what is *defined* in it, by public names; what it has only
imported (``os``, a function of another module) is not reached through it. Pure but for the import of allowed modules.
"""

from __future__ import annotations

import importlib
import sys
import threading
import types
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from paceline.errors import UsageError, printable

_Named = TypeVar("_Named", bound=Callable[..., Any])
_decorated: set[str] = set()
_OWN = ("paceline.rpc.autograd", "paceline.rpc.optimizer")
"""What decorates functions of its own; imported when another process first uses it."""


def allow(function: _Named) -> _Named:
    """Let other processes call this function, or make and get values of this class: a decorator."""
    _decorated.add(qualified_name(function))
    return function


def qualified_name(function: Callable[..., Any] | str) -> str:
    """Return ``module:qualified.name``; of text, ``package.module.name`` is read as well. Raises UsageError."""
    if isinstance(function, str):
        if ":" in function:
            return function
        module, _, name = function.rpartition(".")
        if not module:
            raise UsageError(f"{function!r} names no function of a module; write module:function")
        return f"{module}:{name}"
    owner = getattr(function, "__self__", None)
    if owner is not None and not isinstance(owner, (type, types.ModuleType)):
        raise UsageError(
            f"{printable(repr(function), 200)} is a method of an object of this process; make the object with remote() "
            "and call rref.rpc_sync().method(...)"
        )
    module = str(getattr(function, "__module__", None) or "")
    name = str(getattr(function, "__qualname__", ""))
    if not module or not name or "<" in name:
        raise UsageError(
            f"{printable(repr(function), 200)} has no name by which another process could find it; call a function "
            "that a module defines at its top level or in a class, or give its name as module:function"
        )
    return f"{module}:{name}"


class Allowed:
    """What this process has allowed. For several threads at once."""

    def __init__(self, entries: Iterable[str] = ()) -> None:
        """`entries`: modules, packages with all that is below them (``package.*``) or single names
        (``module:function``).
        """
        self._modules: set[str] = set()
        self._packages: tuple[str, ...] = ()
        self._names: set[str] = set()
        self._found: dict[str, Any] = {}
        self._lock = threading.Lock()
        for entry in entries:
            if not isinstance(entry, str) or not entry or entry in ("*", ".*"):
                raise UsageError(
                    f"allow has {printable(repr(entry), 100)}; a module ('my_module'), a package with all of its "
                    "modules ('my_package.*') or a function ('my_module:function') was expected"
                )
            if ":" in entry:
                self._names.add(entry)
            elif entry.endswith(".*"):
                self._packages += (entry[:-1],)
                self._modules.add(entry[:-2])
            else:
                self._modules.add(entry)

    def resolve(self, name: str) -> Any:
        """Return the function or class of this name. Raises UsageError if it is not allowed or not there."""
        found = self._found.get(name)
        if found is None:
            with self._lock:
                found = self._found[name] = self._look_up(name)
        return found

    def resolve_class(self, name: Any) -> type:
        """Return the class of this name, as :meth:`resolve`."""
        found = self.resolve(name) if isinstance(name, str) else None
        if not isinstance(found, type):
            raise UsageError(f"{printable(repr(name), 200)} is no class")
        return found

    def check_method(self, value: Any, method: str) -> Any:
        """Return a method of an object that is held here, bound: a public one, or ``__call__``, of an allowed class."""
        kind = type(value)
        is_public = method == "__call__" or not method.startswith("_")
        if not is_public or not self.has_class(kind):
            raise UsageError(
                f"the method {printable(method, 100)!r} of {kind.__module__}.{kind.__qualname__} is not allowed here; "
                f"give its module to init_rpc(allow=[{kind.__module__!r}]), or decorate the class with "
                "paceline.rpc.allow"
            )
        function = getattr(kind, method, None)
        if not callable(function):
            raise UsageError(f"{kind.__module__}.{kind.__qualname__} has no method {printable(method, 100)!r}")
        return getattr(value, method)

    def has_class(self, kind: type) -> bool:
        """Return whether a class is allowed."""
        name = f"{kind.__module__}:{kind.__qualname__}"
        return self._has_module(kind.__module__) or name in self._names or name in _decorated

    def _has_module(self, module: str) -> bool:
        return module in self._modules or module.startswith(self._packages)

    def _look_up(self, name: str) -> Any:
        module_name, _, path = name.partition(":")
        steps = path.split(".")
        if module_name in _OWN:
            importlib.import_module(module_name)
        is_named = name in self._names or name in _decorated
        is_public = all(step and not step.startswith("_") for step in steps)
        if not is_named and not (is_public and self._has_module(module_name)):
            raise not_allowed(name)
        module = sys.modules.get(module_name)
        if module is None:
            try:
                module = importlib.import_module(module_name)
            except ImportError as error:
                raise UsageError(f"the module {module_name!r} cannot be imported here: {error}") from None
        found: Any = module
        for step in steps:
            found = getattr(found, step, None)
            if not is_named and getattr(found, "__module__", None) != module_name:
                if found is None:
                    raise UsageError(f"the module {module_name!r} has no {printable(path, 100)!r}")
                raise not_allowed(name)
        if not callable(found):
            raise UsageError(f"{printable(name, 200)!r} is no function")
        return found


def not_allowed(name: str) -> UsageError:
    """Return the error for a name that this process has not allowed."""
    shown = printable(name, 200)
    module = shown.partition(":")[0]
    return UsageError(
        f"{shown!r} is not allowed here: give its module to init_rpc(allow=[{module!r}]) in the process that is "
        "called, or decorate it there with paceline.rpc.allow"
    )
