"""One simulated cluster from one seed: its settings, its processes, its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from random import Random
from typing import Final

from paceline.protocol.consistency import BoundedDelay, Consistency, Eventual, Sequential
from paceline.protocol.jobs import JobAccount, Key
from paceline.protocol.membership import Member
from paceline.protocol.server import ServerCore
from simulator.clock import SimulatedClock
from simulator.faults import KINDS, Faults
from simulator.messages import num_bytes
from simulator.network import SimulatedNetwork, SimulatedProcess
from simulator.node import SCHEDULER, SimulatedNode
from simulator.oracle import Oracle, Violation
from simulator.scheduler import SimulatedScheduler
from simulator.server import SimulatedServer
from simulator.worker import Poster, SimulatedWorker, examples_in

_DEEP_CHECK_EVENTS: Final = 250
_PATIENCE_S: Final = 30.0
_TO_FORMER: Final = 0.3
"""How long, after the last fault, work may take to end."""


@dataclass(frozen=True, slots=True)
class ClusterSize:
    """What a cluster is made of."""

    num_servers: int
    num_workers: int
    replicas: int
    consistency: Consistency
    num_buckets: int
    num_shards: int
    epochs: int
    iterations_per_shard: tuple[int, ...]
    think_s: tuple[float, float]
    min_replicas: int = 0

    @property
    def all_buckets(self) -> int:
        """Every bucket, as a mask."""
        return (1 << self.num_buckets) - 1

    @classmethod
    def draw(cls, random: Random) -> ClusterSize:
        """Choose a small cluster."""
        consistency: Consistency = random.choice(
            (Sequential(), Sequential(), BoundedDelay(tau=0), BoundedDelay(tau=1), BoundedDelay(tau=3), Eventual())
        )
        num_servers = random.choice((2, 3, 3, 4))
        return cls(
            num_servers=num_servers,
            num_workers=random.choice((2, 3)),
            replicas=random.choice((0, 1, 1, 2)),
            consistency=consistency,
            num_buckets=random.choice((6, 8, 12)),
            num_shards=random.choice((5, 8)),
            epochs=random.choice((1, 2)),
            iterations_per_shard=random.choice(((1,), (2,), (1, 2, 3))),
            think_s=random.choice(((0.0, 0.05), (0.05, 0.2), (0.2, 0.3))),
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one seed."""

    seed: int
    violation: str | None
    fired: Counter[str]
    num_events: int
    virtual_s: float
    trace_hash: int
    num_reads: int
    num_pushes: int
    lost: int


class DataLost(Exception):  # noqa: N818 - an end, not an error
    """Buckets are gone, as they must be when too many servers fail."""


class Cluster:
    """The processes of one seed; :meth:`run` lets them live."""

    def __init__(
        self,
        seed: int,
        *,
        trace: Callable[[str], None] | None = None,
        settings: ClusterSize | None = None,
        faults: tuple[str, ...] = KINDS,
        num_faults: int | None = None,
        may_lose: bool = False,
    ) -> None:
        self.seed = seed
        self.random = Random(seed)
        self.settings = ClusterSize.draw(self.random) if settings is None else settings
        self.is_sequential = isinstance(self.settings.consistency, Sequential)
        self.fired: Counter[str] = Counter()
        self.clock = SimulatedClock()
        self.network = SimulatedNetwork(self.clock, self.random, self.fired, num_bytes)
        self.trace = trace
        if trace is not None:
            self.network.trace = self.note
        self.oracle = Oracle(self.settings.consistency.tau, self.is_sequential)
        self.last_fault_s = 0.0
        self.may_lose = may_lose
        self.unhealthy_until_s: dict[str, float] = {}
        self.is_one_host = self.random.random() < 0.5
        """Whether the scheduler's kernel knows of all processes when they have ended."""
        self._number = 0
        self.scheduler: SimulatedScheduler | None = self._start_scheduler(replaces=False)
        self.is_done = False
        """Whether the job is finished."""
        self.account: JobAccount | None = None
        """What the next poster goes on from."""
        self.has_reports = self.random.random() < 0.5
        """Whether workers report what they find."""
        for server in range(self.settings.num_servers):
            self.start_server(f"s{server}", is_extra=False)
        for worker in range(self.settings.num_workers):
            self.start_worker(f"w{worker}")
        self._start_poster()
        self._faults = Faults(self, faults, num_faults, may_lose=may_lose)

    # What nodes ask for.

    def make_server_core(self) -> ServerCore:
        """A server's core."""
        settings = self.settings
        return ServerCore(settings.consistency, replicas=settings.replicas, min_replicas=settings.min_replicas)

    def ended(self, node: SimulatedNode) -> None:
        """Note that a node stops by itself."""
        self.note(f"{node.name} ends")
        node.end()
        self._tell_end(node)
        if isinstance(node, SimulatedWorker) and not self.workers and not self.is_done:
            self.clock.after(0.05, self._replace, node.host)
        if isinstance(node, Poster):
            self.clock.after(0.05, self._start_poster)

    def removed(self, member: Member, reason: str | None) -> None:
        """Note that a scheduler has removed a member."""
        if reason is not None:
            self.fired["dead"] += 1
            self.note(f"{member.node} ({member.incarnation}) is removed: {reason}")
            if "could not reach" in reason:
                self.fired["expel"] += 1

    def lost(self, buckets: int) -> None:
        """Note that buckets are gone."""
        self.oracle.lost |= buckets
        if self.may_lose:
            raise DataLost
        raise Violation(f"buckets {buckets:b} are lost, though enough servers lived")

    def note(self, text: str) -> None:
        """Say what happens, if anybody listens."""
        if self.trace is not None:
            self.trace(f"{self.clock.now_s:9.5f} {text}")

    # Processes.

    def start_server(self, host: str, *, is_extra: bool = True) -> SimulatedServer:
        """Start a server: one more, or one that the cluster begins with."""
        self._number += 1
        return SimulatedServer(host, f"{host}.{self._number}", self, is_extra=is_extra)

    def _start_scheduler(self, *, replaces: bool, accepts_minority: bool = False) -> SimulatedScheduler:
        self._number += 1
        name = f"scheduler.{self._number}"
        return SimulatedScheduler(name, self, replaces=replaces, accepts_minority=accepts_minority)

    def waits_for(self, scheduler: SimulatedScheduler, servers: Collection[str]) -> None:
        """Note that a scheduler needs servers to take over; the operator sees whether they are dead."""
        if scheduler is self.scheduler and not any(name in self.network.processes for name in servers):
            self._look_for_lost()
            self.note("the operator starts the scheduler again")
            self.fired["operator"] += 1
            self.crash(scheduler)
            self.scheduler = self._start_scheduler(replaces=True, accepts_minority=True)
            self.last_fault_s = max(self.last_fault_s, self.clock.now_s)

    def _replace(self, host: str) -> None:
        self.start_worker(host)

    def _start_poster(self) -> None:
        self._number += 1
        Poster(f"poster.{self._number}", self)

    def start_worker(self, host: str) -> SimulatedWorker:
        """Start a worker."""
        self._number += 1
        return SimulatedWorker(host, f"{host}.{self._number}", self)

    def crash(self, process: SimulatedProcess) -> None:
        """Kill a process."""
        self.note(f"{process.name} crashes")
        if process is self.scheduler:
            self.scheduler = None
        process.end()
        self._tell_end(process)

    def _tell_end(self, process: SimulatedProcess) -> None:
        """Let the schedulers know that a process has ended, if their kernel does."""
        if self.is_one_host:
            for scheduler in self.schedulers:
                scheduler.later(0.001, scheduler.process_ended, process.name)

    def restart_scheduler(self) -> None:
        """Start a scheduler after the former one."""
        if self.scheduler is None:
            self.note("the scheduler is back")
            self.scheduler = self._start_scheduler(replaces=self.random.random() < 0.5)

    @property
    def servers(self) -> list[SimulatedServer]:
        """The servers that live."""
        return [process for process in self.network.processes.values() if isinstance(process, SimulatedServer)]

    def start_second_scheduler(self) -> None:
        """Start a scheduler at the address of one that lives."""
        self.scheduler = self._start_scheduler(replaces=self.random.random() < 0.5)

    def find_scheduler(self) -> str:
        """Where a connection to the scheduler goes: if two live, now and then to the former one still."""
        schedulers = self.schedulers
        if len(schedulers) > 1 and self.random.random() < _TO_FORMER:
            return schedulers[0].name
        return SCHEDULER

    @property
    def schedulers(self) -> list[SimulatedScheduler]:
        """The schedulers that live: one, or two that both believe to lead."""
        return [process for process in self.network.processes.values() if isinstance(process, SimulatedScheduler)]

    @property
    def workers(self) -> list[SimulatedWorker]:
        """The workers that live."""
        return [process for process in self.network.processes.values() if isinstance(process, SimulatedWorker)]

    def can_lose(self, doubtful: Collection[SimulatedServer]) -> bool:
        """Whether all these may fail: of each chain one member stays healthy, and no more than `replicas` do not.

        A server that is being filled counts as one of the chain, for it may become a member before it is missed.
        """
        if self.scheduler is None or not self.scheduler.is_established or not self.oracle.view.version:
            return False
        if doubtful and not self.settings.replicas:
            return False  # one that has nothing yet may have all of a bucket before it is missed
        now_s = self.clock.now_s
        healthy = {
            server.incarnation
            for server in self.servers
            if server not in doubtful
            and server.incarnation in self.oracle.view.servers
            and server.incarnation not in self.scheduler.core.suspects.at_odds
            and not self.network.is_cut_off(server)
            and not (server.is_leaving and self.settings.replicas)  # without, it stays until it is relieved
            and self.unhealthy_until_s.get(server.name, 0.0) < now_s
        }
        for group in self.oracle.view.groups:
            chain = {*group.members, group.filling} - {None}
            if healthy.isdisjoint(group.members) or len(chain - healthy) > self.settings.replicas:
                return False
        return True

    # The end.

    @property
    def expected(self) -> dict[Key, float]:
        """The shards of the job, and how many examples each has."""
        shards, epochs = range(self.settings.num_shards), range(self.settings.epochs)
        return {(epoch, 0, shard): examples_in((epoch, 0, shard)) for epoch in epochs for shard in shards}

    @property
    def with_reports(self) -> list[Key]:
        """The shards in which workers find something to report."""
        return [key for key in self.expected if self.has_reports and key[2] % 3]

    @property
    def is_finished(self) -> bool:
        """Whether all work is done, and the servers have nothing left to do either."""
        scheduler = self.scheduler
        if scheduler is None or not scheduler.is_established:
            return False
        if not self.is_done or self.workers:
            return False
        if not scheduler.core.planner.is_stable:
            return False
        return all(
            server.incarnation in self.oracle.view.servers
            and server.core.version == self.oracle.view.version
            and not server.core.replication.num_pending
            for server in self.servers
        )

    def check(self, *, at_end: bool = False) -> None:
        """Look at everything."""
        for server in self.servers:
            server.validate()
        for scheduler in self.schedulers:
            scheduler.core.validate()
            if scheduler.jobs.ledger is not None:
                scheduler.jobs.ledger.validate()
        of = {server.incarnation: server for server in self.servers if server.incarnation}
        for group in self.oracle.view.groups:
            for member in group.members:
                holder = of.get(member)
                if holder is None or holder.core.version == 0:
                    continue
                for bucket in range(self.settings.num_buckets):
                    if not group.buckets >> bucket & 1:
                        continue
                    data = holder.table.data.get(bucket)
                    if data is None:
                        raise Violation(f"{holder.name} is a member of the chain of bucket {bucket} and has it not")
                    self.oracle.check_acknowledged(bucket, data, holder.name)
                    first = of.get(group.members[0])
                    if at_end and first is not None:
                        self.oracle.check_equal(bucket, first.table.data[bucket], data, holder.name)

    def run(self) -> Outcome:
        """Live until all work is done, or something is wrong."""
        violation = None
        try:
            self._run()
        except DataLost:
            pass
        except Violation as error:
            violation = str(error)
        except Exception as error:  # a machine that fails an assertion is as bad
            if self.trace is not None:
                raise
            violation = f"{type(error).__name__}: {error}"
        if violation is not None:
            self.note(f"VIOLATION {violation}")
        return Outcome(
            self.seed,
            violation,
            self.fired,
            self.clock.num_events,
            self.clock.now_s,
            self.clock.trace_hash,
            self.oracle.num_reads,
            self.oracle.num_pushes,
            self.oracle.lost,
        )

    def _look_for_lost(self) -> None:
        """Note the buckets whose servers have all ended, though a scheduler on another host only misses them."""
        alive = {server.incarnation for server in self.servers}
        lost = sum(group.buckets for group in self.oracle.view.groups if alive.isdisjoint(group.members))
        if lost and self.may_lose:
            self.lost(lost)

    def _run(self) -> None:
        clock = self.clock
        check_at = _DEEP_CHECK_EVENTS
        while clock.step():
            if clock.num_events >= check_at:
                check_at += _DEEP_CHECK_EVENTS
                self.check()
            if clock.num_events % 16 == 0:
                if clock.now_s > self.last_fault_s and self.is_finished:
                    break
                if clock.now_s > self.last_fault_s + _PATIENCE_S:
                    self._look_for_lost()
                    raise Violation(f"work is not done {_PATIENCE_S:g} s after the last fault (progress)")
        self.check(at_end=True)
