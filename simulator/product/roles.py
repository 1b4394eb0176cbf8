"""What the harness sees of the product's roles from outside: who they know, what they hold, what they log."""

from __future__ import annotations

import logging
from types import TracebackType

from paceline.errors import PacelineError
from paceline.protocol.buckets import Buckets
from paceline.tables.server_tables import ServerTables
from simulator.product.network import VirtualNetwork
from simulator.product.transport import VirtualTransport
from simulator.product.world import VirtualProcess, VirtualWorld


class VirtualJoining:
    """How a server finds its cluster: stands for `roles.Joining`."""

    def __init__(self, scheduler: str, network: VirtualNetwork) -> None:
        self.scheduler = scheduler
        self._network = network

    def transport(self) -> VirtualTransport:
        """Return the transport of the simulation."""
        return VirtualTransport(self._network)


def chains_of(scheduler: VirtualProcess | None) -> list[tuple[Buckets, tuple[int, ...], bool]]:
    """Return the chains of the newest committed view: buckets, servers by incarnation, and whether one is filled."""
    if scheduler is None or scheduler.role is None or not scheduler.role.core.is_established:
        return []
    core = scheduler.role.core
    return [(group.buckets, group.members, group.filling is not None) for group in core.committed.groups]


def incarnation_of(scheduler: VirtualProcess | None, process: VirtualProcess) -> int | None:
    """Return the incarnation that a process has by the scheduler; None if that does not know it."""
    if scheduler is None or scheduler.role is None:
        return None
    for member in scheduler.role.core.membership.members:
        if member.node == process.name or f"-{process.name}-" in member.node:
            return int(member.incarnation)
    return None


def tables_of(server: VirtualProcess) -> ServerTables:
    """Return the tables of a server, wherever it keeps them."""
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
    """Takes what the product logs while a simulation runs; an exception that nobody expected is a violation."""

    def __init__(self, world: VirtualWorld) -> None:
        super().__init__(logging.WARNING)
        self.violation: str | None = None
        self._world = world
        self._logger = logging.getLogger("paceline")
        self._asyncio = logging.getLogger("asyncio")

    def emit(self, record: logging.LogRecord) -> None:
        """Note a record."""
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
