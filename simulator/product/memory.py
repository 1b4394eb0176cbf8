"""Memory that runs out: what the store of a sparse table asks for is refused, in the processes that are short of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final

from paceline.tables.sparse_store import SparseStore
from simulator.world import VirtualProcess, VirtualWorld

_REFUSED: Final = 0.5


class MemoryShortage:
    """Which processes are short of memory, and for what."""

    def __init__(self, world: VirtualWorld) -> None:
        self.refusing: dict[VirtualProcess, None] = {}
        """Those that often get none for what clients send: they refuse it, and nothing has changed."""
        self.failing: dict[VirtualProcess, None] = {}
        """Those that get none for what is decided: they end."""
        self.was_failing: dict[VirtualProcess, None] = {}
        self.num_failed = 0
        self._world = world

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Have stores ask here first."""
        real = {name: getattr(SparseStore, name) for name in ("reserve", "push", "load_bucket")}
        try:
            for name, method in real.items():
                setattr(SparseStore, name, self._asking(name, method))
            yield
        finally:
            for name, method in real.items():
                setattr(SparseStore, name, method)

    def _asking(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(store: SparseStore, *arguments: Any) -> Any:
            process = self._world.current.process
            is_refused = name == "reserve" and process in self.refusing and self._world.random.random() < _REFUSED
            if is_refused or (name != "reserve" and process in self.failing):
                self.num_failed += 1
                self._world.note(f"{process.name} has no memory to {name}")
                raise MemoryError("no memory: the simulation has it so")
            return method(store, *arguments)

        return call
