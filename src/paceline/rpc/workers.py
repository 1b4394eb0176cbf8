"""The rpc workers of a program: their names and ranks, and whether they accept pickles."""

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
    """One worker: its name and its rank."""

    name: str
    id: int


Worker = str | int | WorkerInfo
"""A worker's name, rank or WorkerInfo."""


class Introduction(msgspec.Struct, frozen=True, array_like=True):
    """The data that a joining worker sends to the other workers: its name and its settings."""

    name: str
    pickle: bool


decode_introduction = reader(Introduction, "a worker's introduction")


class Directory:
    """All rpc workers of the program, by name. The constructor raises UsageError if two workers have one name."""

    def __init__(self, introductions: Sequence[Introduction]) -> None:
        self.workers = tuple(WorkerInfo(introduction.name, rank) for rank, introduction in enumerate(introductions))
        self._pickle = tuple(introduction.pickle for introduction in introductions)
        self._ids: dict[str, int] = {}
        for name, rank in self.workers:
            if name in self._ids:
                raise UsageError(
                    f"two workers are called {printable(name, _MAX_NAME)!r}: ranks {self._ids[name]} and {rank}; give "
                    "each its own name in init_rpc"
                )
            self._ids[name] = rank

    def id_of(self, worker: Worker) -> int:
        if type(worker) is int and 0 <= worker < len(self.workers):
            return worker
        name = worker if isinstance(worker, str) else getattr(worker, "name", worker)
        number = self._ids.get(name) if isinstance(name, str) else None
        if number is None:
            known = ", ".join(repr(worker.name) for worker in self.workers[:20])
            more = f" and {len(self.workers) - 20} more" if len(self.workers) > 20 else ""
            raise UsageError(f"unknown worker {printable(str(name), _MAX_NAME)!r}; the workers are {known}{more}")
        return number

    def reads_pickle(self, number: int) -> bool:
        return self._pickle[number]


def check_name(name: str) -> str:
    if not isinstance(name, str) or not name or len(name) > _MAX_NAME or not name.isprintable():
        raise UsageError(
            f"the worker's name is {printable(repr(name), 200)}, expected 1 to {_MAX_NAME} printable characters"
        )
    return name
