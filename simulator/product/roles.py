"""Connect the product's servers to the simulation, and give access to their tables and log."""

from __future__ import annotations

import logging
from types import TracebackType

from paceline.errors import PacelineError
from paceline.tables.server_tables import ServerTables
from simulator.network import VirtualNetwork
from simulator.product.transport import VirtualTransport
from simulator.world import VirtualProcess, VirtualWorld


class VirtualJoining:
    """Replaces `roles.Joining`, with which a server finds and joins its cluster."""

    def __init__(self, scheduler: str, network: VirtualNetwork) -> None:
        self.scheduler = scheduler
        self._network = network

    def transport(self) -> VirtualTransport:
        """Return the transport of the simulation."""
        return VirtualTransport(self._network)


def tables_of(server: VirtualProcess) -> ServerTables:
    """Return the tables of a server."""
    seen, todo = set(), [server.role]
    while todo:
        found = todo.pop(0)
        if isinstance(found, ServerTables):
            return found
        if id(found) not in seen and type(found).__module__.startswith("paceline.ps"):
            seen.add(id(found))
            todo += list(getattr(found, "__dict__", {}).values())
    raise AssertionError(f"{server.name} has no tables")


class Log(logging.Handler):
    """Receives the product's log during a simulation; an unexpected exception is a violation."""

    def __init__(self, world: VirtualWorld) -> None:
        super().__init__(logging.WARNING)
        self.violation: str | None = None
        self._world = world
        self._logger = logging.getLogger("paceline")
        self._asyncio = logging.getLogger("asyncio")

    def emit(self, record: logging.LogRecord) -> None:
        """Trace a record of the log; store a violation if the record shows one."""
        text = record.getMessage()
        self._world.note(f"{self._world.current.process.name} logs: {text}")
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and not isinstance(error, PacelineError) and self.violation is None:
            self.violation = f"(exceptions) {self._world.current.process.name}: {text}: {type(error).__name__}: {error}"
        if "replica" in text and "differ" in text and self.violation is None:
            self.violation = f"(replicas) {self._world.current.process.name} logs: {text}"

    def __enter__(self) -> Log:
        for logger in (self._logger, self._asyncio):
            logger.addHandler(self)
            logger.propagate = False
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for logger in (self._logger, self._asyncio):
            logger.removeHandler(self)
            logger.propagate = True
