"""What goes wrong in a simulated cluster, and when: drawn from the seed, counted when it happens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from simulator.network import SimulatedProcess
from simulator.scheduler import SimulatedScheduler
from simulator.server import SimulatedServer

if TYPE_CHECKING:
    from simulator.cluster import Cluster

KINDS: Final = (
    "cut",
    "partition",
    "cable",
    "crash-server",
    "crash-worker",
    "crash-scheduler",
    "reset-scheduler",
    "second-scheduler",
    "stop",
    "slow",
    "clock-jump",
    "join-server",
    "leave-server",
    "join-worker",
    "leave-worker",
)
"""The faults that are drawn. `restart` follows crashes; `drop`, `duplicate` and `reorder` follow from the others.

A `cut` breaks one connection, `reset-scheduler` all of the scheduler's; a `partition` heals; a `second-scheduler`
listens at the address of the first, which lives and keeps some of its connections for a while; a `cable` between two
servers stays cut until one of them is gone, and then `expel` follows.
"""

FOLLOWING: Final = ("restart", "expel", "superseded", "operator", "drop", "duplicate", "reorder")

_WEIGHTS: Final = (6, 3, 2, 4, 2, 2, 2, 1, 3, 2, 2, 2, 2, 2, 1)
_LONG_S: Final = 0.2
"""A server that is silent for longer counts as one that may fail."""


class Faults:
    """The faults of one cluster: `number` of them, up to 8 if that is None.

    With `may_lose`, more servers may fail than a chain can bear.
    """

    def __init__(
        self, cluster: Cluster, kinds: tuple[str, ...] = KINDS, number: int | None = None, *, may_lose: bool = False
    ) -> None:
        self._cluster = cluster
        self._may_lose = may_lose
        self._num_hosts = 10
        random = cluster.random
        settings = cluster.settings
        iterations = settings.num_shards * settings.epochs * sum(settings.iterations_per_shard)
        iterations //= len(settings.iterations_per_shard) * settings.num_workers
        window_s = 0.3 + 1.2 * iterations * (sum(settings.think_s) / 2 + 0.02)
        weights = [_WEIGHTS[KINDS.index(kind)] for kind in kinds]
        if number is None:
            number = random.choice((0, 2, 4, 6, 8))
        for _ in range(number if kinds else 0):
            kind = random.choices(kinds, weights)[0]
            time_s = 0.05 + window_s * random.random()
            cluster.last_fault_s = max(cluster.last_fault_s, time_s)
            cluster.clock.at(time_s, self._fire, kind)

    def _fire(self, kind: str) -> None:
        if not self._cluster.network.processes:
            return
        if getattr(self, "_" + kind.replace("-", "_"))():
            self._cluster.fired[kind] += 1

    def _lasts(self, until_s: float) -> None:
        self._cluster.last_fault_s = max(self._cluster.last_fault_s, until_s)

    def _may_fail(self, doubtful: list[SimulatedServer], until_s: float) -> bool:
        """Whether these servers may fail; if so, do not count on them until then."""
        cluster = self._cluster
        if not self._may_lose and doubtful and not cluster.can_lose(doubtful):
            return False
        for server in doubtful:
            cluster.unhealthy_until_s[server.name] = max(until_s, cluster.unhealthy_until_s.get(server.name, 0.0))
        return True

    def _any(self) -> SimulatedProcess:
        processes = self._cluster.network.processes
        return processes[self._cluster.random.choice(sorted(processes))]

    # The kinds.

    def _cut(self) -> bool:
        cluster = self._cluster
        connections = [each for process in cluster.network.processes.values() for each in process.connections]
        if not connections:
            return False
        connection = cluster.random.choice(connections)
        cluster.note(f"cut {connection.ends[0].name} - {connection.ends[1].name}")
        cluster.network.cut(connection)
        return True

    def _partition(self) -> bool:
        cluster = self._cluster
        names = sorted(cluster.network.processes)
        island = cluster.random.sample(names, cluster.random.randint(1, max(1, len(names) // 2)))
        duration_s = cluster.random.choice((0.05, 0.2, 0.8, 2.0))
        until_s = cluster.clock.now_s + duration_s
        if duration_s >= _LONG_S:
            # Those that the scheduler does not hear may be declared dead.
            scheduler = cluster.scheduler
            beyond = set(names) - set(island) if scheduler is not None and scheduler.name in island else set(island)
            doubtful = [server for server in cluster.servers if server.name in beyond]
            if scheduler is None or not self._may_fail(doubtful, until_s + 0.5):
                return False
        elif cluster.scheduler is None or not cluster.scheduler.is_established:
            return False
        cluster.note(f"partition of {island} for {duration_s}")
        cluster.network.part(island, duration_s)
        self._lasts(until_s)
        return True

    def _cable(self) -> bool:
        cluster = self._cluster
        whole = [
            server
            for server in cluster.servers
            if server.incarnation in cluster.oracle.view.servers and not cluster.network.is_cut_off(server)
        ]
        if len(whole) < 2 or self._may_lose:  # where buckets may be lost, nobody goes that is the last to have one
            return False
        one, other = cluster.random.sample(whole, 2)
        if not (cluster.can_lose([one]) and cluster.can_lose([other])):  # one of them will go
            return False
        cluster.note(f"the cable {one.name} - {other.name} is cut")
        cluster.network.cut_cable(one, other)
        self._lasts(cluster.clock.now_s + 2.0)
        self._replace(one, other)
        return True

    def _replace(self, one: SimulatedServer, other: SimulatedServer) -> None:
        """Start another server when one of these two is gone."""
        if one.is_alive and other.is_alive:
            self._cluster.clock.after(0.25, self._replace, one, other)
        else:
            self._num_hosts += 1
            self._restart(f"s{self._num_hosts}", is_server=True)

    def _crash_server(self) -> bool:
        cluster = self._cluster
        if not cluster.servers:
            return False
        server = cluster.random.choice(cluster.servers)
        if not self._may_fail([server], 1e9):
            return False
        cluster.crash(server)
        if cluster.random.random() < 0.8 or len(cluster.servers) < 2:
            self._restart(server.host, is_server=True)
        return True

    def _crash_worker(self) -> bool:
        cluster = self._cluster
        if not cluster.workers:
            return False
        worker = cluster.random.choice(cluster.workers)
        cluster.crash(worker)
        if cluster.random.random() < 0.7 or not cluster.workers:
            self._restart(worker.host, is_server=False)
        return True

    def _restart(self, host: str, *, is_server: bool) -> None:
        cluster = self._cluster
        delay_s = cluster.random.choice((0.02, 0.3, 1.0))
        cluster.clock.after(delay_s, self._start, host, is_server)
        self._lasts(cluster.clock.now_s + delay_s)

    def _start(self, host: str, is_server: bool) -> None:
        self._cluster.note(f"{host} restarts")
        self._cluster.fired["restart"] += 1
        if is_server:
            self._cluster.start_server(host)
        else:
            self._cluster.start_worker(host)

    def _crash_scheduler(self) -> bool:
        cluster = self._cluster
        scheduler = cluster.scheduler
        if scheduler is None or not scheduler.is_established:
            return False
        now_s = cluster.clock.now_s
        doubtful = [each for each in cluster.servers if cluster.unhealthy_until_s.get(each.name, 0.0) >= now_s]
        if not self._may_lose and not cluster.can_lose(doubtful):
            return False
        cluster.crash(scheduler)
        delay_s = cluster.random.choice((0.05, 0.5, 1.5))
        cluster.clock.after(delay_s, cluster.restart_scheduler)
        self._lasts(now_s + delay_s + 1.0)
        return True

    def _reset_scheduler(self) -> bool:
        cluster = self._cluster
        if cluster.scheduler is None or not cluster.scheduler.connections:
            return False
        cluster.note("the scheduler's connections are reset")
        for connection in list(cluster.scheduler.connections):
            cluster.network.cut(connection)
        return True

    def _second_scheduler(self) -> bool:
        cluster, random = self._cluster, self._cluster.random
        former = cluster.scheduler
        if former is None or not former.is_established or len(cluster.schedulers) > 1 or cluster.network.has_cut_cables:
            return False
        over_s = cluster.clock.now_s + 3.5
        alive = {server.incarnation for server in cluster.servers}
        if not self._may_lose and not (cluster.can_lose([]) and cluster.oracle.view.voters <= alive):
            return False
        for server in cluster.servers:  # each scheduler may do without those that it does not hear
            cluster.unhealthy_until_s[server.name] = max(over_s, cluster.unhealthy_until_s.get(server.name, 0.0))
        cluster.note("a second scheduler")
        cluster.start_second_scheduler()
        for connection in list(former.connections):
            cluster.clock.after(3.0 * random.random() ** 2, cluster.network.cut, connection)
        cluster.clock.after(3.2, self._end_former, former)
        self._lasts(over_s)
        return True

    def _end_former(self, scheduler: SimulatedScheduler) -> None:
        if scheduler.is_alive:
            self._cluster.crash(scheduler)

    def _stop(self) -> bool:
        cluster = self._cluster
        process = self._any()
        duration_s = cluster.random.choice((0.05, 0.3, 0.9, 2.0))
        if cluster.scheduler is None or not cluster.scheduler.is_established:
            return False
        until_s = cluster.clock.now_s + duration_s
        long = [process] if isinstance(process, SimulatedServer) and duration_s >= _LONG_S else []
        if not self._may_fail(long, until_s + 0.5):
            return False
        cluster.note(f"{process.name} stops for {duration_s}")
        process.stopped_until_s = max(process.stopped_until_s, until_s)
        self._lasts(until_s)
        return True

    def _slow(self) -> bool:
        cluster = self._cluster
        process = self._any()
        process.slow_s = cluster.random.choice((0.005, 0.03))
        duration_s = cluster.random.choice((0.1, 1.0))
        cluster.note(f"{process.name} is slow for {duration_s}")
        cluster.clock.after(duration_s, setattr, process, "slow_s", 0.0)
        self._lasts(cluster.clock.now_s + duration_s)
        return True

    def _clock_jump(self) -> bool:
        process = self._cluster.scheduler or self._any()
        if self._cluster.random.random() < 0.3:
            process = self._any()
        process.clock_offset_s += self._cluster.random.choice((-3600.0, -2.0, 2.0, 3600.0))
        return True

    def _join_server(self) -> bool:
        if len(self._cluster.servers) > 5:
            return False
        self._num_hosts += 1
        self._cluster.start_server(f"s{self._num_hosts}")
        return True

    def _leave_server(self) -> bool:
        cluster = self._cluster
        staying = [server for server in cluster.servers if server.member is not None and not server.is_leaving]
        if len(staying) < 2:
            return False
        server = cluster.random.choice(staying)
        if not self._may_lose and not cluster.can_lose([server] if cluster.settings.replicas else []):
            return False
        server.leave()
        return True

    def _join_worker(self) -> bool:
        if len(self._cluster.workers) > 4:
            return False
        self._num_hosts += 1
        self._cluster.start_worker(f"w{self._num_hosts}")
        return True

    def _leave_worker(self) -> bool:
        cluster = self._cluster
        staying = [worker for worker in cluster.workers if worker.member is not None and not worker.is_leaving]
        if len(staying) < 2:
            return False
        cluster.random.choice(staying).leave()
        return True
