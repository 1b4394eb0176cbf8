"""The workers of a program: their names, and who may send what to whom."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from paceline.errors import UsageError, printable
from paceline.rpc.allowed import allow
from paceline.transport import reader

_MAX_NAME = 128


@allow
class WorkerInfo(NamedTuple):
    """One worker: its name, and its number among all (its rank)."""

    name: str
    id: int


Worker = str | int | WorkerInfo
"""What calls take for a worker: its name, its number or its WorkerInfo."""


class Introduction(msgspec.Struct, frozen=True, array_like=True):
    """What a worker says of itself when all meet."""

    name: str
    pickle: bool


decode_introduction = reader(Introduction, "a worker's introduction")


class Directory:
    """All workers by name. Raises UsageError if two have the same."""

    def __init__(self, introductions: Sequence[Introduction]) -> None:
        """`introductions`: in rank order."""
        self.workers = tuple(WorkerInfo(each.name, rank) for rank, each in enumerate(introductions))
        self._pickle = tuple(each.pickle for each in introductions)
        self._ids: dict[str, int] = {}
        for name, rank in self.workers:
            if name in self._ids:
                raise UsageError(
                    f"two workers are called {printable(name, _MAX_NAME)!r}: ranks {self._ids[name]} and {rank}; give "
                    "each its own name in init_rpc"
                )
            self._ids[name] = rank

    def id_of(self, worker: Worker) -> int:
        """Return a worker's number, of its name, its number or what is known of it. Raises UsageError for none."""
        if type(worker) is int and 0 <= worker < len(self.workers):
            return worker
        name = worker if isinstance(worker, str) else getattr(worker, "name", worker)
        number = self._ids.get(name) if isinstance(name, str) else None
        if number is None:
            known = ", ".join(repr(each.name) for each in self.workers[:20])
            more = f" and {len(self.workers) - 20} more" if len(self.workers) > 20 else ""
            raise UsageError(f"there is no worker {printable(str(name), _MAX_NAME)!r}; the workers are {known}{more}")
        return number

    def reads_pickle(self, number: int) -> bool:
        """Return whether a worker unpickles what comes."""
        return self._pickle[number]


def check_name(name: str) -> str:
    """Return a worker's name, or raise UsageError if it cannot be one."""
    if not isinstance(name, str) or not name or len(name) > _MAX_NAME or not name.isprintable():
        raise UsageError(
            f"the worker's name is {printable(repr(name), 200)}, 1 to {_MAX_NAME} printable characters were expected"
        )
    return name
