"""Import filters from users' modules.

A process imports only modules that were named at its start (``--filter-module``, `filter_modules`). Another process
cannot cause an import: messages contain only names of filters, which the receiver looks up in its registry.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from paceline.errors import UsageError
from paceline.filters.base import FILTERS, Filter, class_path


def import_filter_modules(names: Sequence[str], path: Sequence[str] = ()) -> None:
    """Import modules from Python's search path, the current folder and `path`.

    Raises UsageError if a module is missing, has no filter or raises an error.
    """
    if isinstance(names, str):
        raise UsageError(f"filter_modules={names!r}: expected a list of module names")
    if names:
        sys.path.extend(folder for folder in (*path, os.getcwd()) if folder not in sys.path)
    for name in names:
        _import(name)


def _import(name: str) -> None:
    if name == "__main__":
        raise UsageError(
            "a filter is defined in the main program, which other processes cannot import: move it into a module of "
            "its own"
        )
    try:
        module = importlib.import_module(name)
    except UsageError:  # raised by a filter in the module
        raise
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name in (name, name.partition(".")[0]):
            raise UsageError(f"filter module {name!r} does not exist in {os.getcwd()} or on PYTHONPATH") from None
        raise UsageError(f"filter module {name!r} cannot be imported: {type(error).__name__}: {error}") from error
    if not any(isinstance(value, type) and issubclass(value, Filter) for value in vars(module).values()):
        raise UsageError(
            f"filter module {name!r} has no filter: expected a class derived from paceline.filters.ValueFilter, …"
        )


def modules_of(filters: Sequence[Filter]) -> list[str]:
    """Return the users' modules that define these filters. Other processes must import these modules."""
    modules = (type(chosen).__module__ for chosen in filters)
    return list(dict.fromkeys(module for module in modules if not module.startswith("paceline.")))


def modules_named_in(text: str) -> list[str]:
    found = [class_path(entry) for entry in text.split(",")]
    return list(dict.fromkeys(path[0] for path in found if path is not None))


def with_modules(text: str) -> str:
    """Return ``--filters`` with each user's filter as MODULE:CLASS, so that other processes can import it."""
    return ",".join(_with_module(entry.strip()) for entry in text.split(","))


def _with_module(text: str) -> str:
    name, *settings = text.split(":")
    kind = FILTERS.get(name)
    if kind is None or kind.__module__.startswith("paceline.") or class_path(text) is not None:
        return text
    return ":".join([kind.__module__, kind.__qualname__, *settings])
