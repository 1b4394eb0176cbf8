"""Faults of a cluster, chosen by a seed, that must not lose data.

A server is killed only if each of its buckets is also on another server that is not in danger. The kill may happen
while a bucket lacks a replica, or while the server is being filled. A temporary fault (a stopped process, a cut or slow
link, packet loss) may affect any process, because the last server of a bucket is not declared dead for its silence.
"""

from __future__ import annotations

import random
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import psutil

from paceline.protocol import Role

from .cluster import HEARTBEAT_TIMEOUT_S, Cluster, Node
from .network import CUT, Way

SHORT_S = (0.1, 0.4 * HEARTBEAT_TIMEOUT_S)
"""The duration of faults after which no process may be declared dead."""
LONG_S = (1.2 * HEARTBEAT_TIMEOUT_S, 2.5 * HEARTBEAT_TIMEOUT_S)
_MOST_SERVERS = 6


@dataclass
class Fault:
    """A fault."""

    kind: str
    at: float
    victims: list[str]
    ends_at: float


@dataclass
class Faults:
    """Injects faults into a cluster, and ends them."""

    cluster: Cluster
    chance: random.Random
    made: list[Fault] = field(default_factory=list)
    _later: list[tuple[float, Callable[[], None]]] = field(default_factory=list)

    def make(self) -> Fault | None:
        """Inject a fault of random kind, if it is possible now."""
        kinds = self.kinds()
        name = self.chance.choices(list(kinds), [weight for weight, _ in kinds.values()])[0]
        began = time.monotonic()
        found = kinds[name][1]()
        if found is None:
            return None
        victims, length_s = found
        fault = Fault(name, began, [victim.name for victim in victims], began + length_s)
        self.made.append(fault)
        return fault

    def kinds(self) -> dict[str, tuple[float, Callable[[], tuple[list[Node], float] | None]]]:
        """Return the kinds that this cluster can have, with their weights."""
        settings = self.cluster.settings
        kinds: dict[str, tuple[float, Callable[[], tuple[list[Node], float] | None]]] = {
            "server killed": (3, self.kill_server),
            "server killed while a replica is missing": (3, self.kill_while_missing),
            "server killed while it is filled": (2, self.kill_filling),
            "server stopped for a moment": (1, lambda: self.stop("server", SHORT_S)),
            "server stopped for longer than the time-out": (1, lambda: self.stop("server", LONG_S)),
            "server joins": (2, self.join),
            "server leaves": (2, self.leave),
            "server short of memory": (1, self.starve),
            "scheduler killed": (2, self.kill_scheduler),
            "scheduler and a server killed": (1, self.kill_both),
            "scheduler stopped": (1, lambda: self.stop("scheduler", SHORT_S)),
            "scheduler stopped for longer than the time-out": (1, lambda: self.stop("scheduler", LONG_S)),
            "worker stopped for a moment": (1, lambda: self.stop("worker", SHORT_S)),
        }
        if settings.mode != "lockstep":
            kinds |= {
                "worker killed": (2, self.kill_worker),
                "worker stopped for longer than the time-out": (1, lambda: self.stop("worker", LONG_S)),
                "workers connect": (2, self.visit),
            }
        if settings.is_network:
            kinds |= {
                "scheduler's connections reset": (2, lambda: self.reset("scheduler")),
                "server's connections reset": (2, lambda: self.reset("server")),
                "worker's connections reset": (1, lambda: self.reset("worker")),
                "server's host dies": (2, self.power_off),
                "server cut off for a moment": (1, lambda: self.isolate(SHORT_S)),
                "server cut off for longer than the time-out": (1, lambda: self.isolate(LONG_S)),
                "cable between servers cut": (1, lambda: self.cut("server", "server")),
                "one way between servers cut": (1, lambda: self.cut("server", "server", one_way=True)),
                "one way to the scheduler cut": (1, lambda: self.cut("server", "scheduler", one_way=True)),
                "one way from the scheduler cut": (1, lambda: self.cut("scheduler", "server", one_way=True)),
                "cable between server and worker cut": (1, lambda: self.cut("worker", "server")),
                "packets lost": (2, lambda: self.slow(lambda: Way(loss=self.chance.uniform(0.02, 0.3)))),
                "slow link": (2, lambda: self.slow(self._slow_way)),
            }
        wanted = settings.kinds
        return {name: kind for name, kind in kinds.items() if not wanted or name in wanted}

    def end_due(self, *, end_all: bool = False) -> None:
        """End the faults whose time is over."""
        now = time.monotonic()
        due = [fault for fault in self._later if end_all or fault[0] <= now]
        self._later = [fault for fault in self._later if fault not in due]
        for _, end in due:
            end()

    @property
    def num_open(self) -> int:
        """Return the number of faults that have not ended."""
        return len(self._later)

    # Servers die.

    def kill_server(self, victims: list[Node] | None = None) -> tuple[list[Node], float] | None:
        """Kill a server, or as many servers as replicas allow, while no bucket lacks a replica."""
        if victims is None:
            if not self.cluster.is_whole():
                return None
            most = self.chance.randint(1, max(self.cluster.settings.replicas, 1))
            victims = self._random_nodes("server", most)
        if not victims or not self.cluster.is_safe(*victims) or not self._leaves_quorum(victims):
            return None
        for victim in victims:
            self.cluster.doom(victim, "killed")
            victim.kill()
        self._replace(len(victims))
        return victims, 0.0

    def kill_while_missing(self) -> tuple[list[Node], float] | None:
        """Kill a server with a bucket that lacks a replica or is being moved, or any other server."""
        if self.cluster.is_whole():
            return None
        return self.kill_server(self._random_nodes("server"))

    def kill_filling(self) -> tuple[list[Node], float] | None:
        """Kill a server that is being filled."""
        filling = self.cluster.filling()
        return self.kill_server([self.chance.choice(filling)]) if filling else None

    def power_off(self) -> tuple[list[Node], float] | None:
        """End a server together with its host, so that no process reports its death."""
        victims = self._random_nodes("server")
        if not victims or not self.cluster.is_safe(*victims) or not self._leaves_quorum(victims):
            return None
        victim = victims[0]
        self._cut_off(victim)
        self.cluster.doom(victim, "its host died")
        victim.kill()
        self._replace(1)
        return victims, 0.0  # the host stays off

    def starve(self) -> tuple[list[Node], float] | None:
        """Exhaust the memory of a server for some time. This may end the server."""
        victims = self._random_nodes("server")
        if not victims or not self.cluster.is_safe(*victims) or not self._leaves_quorum(victims):
            return None
        victim, length_s = victims[0], self.chance.uniform(0.5, 2.0)
        try:
            used = psutil.Process(victim.inner_pid()).memory_info().vms
            limit = used + self.chance.choice([0, 1 << 20, 8 << 20])
            resource.prlimit(victim.inner_pid(), resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
        except (psutil.Error, ProcessLookupError):
            return None
        self._endanger(victim, length_s)

        def end() -> None:
            if victim.is_alive():
                unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
                resource.prlimit(victim.inner_pid(), resource.RLIMIT_AS, unlimited)

        self._end_later(length_s, end)
        return victims, length_s

    def _replace(self, count: int, *, after_s: float = 2.0) -> None:
        """Let this number of servers join, immediately or soon."""
        for _ in range(count):
            self._end_later(self.chance.choice([0.0, self.chance.uniform(0.0, after_s)]), self._start_server)

    def _start_server(self) -> None:
        if len(self.cluster.of_role("server")) < _MOST_SERVERS:
            self.cluster.start_server(joins=True)

    # Servers that join and leave.

    def join(self) -> tuple[list[Node], float] | None:
        """Let another server join."""
        if len(self.cluster.of_role("server")) >= _MOST_SERVERS:
            return None
        return [self.cluster.start_server(joins=True)], 0.0

    def leave(self) -> tuple[list[Node], float] | None:
        """Request that a server leaves.

        One server stays, because the departure of all servers ends the cluster and loses its data.
        """
        if len(self.cluster.of_role("server")) <= max(2, self.cluster.settings.replicas + 1):
            return None
        victims = self._random_nodes("server")
        members = [member for member in self.cluster.members().values() if member.is_alive() and member not in victims]
        if all(member.doomed or member.is_stopped for member in members):
            return None
        for victim in victims:
            self.cluster.doom(victim, "leaves")
            victim.signal(signal.SIGTERM)
        return (victims, 0.0) if victims else None

    # The scheduler.

    def kill_scheduler(self) -> tuple[list[Node], float] | None:
        """Kill the scheduler. Another scheduler is started at the same address."""
        victim = self.cluster.scheduler
        if not victim.is_alive() or not self._leaves_quorum([]):
            return None
        self.cluster.doom(victim, "killed")
        victim.kill()
        length_s = self.chance.choice([0.0, self.chance.uniform(0.0, 2.0)])
        replaces = self.chance.random() < 0.5
        self._end_later(length_s, lambda: self._start_scheduler(replaces))
        return [victim], length_s

    def kill_both(self) -> tuple[list[Node], float] | None:
        """Kill the scheduler and a server at the same time."""
        victims = self._random_nodes("server")
        if not victims or not self.cluster.is_safe(*victims) or not self._leaves_quorum(victims):
            return None
        scheduler = self.kill_scheduler()
        if scheduler is None:
            return None
        self.cluster.doom(victims[0], "killed")
        victims[0].kill()
        self._replace(1)
        return [*scheduler[0], *victims], scheduler[1]

    def _start_scheduler(self, replaces: bool) -> None:
        self.cluster.start_scheduler(replaces=replaces)

    def _leaves_quorum(self, victims: list[Node]) -> bool:
        """Whether enough servers survive for a takeover, even if the new scheduler has no record of these deaths."""
        if not self.cluster.settings.is_apart:
            return True
        num_known = len(self.cluster.map().of_role(Role.SERVER))
        num_alive = len([node for node in self.cluster.members().values() if node not in victims])
        return num_alive >= max(num_known // 2 + 1, self.cluster.settings.replicas + 1)

    # Workers.

    def kill_worker(self) -> tuple[list[Node], float] | None:
        """Kill a worker, and start another one."""
        victims = self._random_nodes("worker")
        for victim in victims:
            self.cluster.doom(victim, "killed")
            victim.kill()
            self._end_later(self.chance.uniform(0.0, 1.0), lambda: self._start_worker(visits=False))
        return (victims, 0.0) if victims else None

    def visit(self) -> tuple[list[Node], float] | None:
        """Let workers connect, push, read and leave."""
        count = self.chance.randint(1, 2)
        found = [self.cluster.start_worker(visits=True) for _ in range(count)]
        victims = [node for node in found if node is not None]
        return (victims, 0.0) if victims else None

    def _start_worker(self, visits: bool) -> None:
        self.cluster.start_worker(visits=visits)

    # Pauses.

    def stop(self, role: str, length: tuple[float, float]) -> tuple[list[Node], float] | None:
        """Stop a process for some time."""
        victims, length_s = self._random_nodes(role), self.chance.uniform(*length)
        for victim in victims:
            if length is LONG_S:
                self._endanger(victim, length_s)
            victim.is_stopped = True
            victim.signal(signal.SIGSTOP)

            def end(victim: Node = victim) -> None:
                victim.is_stopped = False
                victim.signal(signal.SIGCONT)
                if length is LONG_S and victim.role == "worker":
                    self._start_worker(visits=False)  # start a replacement

            self._end_later(length_s, end)
        return (victims, length_s) if victims else None

    # The network.

    def reset(self, role: str) -> tuple[list[Node], float] | None:
        """Reset the connections of a process to all processes or to one other process."""
        assert self.cluster.network is not None
        victims = self._random_nodes(role)
        bystanders = [node for node in self.cluster.nodes if node.is_alive() and node not in victims]
        if not victims or not bystanders:
            return None
        other = self.chance.choice([None, self.chance.choice(bystanders).host])
        self.cluster.network.reset(victims[0].host, other)
        return victims, 0.0

    def isolate(self, length: tuple[float, float]) -> tuple[list[Node], float] | None:
        """Cut a server off from all other processes for some time."""
        victims, length_s = self._random_nodes("server"), self.chance.uniform(*length)
        for victim in victims:
            self._endanger(victim, length_s)
            self._cut_off(victim)
            self._end_later(length_s, lambda victim=victim: self._reconnect(victim))  # type: ignore[misc]
        return (victims, length_s) if victims else None

    def cut(self, role: str, other: str, *, one_way: bool = False) -> tuple[list[Node], float] | None:
        """Cut the cable between two processes, in one or both directions."""
        network = self.cluster.network
        assert network is not None
        ends = self._random_nodes(role, 2) if role == other else [*self._random_nodes(role), *self._random_nodes(other)]
        if len(ends) < 2:
            return None
        length_s = self.chance.uniform(*self.chance.choice([SHORT_S, LONG_S]))
        ways = [(ends[0].host, ends[1].host)] + ([] if one_way else [(ends[1].host, ends[0].host)])
        for end in ends:
            if end.role != "scheduler" and {role, other} != {"server", "worker"}:
                self._endanger(end, length_s)
        for way in ways:
            network.set_way(*way, CUT)

        def mend() -> None:
            for way in ways:
                network.set_way(*way, None)

        self._end_later(length_s, mend)
        return ends, length_s

    def slow(self, choose: Callable[[], Way]) -> tuple[list[Node], float] | None:
        """Make all links of a process slow or lossy for some time."""
        network = self.cluster.network
        assert network is not None
        way, length_s = choose(), HEARTBEAT_TIMEOUT_S
        roles = ["server", "scheduler", "worker"]
        if self.cluster.settings.mode == "lockstep":
            # A scheduler that loses packets for as long as the time-out may declare a worker dead, whose rank no other
            # worker takes over.
            roles = ["server"] if way.loss else ["server", "scheduler"]
        victims = self._random_nodes(self.chance.choice(roles))
        for victim in victims:
            self._endanger(victim, length_s)
            hosts = [node.host for node in self.cluster.nodes if node is not victim and node.is_alive()]
            for other in (0, *hosts):
                network.set_way(victim.host, other, way)
                network.set_way(other, victim.host, way)
            self._end_later(length_s, lambda victim=victim: self._reconnect(victim))  # type: ignore[misc]
        return (victims, length_s) if victims else None

    def _slow_way(self) -> Way:
        return Way(delay_s=self.chance.uniform(0.005, 0.1), bytes_per_s=self.chance.uniform(1e5, 2e6))

    def _cut_off(self, node: Node) -> None:
        network = self.cluster.network
        assert network is not None
        for other in range(network.num_hosts):
            network.set_way(node.host, other, CUT)
            network.set_way(other, node.host, CUT)

    def _reconnect(self, node: Node) -> None:
        network = self.cluster.network
        assert network is not None
        for other in range(network.num_hosts):
            network.set_way(node.host, other, None)
            network.set_way(other, node.host, None)

    # Shared by all faults.

    def _random_nodes(self, role: str, most: int = 1) -> list[Node]:
        """Return members of a role that no fault affects."""
        found = [node for node in self.cluster.of_role(role) if not node.doomed and not node.is_stopped]
        if role == "server":
            members = list(self.cluster.members().values())
            found = [node for node in found if node in members]
        return self.chance.sample(found, min(most, len(found)))

    def _endanger(self, node: Node, length_s: float) -> None:
        node.risk_until = max(node.risk_until, time.monotonic() + length_s + HEARTBEAT_TIMEOUT_S)
        if node.role == "worker":
            self.cluster.doom(node, "may be declared dead")

    def _end_later(self, length_s: float, end: Callable[[], None]) -> None:
        self._later.append((time.monotonic() + length_s, end))
