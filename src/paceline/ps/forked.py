"""Clients in a forked process: one clear error, instead of two processes that speak on one connection.

A child has its parent's sockets and none of its threads. What it sends would be taken for its parent's, up to the word
that it leaves.
"""

from __future__ import annotations

import os
import weakref
from types import TracebackType
from typing import NoReturn, Protocol

from paceline.errors import UsageError


class Owned(Protocol):
    """What belongs to the process that made it."""

    def disown(self) -> None:
        """Leave everything to the parent of this process, which has been forked."""


class NoLock:
    """Stands in a forked process for the lock that everything is done under."""

    def __enter__(self) -> NoReturn:
        raise UsageError(
            f"this client was made before process {os.getpid()} was forked, and is its parent's: connect in the child, "
            "or start it by multiprocessing's 'spawn'"
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing was entered."""


_owned: weakref.WeakSet[Owned] = weakref.WeakSet()


def own(thing: Owned) -> None:
    """Have a child of this process disown it."""
    _owned.add(thing)


def _disown() -> None:
    for thing in list(_owned):
        thing.disown()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_disown)
