"""What happens to a cluster of the product: connections, processes, memory and disks fail, from the world's seed."""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import partial
from typing import Final

from simulator.product.network import KEEPALIVE_S
from simulator.product.roles import chains_of, incarnation_of
from simulator.product.state import ClusterState
from simulator.product.world import VirtualProcess

KINDS: Final = (
    "reset", "half-open", "refuse", "slow", "hiccup", "cut", "pause", "crash-server", "vanish-server", "crash-worker",
    "vanish-worker", "pause-worker", "crash-scheduler", "join-server", "drain-server", "join-worker",
    "refuse-memory", "out-of-memory", "snapshot", "disk", "lose-answers",
)  # fmt: skip
_MAY_SEVER: Final = ("refuse", "slow", "hiccup", "cut")
_SPAN_S: Final = 3.0
"""In which the faults of some phases begin, and most of them after the work is done."""


class ProductFaults:
    """Plans the faults of each phase, and ends them."""

    def __init__(self, cluster: ClusterState, kinds: tuple[str, ...], num_faults: int | None) -> None:
        self._cluster = cluster
        self._kinds = kinds
        self._num_faults = num_faults
        self._under_way: dict[int, Callable[[], None]] = {}
        self._num_planned = 0
        self._doubtful: dict[str, VirtualProcess] = {}  # servers that may be taken for dead
        self.last_s = 0.0
        """When the last fault began or ended."""
        self._calls: dict[str, Callable[[], bool]] = {
            "reset": self._reset, "half-open": self._half_open, "refuse": self._refuse, "slow": self._slow,
            "hiccup": self._hiccup, "cut": self._cut, "pause": self._pause, "crash-server": self._crash_server,
            "vanish-server": partial(self._crash_server, is_silent=True), "crash-worker": self._crash_worker,
            "vanish-worker": partial(self._crash_worker, is_silent=True), "pause-worker": self._pause_worker,
            "crash-scheduler": self._crash_scheduler, "join-server": self._join_server,
            "drain-server": self._drain_server, "join-worker": self._join_worker, "refuse-memory": self._refuse_memory,
            "out-of-memory": self._out_of_memory, "snapshot": self._snapshot, "disk": self._fail_disk,
            "lose-answers": self._lose_answers,
        }  # fmt: skip

    @property
    def is_under_way(self) -> bool:
        """Whether a fault has not ended, or not begun."""
        return bool(self._under_way or self._num_planned)

    def plan(self) -> None:
        """Draw the faults of a phase: while it works, or later too."""
        world = self._cluster.world
        work_s = self._cluster.settings.work_s
        span_s = world.random.choice((work_s, 2 * work_s, _SPAN_S))
        count = world.random.choice((0, 1, 2, 4, 8)) if self._num_faults is None else self._num_faults
        for _ in range(count if self._kinds else 0):
            self._num_planned += 1
            world.after(0.05 + world.random.random() * span_s, self._begin, world.random.choice(self._kinds))

    def end(self) -> None:
        """End what is under way."""
        for end in list(self._under_way.values()):
            end()

    def _begin(self, kind: str) -> None:
        cluster = self._cluster
        self._num_planned -= 1
        if self._calls[kind]():
            cluster.fired[kind] += 1
            if kind in _MAY_SEVER:  # several at a time may last longer than any of them
                cluster.excused.update(dict.fromkeys(self._servers()))
            cluster.world.note(f"FAULT {kind}")
            self.last_s = cluster.world.now_s

    def _for(self, seconds: float, end: Callable[[], object]) -> None:
        """Have a fault end by itself."""
        world = self._cluster.world
        number = world.next_number()

        def finish() -> None:
            if self._under_way.pop(number, None) is not None:
                end()
                self.last_s = world.now_s

        self._under_way[number] = finish
        world.after(seconds, finish)

    # Whom.

    def _one(self, processes: list[VirtualProcess]) -> VirtualProcess | None:
        return self._cluster.world.random.choice(processes) if processes else None

    def _servers(self) -> list[VirtualProcess]:
        return [each for each in self._cluster.servers.values() if not each.is_dead and each.role is not None]

    def _workers(self) -> list[VirtualProcess]:
        return [each.process for each in self._cluster.workers.values() if not each.process.is_dead]

    def _all(self) -> list[VirtualProcess]:
        scheduler = self._cluster.scheduler
        return [*self._servers(), *self._workers(), *([] if scheduler is None else [scheduler])]

    def _can_lose(self, server: VirtualProcess) -> bool:
        """Return whether a server may be gone: of each chain another one stays that is in no doubt."""
        chains = chains_of(self._cluster.scheduler)
        if not chains or self._doubtful or not self._cluster.settings.replicas:
            return False
        scheduler = self._cluster.scheduler
        assert scheduler is not None
        if scheduler.is_paused:
            return False
        healthy = {incarnation_of(scheduler, each) for each in self._servers() if each is not server}
        return all(not is_filling and healthy & set(members) for _, members, is_filling in chains)

    def _doubt(self, server: VirtualProcess) -> None:
        """Let a server be in doubt until the chains are whole without it, or with it again."""
        self._doubtful[server.name] = server
        self._cluster.excused[server] = None
        self._cluster.world.after(0.2, self._look_again, server)

    def _look_again(self, server: VirtualProcess) -> None:
        is_short = server in self._cluster.memory.failing
        if (
            is_short
            or server.is_paused
            or self._cluster.network.is_any_cut(server.host)
            or not self._cluster.is_whole()
        ):
            self._cluster.world.after(0.2, self._look_again, server)
            return
        del self._doubtful[server.name]

    # Connections.

    def _reset(self) -> bool:
        ends = list(self._cluster.network.ends)
        if not ends:
            return False
        end = self._cluster.world.random.choice(ends)
        end.reset()
        end.other.reset()
        return True

    def _half_open(self) -> bool:
        ends = list(self._cluster.network.ends)
        if not ends:
            return False
        end = self._cluster.world.random.choice(ends)
        other = end.other
        end.reset()
        self._cluster.world.after(KEEPALIVE_S, other.reset)
        return True

    def _lose_answers(self) -> bool:
        """Reset each connection of a server at what the server sends next: what it has done is asked for again."""
        servers, network = self._servers(), self._cluster.network
        network.breaking.update(end for end in network.ends if end.process in servers)
        return bool(servers)

    def _refuse(self) -> bool:
        network = self._cluster.network
        name = self._cluster.world.random.choice(sorted(network.listeners)) if network.listeners else None
        if name is None:
            return False
        network.refusing.add(name)
        self._for(self._cluster.world.random.random() * 1.5, lambda: network.refusing.discard(name))
        return True

    def _slow(self) -> bool:
        network, random = self._cluster.network, self._cluster.world.random
        process = self._one(self._all())
        if process is None:
            return False
        network.slow[process.host] = random.choice((0.01, 0.05, 0.1))
        self._for(random.random() * 3, lambda: network.slow.update({process.host: 0.0}))
        return True

    def _cut(self) -> bool:
        """Cut the path between two: short, or so long that one of them is taken for dead."""
        cluster, random = self._cluster, self._cluster.world.random
        processes = self._all()
        if len(processes) < 2:
            return False
        one, other = random.sample(processes, 2)
        timeout_s = cluster.settings.heartbeat_timeout_s
        servers = [each for each in (one, other) if each in self._servers()]
        seconds = random.random() * timeout_s * 0.3
        if random.random() < 0.5 and all(self._can_lose(server) for server in servers):
            seconds = random.random() * timeout_s * 3
            for process in (one, other):
                worker = cluster.workers.get(process.name)
                if worker is not None:
                    worker.is_disturbed = True
            for server in servers:
                self._doubt(server)
        cluster.network.cut_path(one.host, other.host)
        self._for(seconds, lambda: cluster.network.mend_path(one.host, other.host))
        return True

    # Processes.

    def _hiccup(self) -> bool:
        """Stop anybody for a moment that nobody may take for death."""
        process = self._one(self._all())
        if process is None or process.is_paused:
            return False
        process.pause()
        self._for(self._cluster.world.random.random() * self._cluster.settings.heartbeat_timeout_s * 0.3, process.go_on)
        return True

    def _pause(self) -> bool:
        server = self._one(self._servers())
        if server is None or server.is_paused or not self._can_lose(server):
            return False
        server.pause()
        self._doubt(server)
        self._for(self._cluster.world.random.random() * self._cluster.settings.heartbeat_timeout_s * 3, server.go_on)
        return True

    def _pause_worker(self) -> bool:
        process = self._one(self._workers())
        if process is None or process.is_paused:
            return False
        self._cluster.workers[process.name].is_disturbed = True
        process.pause()
        self._for(self._cluster.world.random.random() * self._cluster.settings.heartbeat_timeout_s * 3, process.go_on)
        return True

    def _crash_server(self, *, is_silent: bool = False) -> bool:
        server = self._one(self._servers())
        if server is None or not self._can_lose(server):
            return False
        self._doubt(server)
        self._cluster.kill(server, is_silent=is_silent)
        if len(self._servers()) <= self._cluster.settings.replicas or self._cluster.world.random.random() < 0.5:
            self._cluster.start_server(extra=True)
        return True

    def _crash_worker(self, *, is_silent: bool = False) -> bool:
        process = self._one(self._workers())
        if process is None or not self._cluster.workers[process.name].is_joined:
            return False
        self._cluster.kill(process, is_silent=is_silent)
        if self._cluster.world.random.random() < 0.5:
            self._cluster.start_worker()
        return True

    def _crash_scheduler(self) -> bool:
        cluster = self._cluster
        scheduler = cluster.scheduler
        if scheduler is None or scheduler.is_paused or self._doubtful or not chains_of(scheduler):
            return False
        if any(is_filling for _, _, is_filling in chains_of(scheduler)):
            return False
        cluster.kill(scheduler)
        replaces = cluster.world.random.random() < 0.5
        self._for(cluster.world.random.random() * 3, lambda: cluster.start_scheduler(replaces=replaces))
        return True

    def _join_server(self) -> bool:
        if not chains_of(self._cluster.scheduler) or len(self._servers()) > self._cluster.settings.num_servers:
            return False
        self._cluster.start_server(extra=True)
        return True

    def _drain_server(self) -> bool:
        server = self._one(self._servers())
        if server is None or len(self._servers()) <= self._cluster.settings.replicas + 1 or self._doubtful:
            return False
        leave = server.signals.pop(signal.SIGTERM, None)  # a second one would end it at once
        if leave is None or not chains_of(self._cluster.scheduler):
            return False
        leave()
        return True

    def _join_worker(self) -> bool:
        if not chains_of(self._cluster.scheduler):
            return False
        self._cluster.start_worker()
        return True

    # Memory and disk.

    def _refuse_memory(self) -> bool:
        server = self._one(self._servers())
        if server is None or not self._cluster.may_refuse:
            return False
        refusing = self._cluster.memory.refusing
        refusing[server] = None
        self._for(self._cluster.world.random.random(), partial(refusing.pop, server, None))
        return True

    def _out_of_memory(self) -> bool:
        server = self._one(self._servers())
        if server is None or not self._can_lose(server):
            return False
        self._doubt(server)
        failing = self._cluster.memory.failing
        failing[server] = None
        self._cluster.memory.was_failing[server] = None
        self._for(self._cluster.world.random.random() * 2, partial(failing.pop, server, None))
        return True

    def _snapshot(self) -> bool:
        before = self._cluster.snapshot
        if not chains_of(self._cluster.scheduler) or not (before is None or before.is_dead):
            return False
        self._cluster.start_snapshot()
        return True

    def _fail_disk(self) -> bool:
        """Let the disk be full or broken for a while, in the middle of a snapshot."""
        disk = self._cluster.disk
        if disk.is_failing or not self._snapshot():
            return False
        disk.is_failing = True
        self._for(self._cluster.world.random.random(), partial(setattr, disk, "is_failing", False))
        return True
