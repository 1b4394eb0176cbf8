"""One cluster of the product from one seed: its processes in virtual time, faults, and the check of every bucket."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from typing_extensions import override

from paceline.errors import AddressError, ConnectionLostError, DeadlineError, PacelineError
from paceline.launch.roles import run_scheduler, run_server
from paceline.protocol.buckets import Buckets
from paceline.ps.messages import ClusterSettings
from simulator.oracle import Violation
from simulator.product.faults import KINDS, ProductFaults
from simulator.product.roles import Log, VirtualJoining, chains_of, incarnation_of, tables_of
from simulator.product.snapshots import compare_snapshot, take_snapshot, try_snapshot
from simulator.product.state import ClusterState, Participant, ProductSettings
from simulator.product.substitution import product_in
from simulator.product.transport import TOKEN
from simulator.product.truth import SLOTS
from simulator.product.worker import ProductWorker
from simulator.product.world import Deadlock, VirtualProcess, VirtualWorld

_PATIENCE_S: Final = 90.0
_COMPARED: Final = 0.3
"""How often a snapshot is compared at the end of a phase."""
_QUIET_S: Final = 0.5
"""How long what was acknowledged may be on its way to replicas: the sums of the last iteration."""


@dataclass(frozen=True, slots=True)
class ProductOutcome:
    """What became of one seed."""

    seed: int
    violation: str | None
    fired: Counter[str]
    trace_hash: int
    num_turns: int
    virtual_s: float
    num_pushes: int
    num_reads: int
    num_compared: int


class ProductCluster(ClusterState):
    """The processes of one seed; :meth:`run` lets them live."""

    def __init__(
        self,
        seed: int,
        *,
        settings: ProductSettings | None = None,
        faults: tuple[str, ...] = KINDS,
        num_faults: int | None = None,
        trace: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(VirtualWorld(seed, trace=trace), settings)
        self.seed = seed
        self.faults = ProductFaults(self, faults, num_faults)
        self._number = 0

    def run(self) -> ProductOutcome:
        """Let the cluster live; return what became of it."""
        violation: str | None = None
        log = Log(self.world)
        try:
            with product_in(self.world, self.network, self.disk), self.memory.installed(), log:
                try:
                    self._live()
                except (Violation, Deadlock) as error:
                    violation = str(error)
                finally:
                    self.world.close()
        finally:
            self.truth.issued.clear()
            self.disk.close()
        violation = violation or log.violation
        if violation is not None:
            self.world.note(f"VIOLATION {violation}")
        world = self.world
        return ProductOutcome(
            self.seed, violation, self.fired, world.trace_hash, world.num_turns, world.now_s, self.num_pushes,
            self.num_reads, self.truth.num_compared,
        )  # fmt: skip

    def _live(self) -> None:
        settings = self.settings
        self.world.note(f"{settings}, {', '.join(plan.name for plan in self.plans)}")
        self.start_scheduler()
        self.world.sleep(0.01)
        for _ in range(settings.num_servers):
            self.start_server()
        for _ in range(settings.num_workers):
            self.start_worker()
        for phase in range(settings.num_phases):
            self.faults.plan()
            self._wait("all workers to end their work", partial(self._are_through, phase))
            self.faults.end()
            self._wait("the chains to be whole", self.is_whole)
            self.world.sleep(_QUIET_S)
            self.truth.check(self._chains())
            if not self.is_sequential and self.world.random.random() < _COMPARED:  # else it waits for iterations to end
                self._compare_snapshot()
            self.phase = phase + 1
        self._wait("all workers to leave", lambda: all(each.process.is_dead for each in self.workers.values()))

    def _compare_snapshot(self) -> None:
        taken: list[Path | None] = []
        if self.snapshot is not None:
            self.snapshot.kill()
        process = self.process(
            "snapshot",
            lambda: taken.append(take_snapshot(self.world, self.network, self.disk, self.address)),
        )
        self._wait("a snapshot to be taken", lambda: process.is_dead)
        if not taken or taken[0] is None:
            raise Violation(f"(snapshots) none is taken while nothing fails: {process.failure}")
        compare_snapshot(taken[0], self._chains())

    def _wait(self, what: str, is_so: Callable[[], bool]) -> None:
        end_s = max(self.world.now_s, self.faults.last_s) + _PATIENCE_S
        while not is_so():
            self._check_ends()
            if self.world.now_s > max(end_s, self.faults.last_s + _PATIENCE_S):
                raise Violation(f"(progress) waited {_PATIENCE_S:g} s for {what}: {self._describe()}")
            self.world.sleep(0.05)

    def _check_ends(self) -> None:
        """Raise Violation if a server or scheduler has ended that nobody could take for dead."""
        for process in (*self.servers.values(), *([] if self.scheduler is None else [self.scheduler])):
            error = process.failure
            if isinstance(error, MemoryError):
                is_expected = process in self.memory.was_failing
            else:
                is_expected = error is None or (isinstance(error, PacelineError) and process in self.excused)
            if not is_expected:
                raise Violation(f"(fail-stop) {process.name} ended itself: {type(error).__name__}: {error}")

    def _are_through(self, phase: int) -> bool:
        live = [each for each in self.workers.values() if not each.process.is_dead]
        if not live:
            self.start_worker()
            return False
        return not self.faults.is_under_way and all(each.num_arrived > phase for each in live)

    @override
    def is_whole(self) -> bool:
        """Return whether every chain has all the servers that it should have, and none is on its way."""
        chains, live = chains_of(self.scheduler), _by_incarnation(self.scheduler, self.servers.values())
        length = min(1 + self.settings.replicas, len(live))
        return bool(chains) and all(
            len(members) == length and not is_filling and live.keys() >= set(members)
            for _, members, is_filling in chains
        )

    def _chains(self) -> list[tuple[Buckets, list[tuple[str, Any]]]]:
        live = _by_incarnation(self.scheduler, self.servers.values())
        return [
            (buckets, [(live[each].name, tables_of(live[each])) for each in members])
            for buckets, members, _ in chains_of(self.scheduler)
        ]

    def _describe(self) -> str:
        """Return how far everybody is."""
        workers = [
            f"{each.process.name} {each.num_arrived} phases, {each.num_counted} iterations"
            for each in self.workers.values()
            if not each.process.is_dead
        ]
        servers = [each.name for each in self.servers.values() if not each.is_dead]
        chains = [(bin(buckets).count("1"), *rest) for buckets, *rest in chains_of(self.scheduler)]
        return f"{'; '.join(workers)}; servers {', '.join(servers)}; chains {chains}"

    # Processes.

    def process(self, kind: str, main: Callable[[], None]) -> VirtualProcess:
        """Start a process on a host of its own."""
        self._number += 1
        name = f"{kind}{self._number}"
        process = VirtualProcess(self.world, name, name)
        process.at_death.append(lambda: self._ended(process))

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
        """Start a scheduler, which may take over from one before."""
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
                address=self.address,
                on_ready=lambda endpoint: world.note("the scheduler is there"),
                on_note=lambda text: world.note(f"scheduler: {text}"),
                on_loss=self._lost,
                replaces=replaces,
                accepts_minority=accepts_minority,
            )

        self.scheduler = self.process("scheduler", main)

    @override
    def start_server(self, *, extra: bool = False) -> VirtualProcess:
        """Start a server: one of the first, or one more."""
        joining, world = VirtualJoining(self.address, self.network), self.world

        def main() -> None:
            node = world.current.process.name
            while True:
                try:
                    run_server(joining, address=f"memory://{node}", node=node, extra=extra)  # type: ignore[arg-type]
                    return
                except (AddressError, ConnectionLostError, DeadlineError) as error:
                    if world.current.process.role is not None:
                        raise
                    world.note(f"{node} is started again: {error}")  # nobody was there to be joined
                    world.sleep(0.1)

        process = self.process("server", main)
        self.servers[process.name] = process
        return process

    @override
    def start_snapshot(self) -> None:
        self.snapshot = self.process(
            "snapshot", lambda: try_snapshot(self.world, self.network, self.disk, self.address)
        )

    @override
    def start_worker(self) -> None:
        """Start a worker, if there are keys for one more."""
        slot = len(self.workers)
        if slot < SLOTS:
            holder: list[ProductWorker] = []
            process = self.process("worker", lambda: holder[0].run())
            holder.append(ProductWorker(self, process, slot))
            self.workers[process.name] = holder[0]

    @override
    def kill(self, process: VirtualProcess, *, is_silent: bool = False) -> None:
        """End a process; `is_silent`: its host, so that nobody is told."""
        process.is_silent = is_silent
        process.kill()

    def _ended(self, process: VirtualProcess) -> None:
        self.world.note(f"{process.name} has ended")
        self.network.ended(process, is_silent=process.is_silent)
        worker = self.workers.get(process.name)
        if worker is not None:
            worker.is_disturbed = True
        if process is self.scheduler:
            self.scheduler = None
        elif self.settings.is_one_host and not process.is_silent:
            self.world.after(0.002, self._tell_end, process)

    def _tell_end(self, process: VirtualProcess) -> None:
        """Let the scheduler's kernel tell that a process has ended."""
        scheduler = self.scheduler
        incarnation = incarnation_of(scheduler, process)
        if scheduler is not None and incarnation is not None:
            scheduler.loop.call_soon_threadsafe(scheduler.role.process_ended, incarnation)

    # What they say.

    @override
    def worker_failed(self, worker: Participant, error: PacelineError) -> None:
        """Take what a worker's client raised: nothing may, unless the others took it for dead."""
        self.world.note(f"{worker.process.name} fails: {type(error).__name__}: {error}")
        if not worker.is_disturbed:
            raise Violation(f"(progress) {worker.process.name}: {type(error).__name__}: {error}")
        worker.process.kill()

    def _lost(self, text: str) -> None:
        self.world.fail(Violation(f"(loss) {text}"))


def _by_incarnation(scheduler: VirtualProcess | None, servers: Iterable[VirtualProcess]) -> dict[int, VirtualProcess]:
    """Return the servers that live and that a scheduler knows."""
    found = {incarnation_of(scheduler, each): each for each in servers if not each.is_dead}
    return {incarnation: process for incarnation, process in found.items() if incarnation is not None}
