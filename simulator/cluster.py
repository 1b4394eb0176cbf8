"""Simulate one cluster, given a seed: processes in virtual time, faults and checks.

:class:`Cluster` is the base of protocol runs and product runs. The nodes are either the protocol's cores with thin
adapters (:mod:`simulator.protocol`) or the product's own processes (:mod:`simulator.product`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Final

from paceline.protocol.chains import ChainGroup
from paceline.protocol.scheduler.cluster import ClusterCore, Phase
from simulator.network import VirtualNetwork
from simulator.oracle import DataLost, Oracle, Violation
from simulator.settings import RunSettings
from simulator.world import Deadlock, VirtualProcess, VirtualWorld

_PATIENCE_S: Final = 90.0
"""Maximum time from the last fault to the end of the work."""
_WATCH_S: Final = 0.05
_QUIET_S: Final = 0.5
"""Maximum time until all replicas have the sums of the last iteration."""
_REPORT_DELAY_S: Final = 0.002
_NOTHING: Final[AbstractContextManager[None]] = nullcontext()


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one seed."""

    seed: int
    violation: str | None
    fired: Counter[str]
    trace_hash: int
    num_events: int
    virtual_s: float
    num_pushes: int
    num_reads: int
    num_compared: int
    lost: int
    """The lost buckets, as a mask."""


class FaultSchedule(ABC):
    """The faults of a cluster."""

    last_s: float
    """The last time at which a fault began or ended."""

    @property
    @abstractmethod
    def is_under_way(self) -> bool:
        """Whether a fault is in progress or has not begun yet."""

    @abstractmethod
    def plan(self) -> None:
        """Select the faults of a phase at random."""

    @abstractmethod
    def end(self) -> None:
        """End the faults that are in progress."""


class Cluster(ABC):
    """The processes of one seed; :meth:`run` runs them."""

    latencies_s: ClassVar[Sequence[float]] = (0.0003, 0.001, 0.003)
    bandwidths: ClassVar[Sequence[float]] = (2e6, 2e7, 1e9)
    """Possible bandwidths in bytes per second."""

    def __init__(
        self,
        seed: int,
        settings: RunSettings | None,
        trace: Callable[[str], None] | None,
        make_oracle: Callable[[RunSettings], Oracle],
    ) -> None:
        self.seed = seed
        self.world = world = VirtualWorld(seed, trace=trace)
        self.settings = RunSettings.draw(world.random) if settings is None else settings
        self.network = VirtualNetwork(world, self.latencies_s, self.bandwidths)
        self.oracle = make_oracle(self.settings)
        self.scheduler: VirtualProcess | None = None
        self.servers: dict[str, VirtualProcess] = {}
        self.workers: dict[str, VirtualProcess] = {}
        """All workers that were started, dead or alive, by name. `servers` has all servers."""
        self.phase = 0
        self.faults: FaultSchedule
        self._number = 0

    # The nodes.

    @abstractmethod
    def start_scheduler(self, *, replaces: bool = False, accepts_minority: bool = False) -> None:
        """Start a scheduler. It may take over from an earlier scheduler."""

    @abstractmethod
    def start_server(self, *, is_extra: bool = False) -> None:
        """Start one of the initial servers, or with `is_extra` an additional server."""

    @abstractmethod
    def start_worker(self) -> None:
        """Start a worker if there is work for another worker."""

    @abstractmethod
    def core_of(self, scheduler: VirtualProcess) -> ClusterCore | None:
        """Return the core of a scheduler; None if the core does not exist yet."""

    @abstractmethod
    def is_joined(self, process: VirtualProcess) -> bool:
        """Return whether a server or worker has become a member."""

    @abstractmethod
    def leave(self, process: VirtualProcess) -> bool:
        """Request a server or worker to leave normally; return False if it cannot leave."""

    # The work.

    @abstractmethod
    def is_through(self) -> bool:
        """Return whether the work of this phase is done."""

    @abstractmethod
    def check(self) -> None:
        """Check all guarantees while the cluster runs. Raises Violation."""

    @abstractmethod
    def check_end(self) -> None:
        """Compare all tables at the end of a phase. Raises Violation."""

    def installed(self) -> AbstractContextManager[None]:
        """Return a context in which the nodes use this world."""
        return _NOTHING

    # The state of the cluster, as seen by the simulation.

    @property
    def core(self) -> ClusterCore | None:
        """The core of the scheduler; None if the scheduler does not lead the cluster."""
        core = None if self.scheduler is None else self.core_of(self.scheduler)
        return core if core is not None and core.is_established and core.phase is Phase.LEADING else None

    @property
    def groups(self) -> Sequence[ChainGroup]:
        """The chains of the newest committed view; none without a leading scheduler."""
        return () if self.core is None else self.core.committed.groups

    @property
    def live_servers(self) -> list[VirtualProcess]:
        """The live servers that have become members."""
        return [process for process in self.servers.values() if not process.is_dead and self.is_joined(process)]

    @property
    def live_workers(self) -> list[VirtualProcess]:
        """The live workers that have become members."""
        return [process for process in self.workers.values() if not process.is_dead and self.is_joined(process)]

    def incarnation_of(self, process: VirtualProcess) -> int | None:
        """Return the incarnation of a process; None if the scheduler does not know it."""
        core = self.core
        for member in () if core is None else core.membership.members:
            if member.node == process.name or f"-{process.name}-" in member.node:
                return member.incarnation
        return None

    def servers_by_incarnation(self) -> dict[int, VirtualProcess]:
        """Return the live servers that are members, by incarnation."""
        found = {self.incarnation_of(process): process for process in self.servers.values() if not process.is_dead}
        return {incarnation: process for incarnation, process in found.items() if incarnation is not None}

    def is_complete(self) -> bool:
        """Return whether every chain has all its servers, and no fill is running."""
        groups, live = self.groups, self.servers_by_incarnation()
        length = min(1 + self.settings.replicas, len(live))
        return bool(groups) and all(
            len(group.members) == length and group.filling is None and live.keys() >= set(group.members)
            for group in groups
        )

    # Processes.

    def next_name(self, kind: str) -> str:
        """Return the name of a new process."""
        self._number += 1
        return f"{kind}{self._number}"

    def follow(self, process: VirtualProcess) -> None:
        """Arrange that the end of the process breaks its connections and is reported to the scheduler."""
        process.at_death.append(partial(self.ended, process))

    def kill(self, process: VirtualProcess, *, is_silent: bool = False) -> None:
        """End a process. With `is_silent` its host fails too, so its connections stay open."""
        process.is_silent = is_silent
        process.kill()

    def ended(self, process: VirtualProcess) -> None:
        """Record the end of a process."""
        self.world.note(f"{process.name} has ended")
        self.network.ended(process, is_silent=process.is_silent)
        if process is self.scheduler:
            self.scheduler = None
        elif self.settings.is_one_host and not process.is_silent:
            self.world.after(_REPORT_DELAY_S, self._report_end, process)

    def _report_end(self, process: VirtualProcess) -> None:
        if self.scheduler is not None:
            self.report_end(self.scheduler, process)

    @abstractmethod
    def report_end(self, scheduler: VirtualProcess, process: VirtualProcess) -> None:
        """Report the end of a process to the scheduler, as the kernel does."""

    # A run.

    def run(self) -> Outcome:
        """Run the cluster and return the outcome."""
        violation: str | None = None
        with self.installed():
            try:
                self._live()
            except DataLost:
                pass
            except (Violation, Deadlock) as error:
                violation = str(error)
            except AssertionError as error:  # an invariant of a core
                if self.world.trace is not None:
                    raise
                violation = f"{type(error).__name__}: {error}"
            finally:
                self.world.close()
        violation = violation or self.found()
        if violation is not None:
            self.world.note(f"VIOLATION {violation}")
        world, oracle = self.world, self.oracle
        return Outcome(
            self.seed, violation, self.network.fired, world.trace_hash, world.num_events, world.time_s,
            oracle.num_pushes, oracle.num_reads, oracle.num_compared, oracle.lost,
        )  # fmt: skip

    def found(self) -> str | None:
        """Return a violation that was found without an exception, or None."""
        return None

    def _live(self) -> None:
        settings = self.settings
        self.world.note(f"{settings}")
        self.begin()
        for phase in range(settings.num_phases):
            self.phase = phase
            self.faults.plan()
            self.wait("the end of all work", lambda: not self.faults.is_under_way and self.is_through())
            self.faults.end()
            self.wait("whole chains", self.is_complete)
            self.world.sleep(_QUIET_S)
            self.check_end()
        self.phase = settings.num_phases
        self.wait("the end of all workers", lambda: all(process.is_dead for process in self.workers.values()))

    def begin(self) -> None:
        """Start the first processes."""
        self.start_scheduler()
        self.world.sleep(0.01)
        for _ in range(self.settings.num_servers):
            self.start_server()
        for _ in range(self.settings.num_workers):
            self.start_worker()

    def wait(self, aim: str, is_reached: Callable[[], bool]) -> None:
        """Check all guarantees repeatedly until ``is_reached()`` is true. Raises Violation after a timeout."""
        began_s = self.world.time_s
        while not is_reached():
            self._operate()
            self.check()
            if self.world.time_s > max(began_s, self.faults.last_s) + _PATIENCE_S:
                raise Violation(f"(progress) waited {_PATIENCE_S:g} s for {aim}: {self.describe()}")
            self.world.sleep(_WATCH_S)

    def _operate(self) -> None:
        """Restart the scheduler if it waits for dead servers, as an operator would."""
        core = None if self.scheduler is None else self.core_of(self.scheduler)
        if self.scheduler is not None and core is not None and core.needed and not self.scheduler.is_paused:
            live = {process.name for process in self.servers.values() if not process.is_dead}
            if not any(member.node in live for member in core.needed):
                self.world.note("the operator starts the scheduler again")
                self.network.fired["operator"] += 1
                self.kill(self.scheduler)
                self.start_scheduler(replaces=True, accepts_minority=True)

    def describe(self) -> str:
        """Return a text for a Violation: the live processes and the chains."""
        live = [process.name for process in (*self.servers.values(), *self.workers.values()) if not process.is_dead]
        chains = [(bin(group.buckets).count("1"), group.members, group.filling) for group in self.groups]
        return f"live are {', '.join(live)}; chains {chains}"
