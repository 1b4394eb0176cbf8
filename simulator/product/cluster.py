"""Simulate a cluster of the product's own scheduler, servers and clients, and check every bucket."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, cast

from typing_extensions import override

from paceline.errors import AddressError, ConnectionLostError, DeadlineError, PacelineError
from paceline.launch.roles import run_scheduler, run_server
from paceline.protocol.buckets import Buckets
from paceline.protocol.scheduler.cluster import ClusterCore
from paceline.ps.messages import ClusterSettings
from simulator.cluster import Cluster
from simulator.oracle import Violation
from simulator.product.faults import KINDS, ProductFaults
from simulator.product.roles import Log, VirtualJoining, tables_of
from simulator.product.snapshots import compare_snapshot, take_snapshot, try_snapshot
from simulator.product.state import SharedState
from simulator.product.substitution import product_in
from simulator.product.transport import ADDRESS, TOKEN
from simulator.product.truth import SLOTS, Truth
from simulator.product.worker import ProductWorker
from simulator.settings import RunSettings
from simulator.world import VirtualProcess

_COMPARED: Final = 0.3
"""The probability that a snapshot is compared at the end of a phase."""


class ProductCluster(Cluster):
    """The cluster of one seed."""

    latencies_s = (0.0003,)  # low, because windows are small, so a bucket needs many round trips
    bandwidths = (1e9,)
    oracle: Truth

    def __init__(
        self,
        seed: int,
        *,
        settings: RunSettings | None = None,
        faults: tuple[str, ...] = KINDS,
        num_faults: int | None = None,
        trace: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(seed, settings, trace, Truth)
        self.state = SharedState(self.network, self.settings, self.oracle)
        self.faults = ProductFaults(self, self.state, faults, num_faults, start_snapshot=self._start_snapshot)
        self._log = Log(self.world)
        self._snapshot: VirtualProcess | None = None  # servers support one snapshot at a time

    @override
    @contextmanager
    def installed(self) -> Iterator[None]:
        try:
            with product_in(self.world, self.network, self.state.disk), self.state.memory.installed(), self._log:
                yield
        finally:
            self.oracle.issued.clear()
            self.state.disk.close()

    @override
    def found(self) -> str | None:
        return self._log.violation

    # The work.

    @override
    def is_through(self) -> bool:
        live = [worker for worker in self.state.workers.values() if not worker.process.is_dead]
        if not live:
            self.start_worker()
        return bool(live) and all(worker.num_arrived > self.phase for worker in live)

    @override
    def check(self) -> None:
        """Raise Violation if a server or scheduler has ended itself without an expected reason."""
        for process in (*self.servers.values(), *([] if self.scheduler is None else [self.scheduler])):
            error = process.failure
            if isinstance(error, MemoryError):
                is_expected = process in self.state.memory.was_failing
            else:
                is_disturbed = process.is_disturbed or process.host in self.network.refused
                is_expected = error is None or (isinstance(error, PacelineError) and is_disturbed)
            if not is_expected:
                raise Violation(f"(fail-stop) {process.name} ended itself: {type(error).__name__}: {error}")

    @override
    def check_end(self) -> None:
        self.oracle.check(self._chains())
        if not self.settings.is_sequential and self.world.random.random() < _COMPARED:  # else the snapshot would wait
            self._compare_snapshot()
        self.state.num_phases += 1

    def _compare_snapshot(self) -> None:
        taken: list[Path | None] = []
        if self._snapshot is not None:
            self._snapshot.kill()
        process = self._start("snapshot", lambda: taken.append(take_snapshot(self.network, self.state.disk)))
        self.wait("a snapshot", lambda: process.is_dead)
        if not taken or taken[0] is None:
            raise Violation(f"(snapshots) the snapshot failed without a fault: {process.failure}")
        compare_snapshot(taken[0], self._chains())

    def _chains(self) -> list[tuple[Buckets, list[tuple[str, Any]]]]:
        live = self.servers_by_incarnation()
        return [
            (group.buckets, [(live[member].name, tables_of(live[member])) for member in group.members])
            for group in self.groups
        ]

    # The nodes.

    def _start(self, kind: str, main: Callable[[], None]) -> VirtualProcess:
        """Start a process on a new host."""
        name = self.next_name(kind)
        process = VirtualProcess(self.world, name, name)
        self.follow(process)

        def run() -> None:
            try:
                main()
            except PacelineError as error:
                process.failure = error
                self.world.note(f"{name} ends: {error}")

        process.start(run)
        return process

    @override
    def start_scheduler(self, *, replaces: bool = False, accepts_minority: bool = False) -> None:
        settings, world = self.settings, self.world

        def main() -> None:
            run_scheduler(
                ClusterSettings(
                    num_servers=settings.num_servers,
                    num_workers=settings.num_workers,
                    consistency=str(settings.consistency),
                    replicas=settings.replicas,
                    heartbeat_timeout_s=settings.heartbeat_timeout_s,
                ),
                token=TOKEN,
                address=ADDRESS,
                on_ready=lambda endpoint: world.note("the scheduler is running"),
                on_note=lambda text: world.note(f"scheduler: {text}"),
                on_loss=lambda text: world.fail(Violation(f"(loss) {text}")),
                replaces=replaces,
                accepts_minority=accepts_minority,
            )

        self.scheduler = self._start("scheduler", main)

    @override
    def start_server(self, *, is_extra: bool = False) -> None:
        joining, world = VirtualJoining(ADDRESS, self.network), self.world

        def main() -> None:
            node = world.current.process.name
            while True:
                try:
                    run_server(joining, address=f"memory://{node}", node=node, extra=is_extra)  # type: ignore[arg-type]
                    return
                except (AddressError, ConnectionLostError, DeadlineError) as error:
                    if world.current.process.role is not None:
                        raise
                    world.note(f"{node} is started again: {error}")  # no scheduler was running
                    world.sleep(0.1)

        process = self._start("server", main)
        self.servers[process.name] = process

    @override
    def start_worker(self) -> None:
        slot = len(self.workers)
        if slot < SLOTS:
            holder: list[ProductWorker] = []
            process = self._start("worker", lambda: holder[0].run())
            holder.append(ProductWorker(self.state, process, slot))
            self.workers[process.name], self.state.workers[process.name] = process, holder[0]

    def _start_snapshot(self) -> bool:
        """Take a snapshot during the work, unless another snapshot is in progress."""
        if not self.groups or not (self._snapshot is None or self._snapshot.is_dead):
            return False
        self._snapshot = self._start("snapshot", lambda: try_snapshot(self.network, self.state.disk))
        return True

    @override
    def core_of(self, scheduler: VirtualProcess) -> ClusterCore | None:
        return None if scheduler.role is None else cast(ClusterCore, scheduler.role.core.cluster)

    @override
    def is_joined(self, process: VirtualProcess) -> bool:
        worker = self.state.workers.get(process.name)
        return process.role is not None if worker is None else worker.is_joined

    @override
    def leave(self, process: VirtualProcess) -> bool:
        leave = process.signals.pop(signal.SIGTERM, None)  # a second signal would end the process immediately
        if leave is None:
            return False
        process.is_leaving = True
        leave()
        return True

    @override
    def report_end(self, scheduler: VirtualProcess, process: VirtualProcess) -> None:
        incarnation = self.incarnation_of(process)
        if incarnation is not None:
            scheduler.loop.call_soon_threadsafe(scheduler.role.process_ended, incarnation)
