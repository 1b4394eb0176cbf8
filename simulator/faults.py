"""Faults of a cluster, selected by the seed. A fault is counted when it begins. It ends at the latest with its phase.

A chain tolerates `replicas` servers that are dead or may be declared dead. Unless `allow_loss` is set, faults do not
make more servers fail.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Final

from typing_extensions import override

from simulator.cluster import Cluster, FaultSchedule
from simulator.network import KEEPALIVE_S, End
from simulator.world import VirtualProcess

WEIGHTS: Final = {
    "reset": 6, "half-open": 2, "drop-answers": 2, "refuse": 2, "slow": 2, "partition": 3, "cut": 3, "cable": 2,
    "hiccup": 3, "pause-server": 3, "pause-worker": 2, "pause-scheduler": 1, "clock-jump": 2, "crash-server": 4,
    "vanish-server": 2, "crash-worker": 2, "vanish-worker": 1, "crash-scheduler": 2, "reset-scheduler": 2,
    "second-scheduler": 1, "join-server": 2, "leave-server": 2, "join-worker": 2, "leave-worker": 1,
    "refuse-memory": 2, "out-of-memory": 2, "snapshot": 2, "disk": 2,
}  # fmt: skip
"""The relative frequency of each kind of fault."""
FOLLOWING: Final = ("restart", "operator", "drop")
"""Events that faults cause, and that are counted too."""
_MAY_ADD_UP: Final = ("refuse", "slow", "hiccup", "cut", "partition")
_SHORT: Final = 0.3
"""A process is not declared dead if it is silent for only this share of the heartbeat timeout."""
_FOREVER_S: Final = 1e9
_SECOND_S: Final = 3.0


class Faults(FaultSchedule):
    """Faults of the given kinds. `number` faults (default: random) per phase begin within one of `spans_s`."""

    def __init__(
        self,
        cluster: Cluster,
        kinds: Sequence[str],
        number: int | None,
        *,
        spans_s: Sequence[float],
        allow_loss: bool = False,
    ) -> None:
        self.last_s = 0.0
        self.cluster = cluster
        self.network = cluster.network
        self._world = cluster.world
        self._kinds = kinds
        self._number = number
        self._spans_s = spans_s
        self._allow_loss = allow_loss
        self._ends: dict[int, Callable[[], None]] = {}  # the functions that end the running faults
        self._num_planned = 0
        self._doubtful_until_s: dict[str, float] = {}

    @property
    def is_under_way(self) -> bool:
        """Whether a fault is in progress or has not begun yet."""
        return bool(self._ends or self._num_planned)

    @override
    def plan(self) -> None:
        random = self._world.random
        span_s = random.choice(self._spans_s)
        count = random.choice((0, 2, 4, 6, 8)) if self._number is None else self._number
        weights = [WEIGHTS[kind] for kind in self._kinds]
        for _ in range(count if self._kinds else 0):
            self._num_planned += 1
            self._world.after(0.05 + random.random() * span_s, self._begin, random.choices(self._kinds, weights)[0])

    @override
    def end(self) -> None:
        for end in list(self._ends.values()):
            end()

    def _begin(self, kind: str) -> None:
        self._num_planned -= 1
        begin: Callable[[], bool] = getattr(self, "_" + kind.replace("-", "_"))
        if begin():
            self.network.fired[kind] += 1
            self._world.note(f"FAULT {kind}")
            self.last_s = self._world.time_s
            if kind in _MAY_ADD_UP:  # several such faults may add up to a long fault
                self._disturb(self.cluster.live_servers)

    def end_after(self, seconds: float, end: Callable[[], object]) -> None:
        """Call `end` after `seconds`, or at the end of the phase if this is earlier."""
        number = self._world.next_number()

        def finish() -> None:
            if self._ends.pop(number, None) is not None:
                end()
                self.last_s = self._world.time_s

        self._ends[number] = finish
        self._world.after(seconds, finish)

    # The processes.

    def one(self, processes: Sequence[VirtualProcess]) -> VirtualProcess | None:
        """Return a random process from `processes`, or None if there are none."""
        return self._world.random.choice(processes) if processes else None

    def _all(self) -> list[VirtualProcess]:
        scheduler = self.cluster.scheduler
        return [*self.cluster.live_servers, *self.cluster.live_workers, *([] if scheduler is None else [scheduler])]

    def _seconds(self, share: float) -> float:
        """Return a random time of at most this share of the heartbeat timeout."""
        return self._world.random.random() * share * self.cluster.settings.heartbeat_timeout_s

    def may_fail(self, servers: Collection[VirtualProcess], seconds: float) -> bool:
        """Return whether all `servers` may fail for some time. If so, mark them as doubtful."""
        if servers and not self._allow_loss and not self.can_spare(servers):
            return False
        self._doubt(servers, seconds)
        return True

    def can_spare(self, servers: Collection[VirtualProcess]) -> bool:
        """Return whether each chain still has a healthy member and enough replicas if `servers` fail.

        A server that is being filled counts as a member, because it may become a member before its failure is detected.
        """
        cluster, replicas = self.cluster, self.cluster.settings.replicas
        if not cluster.groups or (servers and not replicas) or cluster.scheduler is None or cluster.scheduler.is_paused:
            return False
        healthy = {
            cluster.incarnation_of(process)
            for process in cluster.live_servers
            if process not in servers and not self.is_doubtful(process)
        }
        for group in cluster.groups:
            chain = {*group.members, group.filling} - {None}
            if healthy.isdisjoint(group.members) or len(chain - healthy) > replicas:
                return False
        return True

    def _may_lose_scheduler(self) -> bool:
        """Return whether no bucket is lost if the scheduler is absent for some time and the doubtful servers die."""
        doubtful = [process for process in self.cluster.live_servers if self.is_doubtful(process)]
        return self._allow_loss or self.can_spare(doubtful)

    def is_doubtful(self, server: VirtualProcess) -> bool:
        """Return whether a server may be declared dead, or is about to leave."""
        core = self.cluster.core
        return (
            self._doubtful_until_s.get(server.name, 0.0) > self._world.time_s
            or server.is_paused
            or self.network.is_any_cut(server.host)
            or (server.is_leaving and self.cluster.settings.replicas > 0)
            or (core is not None and self.cluster.incarnation_of(server) in core.suspects.with_unreachable_peers)
        )

    def _doubt(self, servers: Collection[VirtualProcess], seconds: float) -> None:
        until_s = self._world.time_s + seconds + self.cluster.settings.heartbeat_timeout_s / 2
        for server in servers:
            self._doubtful_until_s[server.name] = max(until_s, self._doubtful_until_s.get(server.name, 0.0))
        self._disturb(servers)

    def _disturb(self, processes: Collection[VirtualProcess]) -> None:
        for process in processes:
            process.is_disturbed = True

    def _beyond(self, island: Collection[VirtualProcess]) -> list[VirtualProcess]:
        """Return the processes that a partition separates from the scheduler."""
        is_inside = self.cluster.scheduler in island
        return [process for process in self._all() if (process in island) != is_inside]

    def _delay(self, process: VirtualProcess) -> None:
        """Record a short fault of a process. After several such faults, a worker may be declared dead."""
        self._disturb([process])
        if process is self.cluster.scheduler:
            self._disturb(self.cluster.live_workers)

    # Connections.

    def _end_of_one(self) -> End | None:
        ends = list(self.network.ends)
        return self._world.random.choice(ends) if ends else None

    def _reset_both(self, end: End, within_s: float) -> None:
        """Reset both ends at different times, so some of the data in flight still arrives."""
        for side in (end, end.other):
            self._world.after(self._world.random.random() * within_s, side.reset)

    def _reset(self) -> bool:
        end = self._end_of_one()
        if end is not None:
            self._reset_both(end, 2 * self.network.latency_s)
        return end is not None

    def _half_open(self) -> bool:
        end = self._end_of_one()
        if end is not None:
            end.reset()
            self._world.after(KEEPALIVE_S, end.other.reset)
        return end is not None

    def _drop_answers(self) -> bool:
        """Reset every connection of the servers at their next transmission, so that clients repeat requests."""
        servers = self.cluster.live_servers
        self.network.breaking.update(self.network.ends_of(servers))
        return bool(servers)

    def _reset_scheduler(self) -> bool:
        scheduler, network = self.cluster.scheduler, self.network
        if scheduler is None:
            return False
        refuses = any(
            address in network.refusing and listener.process is scheduler
            for address, listener in network.listeners.items()
        )
        if refuses and not self._may_lose_scheduler():  # members that cannot reconnect would be removed
            return False
        ends = network.ends_of([scheduler])
        for end in ends:
            self._reset_both(end, 2 * self.network.latency_s)
        return bool(ends)

    def _refuse(self) -> bool:
        addresses = sorted(self.network.listeners)
        if not addresses:
            return False
        address = self._world.random.choice(addresses)
        self._delay(self.network.listeners[address].process)
        self.network.refusing.add(address)
        self.end_after(self._world.random.random() * 1.5, partial(self.network.refusing.discard, address))
        return True

    def _slow(self) -> bool:
        process, random = self.one(self._all()), self._world.random
        if process is None:
            return False
        self._delay(process)
        self.network.slow[process.host] = random.choice((0.01, 0.05, 0.1))
        self.end_after(random.random() * 3, partial(self.network.slow.pop, process.host, None))
        return True

    # Paths.

    def _cut(self) -> bool:
        """Cut the path between two processes, for a moment or so long that one may be declared dead."""
        processes = self._all()
        if len(processes) < 2:
            return False
        pair = self._world.random.sample(processes, 2)
        seconds = self._seconds(_SHORT)
        if self._world.random.random() < 0.5:
            servers = [process for process in pair if process in self.cluster.live_servers]
            if all(self.can_spare([server]) for server in servers):
                seconds = self._seconds(3)
                self._disturb(pair)
                self._doubt(servers, seconds)
        self._separate(pair[:1], pair[1:], seconds)
        return True

    def _partition(self) -> bool:
        """Separate some processes from all other processes for a time, and break some connections in this time."""
        processes, random = self._all(), self._world.random
        if not self.cluster.groups:
            return False
        island = random.sample(processes, random.randint(1, max(1, len(processes) // 2)))
        seconds = self._seconds(random.choice((_SHORT, 1, 3)))
        beyond = self._beyond(island)
        if seconds > _SHORT * self.cluster.settings.heartbeat_timeout_s:
            if not self.may_fail([process for process in beyond if process in self.cluster.live_servers], seconds):
                return False
            self._disturb(beyond)
        outside = [process for process in processes if process not in island]
        hosts = {process.host for process in outside}
        for end in self.network.ends_of(island):
            if end.other.process.host in hosts and random.random() < 0.5:
                self._reset_both(end, seconds)
        self._separate(island, outside, seconds)
        return True

    def _separate(self, first: Sequence[VirtualProcess], second: Sequence[VirtualProcess], seconds: float) -> None:
        paths = [(one.host, other.host) for one in first for other in second]
        for path in paths:
            self.network.cut_path(*path)
        self.end_after(seconds, partial(self._mend, paths))

    def _mend(self, paths: Sequence[tuple[str, str]]) -> None:
        for path in paths:
            self.network.mend_path(*path)

    def _cable(self) -> bool:
        """Cut the path between two servers until one is dead."""
        servers = [process for process in self.cluster.live_servers if not self.network.is_any_cut(process.host)]
        # If buckets are lost, the server with the last copy of another bucket cannot leave.
        if len(servers) < 2 or self._allow_loss:
            return False
        one, other = self._world.random.sample(servers, 2)
        if not (self.can_spare([one]) and self.can_spare([other])):
            return False
        self._disturb((one, other))
        self.network.cut_path(one.host, other.host)
        self._replace(one, other)
        self.end_after(2.0 + self.cluster.settings.heartbeat_timeout_s, lambda: None)
        return True

    def _replace(self, one: VirtualProcess, other: VirtualProcess) -> None:
        """Start another server as soon as `one` or `other` is dead."""
        if one.is_dead or other.is_dead:
            self._restart(partial(self.cluster.start_server, is_extra=True))
        else:
            self._world.after(0.25, self._replace, one, other)

    # Pauses.

    def _pause(self, process: VirtualProcess, seconds: float) -> bool:
        process.pause()
        self.end_after(seconds, process.resume)
        return True

    def _hiccup(self) -> bool:
        """Pause a process too briefly for it to be declared dead."""
        process = self.one(self._all())
        if process is None or process.is_paused:
            return False
        self._delay(process)
        return self._pause(process, self._seconds(_SHORT))

    def _pause_server(self) -> bool:
        server, seconds = self.one(self.cluster.live_servers), self._seconds(3)
        if server is None or server.is_paused or not self.may_fail([server], seconds):
            return False
        return self._pause(server, seconds)

    def _pause_worker(self) -> bool:
        worker = self.one(self.cluster.live_workers)
        if worker is None or worker.is_paused:
            return False
        worker.is_disturbed = True
        return self._pause(worker, self._seconds(3))

    def _pause_scheduler(self) -> bool:
        scheduler = self.cluster.scheduler
        if scheduler is None or scheduler.is_paused or not self.cluster.groups:
            return False
        return self._pause(scheduler, self._seconds(2))

    def _clock_jump(self) -> bool:
        process = self.one(self._all())
        if process is None:
            return False
        process.clock_offset_s += self._world.random.choice((-3600.0, -2.0, 2.0, 3600.0))
        return True

    # Ends and beginnings.

    def _restart(self, start: Callable[[], None]) -> None:
        def restart() -> None:
            self.network.fired["restart"] += 1
            start()

        self.end_after(self._world.random.choice((0.02, 0.3, 1.0)), restart)

    def _crash_server(self, *, is_silent: bool = False) -> bool:
        server = self.one(self.cluster.live_servers)
        if server is None or not self.may_fail([server], _FOREVER_S):
            return False
        self.cluster.kill(server, is_silent=is_silent)
        num_left = len(self.cluster.live_servers)
        if num_left <= self.cluster.settings.replicas or self._world.random.random() < 0.7:
            self._restart(partial(self.cluster.start_server, is_extra=True))
        return True

    def _vanish_server(self) -> bool:
        return self._crash_server(is_silent=True)

    def _crash_worker(self, *, is_silent: bool = False) -> bool:
        worker = self.one(self.cluster.live_workers)
        if worker is None:
            return False
        self.cluster.kill(worker, is_silent=is_silent)
        if self._world.random.random() < 0.6 or not self.cluster.live_workers:
            self._restart(self.cluster.start_worker)
        return True

    def _vanish_worker(self) -> bool:
        return self._crash_worker(is_silent=True)

    def _crash_scheduler(self) -> bool:
        cluster, scheduler = self.cluster, self.cluster.scheduler
        if scheduler is None or not cluster.groups or not self._may_lose_scheduler():
            return False
        cluster.kill(scheduler)
        replaces = self._world.random.random() < 0.5
        self.end_after(self._world.random.choice((0.05, 0.5, 1.5, 3.0)), partial(self._start_scheduler, replaces))
        return True

    def _start_scheduler(self, replaces: bool) -> None:
        if self.cluster.scheduler is None:
            self.cluster.start_scheduler(replaces=replaces)

    def _second_scheduler(self) -> bool:
        """Start a second scheduler at the address of a running one, which keeps some of its connections for a while."""
        cluster, former, random = self.cluster, self.cluster.scheduler, self._world.random
        core = cluster.core
        if former is None or former.is_paused or core is None or self.network.cuts or self.network.former:
            return False
        if not self._allow_loss and not (
            self.can_spare([]) and core.committed.voters <= cluster.servers_by_incarnation().keys()
        ):
            return False
        self._doubt(cluster.live_servers, _SECOND_S)  # each scheduler may continue without some of the servers
        self.network.former["scheduler"] = former
        cluster.start_scheduler(replaces=random.random() < 0.5)
        for end in self.network.ends_of([former]):
            self._world.after(_SECOND_S * random.random() ** 2, end.reset)
            self._world.after(_SECOND_S * random.random() ** 2, end.other.reset)
        self.end_after(_SECOND_S + 0.2, partial(self._end_former, former))
        return True

    def _end_former(self, scheduler: VirtualProcess) -> None:
        self.network.former.clear()
        self.cluster.kill(scheduler)

    def _join_server(self) -> bool:
        if not self.cluster.groups or len(self.cluster.live_servers) > self.cluster.settings.num_servers + 1:
            return False
        self.cluster.start_server(is_extra=True)
        return True

    def _leave_server(self) -> bool:
        staying = [process for process in self.cluster.live_servers if not process.is_leaving]
        server, replicas = self.one(staying), self.cluster.settings.replicas
        if server is None or len(staying) < 2 or not self.cluster.groups:
            return False
        if not self._allow_loss and not self.can_spare([server] if replicas else []):
            return False
        return self.cluster.leave(server)

    def _join_worker(self) -> bool:
        if not self.cluster.groups or len(self.cluster.live_workers) > self.cluster.settings.num_workers + 1:
            return False
        self.cluster.start_worker()
        return True

    def _leave_worker(self) -> bool:
        staying = [process for process in self.cluster.live_workers if not process.is_leaving]
        worker = self.one(staying)
        return worker is not None and len(staying) > 1 and self.cluster.leave(worker)
