"""Filters of users' own modules.

Which modules a process imports is said where it is started (``--filter-module``, `filter_modules`), never by a peer:
what comes over the wire names filters, and is looked up among those that are there.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from paceline.errors import UsageError
from paceline.filters.base import FILTERS, Filter, class_path


def import_filter_modules(names: Sequence[str], path: Sequence[str] = ()) -> None:
    """Import modules that define filters; they are also looked for in the current folder, and on `path`.

    Raises UsageError for a module that is not there, that fails, or that has no filter.
    """
    if isinstance(names, str):
        raise UsageError(f"filter_modules={names!r}: expected a list of modules' names")
    if names:
        sys.path.extend(each for each in (*path, os.getcwd()) if each not in sys.path)
    for name in names:
        _import(name)


def _import(name: str) -> None:
    if name == "__main__":
        raise UsageError(
            "a filter is defined in the program that was started, which other processes cannot import: put it into a "
            "module of its own"
        )
    try:
        module = importlib.import_module(name)
    except UsageError:  # of a filter in it
        raise
    except Exception as error:  # whatever the module raises
        if isinstance(error, ModuleNotFoundError) and error.name in (name, name.partition(".")[0]):
            raise UsageError(f"there is no module {name!r} of filters in {os.getcwd()} or on PYTHONPATH") from None
        raise UsageError(f"module {name!r} of filters cannot be imported: {type(error).__name__}: {error}") from error
    if not any(isinstance(each, type) and issubclass(each, Filter) for each in vars(module).values()):
        raise UsageError(
            f"module {name!r} has no filter: expected a class derived from paceline.filters.ValueFilter, …"
        )


def modules_of(filters: Sequence[Filter]) -> list[str]:
    """Return the modules of those filters that are users' own, for processes that have to know them."""
    modules = (type(each).__module__ for each in filters)
    return list(dict.fromkeys(each for each in modules if not each.startswith("paceline.")))


def modules_named_in(text: str) -> list[str]:
    """Return the modules of the filters that ``--filters`` names as MODULE:CLASS."""
    found = [class_path(each) for each in text.split(",")]
    return list(dict.fromkeys(each[0] for each in found if each is not None))


def with_modules(text: str) -> str:
    """Return ``--filters`` with users' own filters as MODULE:CLASS, from which another process knows what to import."""
    return ",".join(_with_module(each.strip()) for each in text.split(","))


def _with_module(text: str) -> str:
    name, *settings = text.split(":")
    kind = FILTERS.get(name)
    if kind is None or kind.__module__.startswith("paceline.") or class_path(text) is not None:
        return text
    return ":".join([kind.__module__, kind.__qualname__, *settings])
