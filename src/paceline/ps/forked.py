"""Raise a clear error if a forked process uses its parent's client.

A forked child has its parent's sockets but not its parent's threads. Receivers would treat the child's messages, even a
Leave, as messages of the parent.
"""

from __future__ import annotations

import os
import weakref
from types import TracebackType
from typing import NoReturn, Protocol

from paceline.errors import UsageError


class Owned(Protocol):
    """An object that belongs to the process that created it."""

    def disown(self) -> None:
        """Disable this object in a forked child, because its sockets and threads belong to the parent."""


class NoLock:
    """Replaces the lock of an object in a forked child; acquiring it raises UsageError."""

    def __enter__(self) -> NoReturn:
        raise UsageError(
            f"this client belongs to the parent of the forked process {os.getpid()}: connect in the child, or use "
            "multiprocessing's start method 'spawn'"
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing."""


_owned: weakref.WeakSet[Owned] = weakref.WeakSet()


def own(thing: Owned) -> None:
    """Make forked children of this process disown an object."""
    _owned.add(thing)


def _disown() -> None:
    for thing in list(_owned):
        thing.disown()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_disown)
