"""Simulate a cluster of a scheduler, servers, workers and a poster: thin adapters around the protocol's cores."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from typing_extensions import override

from paceline.protocol.buckets import buckets_in
from paceline.protocol.scheduler.cluster import ClusterCore
from simulator.cluster import Cluster
from simulator.faults import WEIGHTS, Faults
from simulator.oracle import Oracle, Violation
from simulator.protocol.node import SimulatedNode, Surroundings
from simulator.protocol.scheduler import SimulatedScheduler
from simulator.protocol.server import SimulatedServer
from simulator.protocol.worker import Poster, SimulatedWorker, Work
from simulator.settings import RunSettings
from simulator.world import VirtualProcess

KINDS: Final = tuple(kind for kind in WEIGHTS if kind not in ("refuse-memory", "out-of-memory", "snapshot", "disk"))
"""The faults of protocol runs."""
FOLLOWING: Final = ("restart", "operator", "drop", "expel", "superseded", "duplicate")
"""Events that faults cause, and that are counted too."""
_REPLACED_S: Final = 0.05
_CHECKS_S: Final = 0.2


class ProtocolCluster(Cluster):
    """The cluster of one seed."""

    def __init__(
        self,
        seed: int,
        *,
        settings: RunSettings | None = None,
        faults: tuple[str, ...] = KINDS,
        num_faults: int | None = None,
        allow_loss: bool = False,
        trace: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(seed, settings, trace, lambda settings: Oracle(settings, allow_loss=allow_loss))
        chosen = self.settings = replace(self.settings, num_phases=1)
        self._work = Work(chosen, has_reports=self.world.random.random() < 0.5)
        self._around = Surroundings(self.network, self.oracle, chosen)
        self._next_check_s = 0.0
        iterations = chosen.num_shards * chosen.epochs * sum(chosen.iterations_per_shard)
        iterations //= len(chosen.iterations_per_shard) * chosen.num_workers
        work_s = 0.3 + iterations * (chosen.think_s / 2 + 0.02)
        self.faults = Faults(self, faults, num_faults, spans_s=(work_s,), allow_loss=allow_loss)

    # The nodes.

    @override
    def begin(self) -> None:
        super().begin()
        self._start_poster()

    @override
    def start_scheduler(self, *, replaces: bool = False, accepts_minority: bool = False) -> None:
        name = self.next_name("scheduler.")
        self.scheduler = SimulatedScheduler(name, self._around, replaces=replaces, accepts_minority=accepts_minority)
        self.follow(self.scheduler)

    @override
    def start_server(self, *, is_extra: bool = False) -> None:
        self._add(self.servers, SimulatedServer(self.next_name("server."), self._around, is_extra=is_extra))

    @override
    def start_worker(self) -> None:
        self._add(self.workers, SimulatedWorker(self.next_name("worker."), self._around, self._work))

    def _start_poster(self) -> None:
        self.follow(Poster(self.next_name("poster."), self._around, self._work))

    def _add(self, processes: dict[str, VirtualProcess], process: VirtualProcess) -> None:
        processes[process.name] = process
        self.follow(process)

    @override
    def ended(self, process: VirtualProcess) -> None:
        super().ended(process)
        if isinstance(process, Poster):
            self.world.after(_REPLACED_S, self._start_poster)
        elif isinstance(process, SimulatedWorker):
            self.world.after(_REPLACED_S, self._replace_worker)

    def _replace_worker(self) -> None:
        if not self._work.is_done and all(worker.is_dead for worker in self.workers.values()):
            self.start_worker()

    @override
    def report_end(self, scheduler: VirtualProcess, process: VirtualProcess) -> None:
        assert isinstance(scheduler, SimulatedScheduler)
        scheduler.run(scheduler.process_ended, process.name)

    @override
    def core_of(self, scheduler: VirtualProcess) -> ClusterCore:
        assert isinstance(scheduler, SimulatedScheduler)
        return scheduler.core.cluster

    @override
    def is_joined(self, process: VirtualProcess) -> bool:
        assert isinstance(process, SimulatedNode)
        return process.is_member

    @override
    def leave(self, process: VirtualProcess) -> bool:
        assert isinstance(process, SimulatedServer | SimulatedWorker)
        process.run(process.leave)
        return True

    # The work.

    @property
    def _nodes(self) -> list[SimulatedServer]:
        return [node for node in self.servers.values() if isinstance(node, SimulatedServer) and not node.is_dead]

    @override
    def is_through(self) -> bool:
        return self._work.is_done and all(worker.is_dead for worker in self.workers.values())

    @override
    def is_complete(self) -> bool:
        version = self.oracle.view.version
        return super().is_complete() and all(
            server.core.version == version and not server.core.replication.pushes.num_pending for server in self._nodes
        )

    @override
    def wait(self, aim: str, is_reached: Callable[[], bool]) -> None:
        try:
            super().wait(aim, is_reached)
        except Violation:
            living = {server.incarnation for server in self._nodes}
            lost = sum(group.buckets for group in self.oracle.view.groups if living.isdisjoint(group.members))
            if lost:  # a scheduler on another host reports no loss, because it waits for the servers
                self.oracle.record_loss(lost)
            raise

    @override
    def check(self) -> None:
        if self.world.time_s < self._next_check_s:
            return
        self._next_check_s = self.world.time_s + _CHECKS_S
        for server in self._nodes:
            server.validate()
        for scheduler in (self.scheduler, *self.network.former.values()):
            if isinstance(scheduler, SimulatedScheduler):
                scheduler.core.validate()
        self._check_chains(at_end=False)

    @override
    def check_end(self) -> None:
        self._check_chains(at_end=True)

    def _check_chains(self, *, at_end: bool) -> None:
        servers = {server.incarnation: server for server in self._nodes if server.core.version}
        for group in self.oracle.view.groups:
            chain = [servers[member] for member in group.members if member in servers]
            for server, bucket in itertools.product(chain, buckets_in(group.buckets)):
                data = server.table.data.get(bucket)
                if data is None:
                    raise Violation(f"{server.name} is a member of the chain of bucket {bucket} but lacks the bucket")
                self.oracle.check_acknowledged(bucket, data, server.name)
                if at_end:
                    self.oracle.check_equal(bucket, chain[0].table.data[bucket], data, server.name)
