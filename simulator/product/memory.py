"""Memory shortage: allocations of sparse tables fail in some processes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final

from paceline.tables.sparse_store import SparseStore
from simulator.world import VirtualProcess, VirtualWorld

_REFUSED: Final = 0.5


class MemoryShortage:
    """The processes that are short of memory."""

    def __init__(self, world: VirtualWorld) -> None:
        self.refusing: dict[VirtualProcess, None] = {}
        """Processes that often have no memory for a client's request. They reject the request without changes."""
        self.failing: dict[VirtualProcess, None] = {}
        """Processes that have no memory for accepted changes. They end."""
        self.was_failing: dict[VirtualProcess, None] = {}
        self.num_failed = 0
        self._world = world

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Return a context in which allocations of stores may fail."""
        real = {name: getattr(SparseStore, name) for name in ("reserve", "push", "load_bucket")}
        try:
            for name, method in real.items():
                setattr(SparseStore, name, self._guarded(name, method))
            yield
        finally:
            for name, method in real.items():
                setattr(SparseStore, name, method)

    def _guarded(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(store: SparseStore, *arguments: Any) -> Any:
            process = self._world.current.process
            is_refused = name == "reserve" and process in self.refusing and self._world.random.random() < _REFUSED
            if is_refused or (name != "reserve" and process in self.failing):
                self.num_failed += 1
                self._world.note(f"{process.name} has no memory to {name}")
                raise MemoryError("no memory: an error of the simulation")
            return method(store, *arguments)

        return call
