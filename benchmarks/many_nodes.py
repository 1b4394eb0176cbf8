"""Simulate the scheduler of a cluster of thousands of nodes.

``python benchmarks/many_nodes.py`` runs the scheduler's protocol with 4,000 and 10,000 nodes in virtual time. All nodes
join and send heartbeats. One worker leaves. A switch with 400 workers fails and works again. All servers are replaced,
a fifth of them at a time. Finally the scheduler is restarted. The nodes have no tables, and a server needs 0.5 s to
fill a replica.

The scheduler handles one message at a time. The time of a message consists of the processor time for protocol and
encoding, measured on this machine, and the transmission of its bytes at 1 Gbit/s. Latencies are 0.25 to 0.75 ms, and up
to 20 ms for 2% of the messages. Bytes are counted for encoded messages and the headers of their frames, but not for
handshakes of connections and for TCP.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FunctionType, ModuleType
from typing import Any, ClassVar, Final

from typing_extensions import override

from paceline.protocol import Eventual, Role
from paceline.protocol.buckets import bucket_set, buckets_in, to_bytes
from paceline.protocol.membership import ProcessIdentity
from paceline.protocol.placement import NUM_BUCKETS
from paceline.protocol.scheduler import events
from paceline.protocol.scheduler.member_state import MemberState
from paceline.protocol.scheduler.messages import Drain, Filled, Leave
from paceline.protocol.scheduler.views import View, ViewChange
from paceline.ps import messages
from paceline.transport.frames import HEADER_BYTES
from simulator.network import VirtualNetwork
from simulator.oracle import Oracle
from simulator.protocol.links import MessageEnd
from simulator.protocol.node import SimulatedNode, Surroundings
from simulator.protocol.scheduler import SimulatedScheduler
from simulator.settings import RunSettings
from simulator.world import VirtualWorld

BYTES_PER_S: Final = 125e6
FILL_S: Final = 0.5
SWITCH_NODES: Final = 400
HOST: Final = "0f8b3a52-5d0e-4c19-9f6e-2f4d6a1b7c3d/pid:[4026531836]"
"""A text with the typical length of a host's identity."""


class BusyScheduler(SimulatedScheduler):
    """A scheduler whose work and transmissions take virtual time. They are counted."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.cpu_s = 0.0
        self.num_messages: Counter[type] = Counter()
        self.num_bytes: Counter[type] = Counter()
        self._work: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._free_s = self._sent_s = self._received_s = 0.0
        self._encoded: tuple[Any, int] = (None, 0)
        super().__init__(*arguments, **options)

    @override
    def run(self, call: Callable[..., None], *arguments: Any) -> None:
        self._work.append((call, arguments))
        if len(self._work) == 1:
            self.world.at(max(self.world.time_s, self._free_s), self._run_next)

    def _run_next(self) -> None:
        call, arguments = self._work[0]
        began_s, self._received_s = time.thread_time(), 0.0
        super().run(call, *arguments)
        took_s = time.thread_time() - began_s
        self.cpu_s += took_s
        self._free_s = self.world.time_s + took_s + self._received_s
        self._work.popleft()
        if self._work:
            self.world.at(self._free_s, self._run_next)

    @override
    def _find_ended(self) -> None:
        pass  # no process ends while the scheduler is restarted

    @override
    def receive(self, connection: MessageEnd, message: Any) -> None:
        self._received_s += self._count(message.content, len(messages.encode(message.content)))
        super().receive(connection, message)

    @override
    def _carry_out(self, instruction: events.Instruction) -> None:
        if not isinstance(instruction, events.SendMessage):
            super()._carry_out(instruction)
            return
        message = instruction.message
        if message is not self._encoded[0]:
            self._encoded = message, 100 if isinstance(message, Exception) else len(messages.encode(message))
        took_s = self._count(message, self._encoded[1])
        self._sent_s = max(self._sent_s, self.world.time_s) + took_s
        self.world.at(self._sent_s, instruction.peer.send, instruction)  # type: ignore[attr-defined]

    def _count(self, message: Any, num_bytes: int) -> float:
        """Count a message. Return the time of its transmission."""
        self.num_messages[type(message)] += 1
        self.num_bytes[type(message)] += HEADER_BYTES + num_bytes
        return (HEADER_BYTES + num_bytes) / BYTES_PER_S


class SharedState(MemberState):
    """Applies each change of a view only once for all nodes with the same view."""

    applied: ClassVar[dict[tuple[int, int], tuple[Any, ...]]] = {}

    @override
    def _full_view(self, view: View | ViewChange) -> View:
        key = id(view), id(self.views.committed)
        if key not in self.applied:
            self.applied[key] = view, self.views.committed, super()._full_view(view)
        return self.applied[key][2]  # type: ignore[no-any-return]

    @override
    def _check(self, view: View) -> None:
        pass


class Node(SimulatedNode):
    """A member without tables. A server reports the replicas that it has filled, after FILL_S."""

    def __init__(self, name: str, around: Surroundings, role: Role, *, is_extra: bool = False) -> None:
        super().__init__(name, around, role, is_extra=is_extra)
        self.state = SharedState(NUM_BUCKETS)
        self.identity = ProcessIdentity(HOST, self.number, self.number)
        self.at_death.append(partial(self.network.ended, self))
        self._fills: dict[tuple[int, int], float] = {}  # (target, bucket) → end of the filling

    @override
    def view_changed(self, view: View) -> None:
        if self.role is Role.SERVER:
            fills = {
                (group.filling, bucket): self.world.time_s + FILL_S
                for group in view.groups
                if group.filling is not None and group.members[-1:] == (self.incarnation,)
                for bucket in buckets_in(group.buckets)
            }
            is_new = bool(fills.keys() - self._fills.keys())
            self._fills = {fill: self._fills.get(fill, end_s) for fill, end_s in fills.items()}
            self._report_fills()
            if is_new:
                self.later(FILL_S, self._report_fills)

    def _report_fills(self) -> None:
        view = self.state.views.committed
        assert view is not None
        filled: dict[int, list[int]] = {}
        for (target, bucket), end_s in self._fills.items():
            if end_s <= self.world.time_s:
                filled.setdefault(target, []).append(bucket)
        for target, buckets in filled.items():
            self.notify(Filled(view.version, target, to_bytes(bucket_set(buckets))))

    def drain(self) -> None:
        self.state.is_leaving = True
        self.notify(Drain())


class Simulation:
    """A cluster with `num_nodes` nodes, of which `num_servers` are servers."""

    def __init__(self, num_nodes: int, num_servers: int) -> None:
        self.num_nodes = num_nodes
        self.world = VirtualWorld(0)
        settings = RunSettings(
            num_servers=num_servers, num_workers=num_nodes - num_servers, replicas=1, consistency=Eventual(),
            think_s=0.0, heartbeat_timeout_s=10.0, is_one_host=False, num_buckets=NUM_BUCKETS,
        )  # fmt: skip
        network = VirtualNetwork(self.world, [0.0005], [BYTES_PER_S])
        self.around = Surroundings(network, Oracle(settings, allow_loss=True), settings)
        self.scheduler = self.start_scheduler("scheduler.1")
        self.nodes: dict[Role, list[Node]] = {Role.SERVER: [], Role.WORKER: []}
        self._num_started = 0

    def start_scheduler(self, name: str, *, replaces: bool = False) -> BusyScheduler:
        scheduler = BusyScheduler(name, self.around, replaces=replaces, accepts_minority=False)
        scheduler.at_death.append(partial(self.around.network.ended, scheduler))
        return scheduler

    def start(self, role: Role, count: int, *, is_extra: bool = False) -> list[Node]:
        started = []
        for _ in range(count):
            self._num_started += 1
            # The name is also the address. Together they are as long as the name and the addresses of a real process.
            name = f"{role.value}-ip-10-0-{self._num_started:05}-".ljust(30 if role is Role.WORKER else 90, "x")
            started.append(Node(name, self.around, role, is_extra=is_extra))
        self.nodes[role] += started
        return started

    def members(self, role: Role) -> list[Node]:
        self.nodes[role] = [node for node in self.nodes[role] if not node.is_dead]
        return self.nodes[role]

    def wait(self, is_reached: Callable[[], bool], timeout_s: float = 300.0) -> None:
        end_s = self.world.time_s + timeout_s
        while not is_reached():
            if self.world.time_s > end_s:
                raise TimeoutError(f"not reached after {timeout_s} s")
            self.world.sleep(0.02)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Print the costs of a phase. If a scheduler starts in the phase, all its costs count."""
        former, began_s = self.scheduler, self.world.time_s
        before = former.cpu_s, former.num_messages.total(), former.num_bytes.total()
        yield
        scheduler = self.scheduler
        cpu_s, num_messages, num_bytes = before if scheduler is former else (0.0, 0, 0)
        print(
            f"{name:38} {self.world.time_s - began_s:9.2f} {scheduler.cpu_s - cpu_s:7.2f} "
            f"{(scheduler.num_messages.total() - num_messages) / self.num_nodes:9.1f} "
            f"{(scheduler.num_bytes.total() - num_bytes) / self.num_nodes / 1e3:8.2f}",
            flush=True,
        )

    def is_complete(self) -> bool:
        """Return whether all live nodes are members of the committed view, and no replica is missing."""
        view = self.scheduler.core.cluster.committed
        live = [node for role in self.nodes for node in self.members(role)]
        return (
            len(view.members) == len(live)
            and all(node.is_member for node in live)
            and all(group.filling is None for group in view.groups)
        )


def memory_of(root: Any) -> int:
    """Return the size of all objects that an object refers to, except connections."""
    seen, todo, size = set(), [root], 0
    while todo:
        found = todo.pop()
        if id(found) in seen or isinstance(found, (MessageEnd, type, ModuleType, FunctionType)):
            continue
        seen.add(id(found))
        size += sys.getsizeof(found)
        todo += gc.get_referents(found)
    return size


def simulate(num_nodes: int, num_servers: int) -> None:
    simulation = Simulation(num_nodes, num_servers)
    world, network = simulation.world, simulation.around.network
    servers, workers = Role.SERVER, Role.WORKER

    def num_members() -> int:
        return len(simulation.scheduler.core.cluster.committed.members)

    print(f"{num_nodes:,} nodes: {num_servers} servers with one replica, {num_nodes - num_servers:,} workers")
    print(f"{'':38} {'virtual s':>9} {'CPU s':>7} {'messages':>9} {'kB':>8}")
    with simulation.phase("all nodes join"):
        simulation.start(servers, num_servers)
        simulation.start(workers, num_nodes - num_servers)
        simulation.wait(simulation.is_complete)
    with simulation.phase("heartbeats of 10 s"):
        world.sleep(10)
    with simulation.phase("a worker leaves"):
        leaving = simulation.members(workers)[-1]
        leaving.notify(Leave())
        leaving.later(0.1, leaving.kill)
        simulation.wait(lambda: num_members() == num_nodes - 1)
    with simulation.phase("a worker joins"):
        simulation.start(workers, 1)
        simulation.wait(simulation.is_complete)
    behind = simulation.members(workers)[-SWITCH_NODES:]
    with simulation.phase(f"a switch with {SWITCH_NODES} workers fails"):
        for node in behind:
            network.cut_path(node.host, simulation.scheduler.host)
        simulation.wait(lambda: num_members() == num_nodes - SWITCH_NODES)
    for node in behind:
        network.mend_path(node.host, simulation.scheduler.host)
    simulation.wait(lambda: all(node.is_dead for node in behind))
    with simulation.phase(f"{SWITCH_NODES} workers join again"):
        simulation.start(workers, SWITCH_NODES)
        simulation.wait(simulation.is_complete)
    with simulation.phase("all servers are replaced"):
        old = list(simulation.members(servers))
        step = max(len(old) // 5, 1)
        for at in range(0, len(old), step):
            batch = old[at : at + step]
            simulation.start(servers, len(batch), is_extra=True)
            simulation.wait(simulation.is_complete)
            for node in batch:
                node.drain()
            simulation.wait(lambda batch=batch: all(node.is_dead for node in batch))  # type: ignore[misc]
            simulation.wait(simulation.is_complete)
    with simulation.phase("the scheduler is restarted"):
        simulation.scheduler.kill()
        simulation.scheduler = simulation.start_scheduler("scheduler.2", replaces=True)
        simulation.wait(lambda: len(simulation.scheduler.core.sessions.members) == num_nodes)
    size = memory_of(simulation.scheduler.core)
    print(f"memory of the scheduler's protocol: {size / 1e6:.1f} MB, {size / num_nodes / 1e3:.2f} kB per node")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="*", default=[4000, 10_000])
    parser.add_argument("--servers", type=int, default=50)
    options = parser.parse_args()
    gc.disable()  # simulated nodes do not belong to the scheduler
    for nodes in options.nodes:
        simulate(nodes, options.servers)


if __name__ == "__main__":
    main()
