"""Processes and the connections between them, on virtual time.

A :class:`SimulatedConnection` is what TCP gives: each direction keeps its order until it breaks; then some tail of what
was on its way is lost, in each direction by itself. So a frame is dropped only with all that came after it, and it
comes twice only if its sender sends it again. Connections overtake one another freely.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from random import Random
from typing import Any

from simulator.clock import SimulatedClock

_RECONNECT_S = 0.03


class SimulatedProcess:
    """One process of a cluster. It ends by a crash or by itself; one that is restarted is another one."""

    def __init__(self, name: str, network: SimulatedNetwork) -> None:
        self.name = name
        self.network = network
        self.clock = network.clock
        self.is_alive = True
        self.stopped_until_s = 0.0
        self.slow_s = 0.0
        self.clock_offset_s = 0.0
        self.connections: list[SimulatedConnection] = []
        self.accepted: dict[SimulatedProcess, SimulatedConnection] = {}
        self.last_delivered = 0
        network.add(self)

    @property
    def own_now_s(self) -> float:
        """What this process takes for the time."""
        return self.clock.now_s + self.clock_offset_s

    def later(self, delay_s: float, action: Callable[..., None], *args: Any) -> None:
        """Call something after a delay, if this process lives and runs by then."""
        self.clock.after(delay_s, self.run, action, args)

    def run(self, action: Callable[..., None], args: tuple[Any, ...]) -> None:
        """Call something now, or as soon as the process is not stopped."""
        if not self.is_alive:
            return
        if self.stopped_until_s > self.clock.now_s:
            self.clock.again_at(self.stopped_until_s, self.run, action, args)
            return
        action(*args)

    def end(self) -> None:
        """End at once; all connections break."""
        if self.is_alive:
            self.is_alive = False
            self.network.remove(self)

    def accept(self, connection: SimulatedConnection, hello: Any) -> bool:
        """Take a connection that another process opens, or refuse it."""
        raise NotImplementedError

    def opened(self, connection: SimulatedConnection) -> None:
        """Note that a connection that this process asked for is there."""
        raise NotImplementedError

    def refused(self, name: str, hello: Any) -> None:
        """Note that a connection could not be opened."""
        raise NotImplementedError

    def closed(self, connection: SimulatedConnection) -> None:
        """Note that a connection broke."""
        raise NotImplementedError

    def receive(self, connection: SimulatedConnection, frame: Any) -> None:
        """Take a frame."""
        raise NotImplementedError


class SimulatedConnection:
    """Two ordered streams between two processes; end 0 opened it."""

    __slots__ = (
        "delivered",
        "ends",
        "hello",
        "is_ending",
        "is_forgotten",
        "is_open",
        "latency_s",
        "limit",
        "network",
        "owner",
        "sent",
        "tail_s",
        "was_opened",
    )

    def __init__(
        self,
        network: SimulatedNetwork,
        source: SimulatedProcess,
        target: SimulatedProcess,
        hello: Any,
        latency_s: float,
    ) -> None:
        self.network = network
        self.ends = (source, target)
        self.hello = hello
        self.latency_s = latency_s
        self.is_open = True
        self.is_forgotten = False
        self.was_opened = False
        self.owner: Any = None
        """What the accepting process makes of it."""
        self.sent = [0, 0]
        self.delivered = [0, 0]
        self.limit: list[int] | None = None
        self.tail_s = [0.0, 0.0]
        self.is_ending = [False, False]
        """By direction: whether it is broken, and what still arrives is on its way."""

    def __repr__(self) -> str:
        return f"<{self.ends[0].name} - {self.ends[1].name}>"

    def peer(self, process: SimulatedProcess) -> SimulatedProcess:
        """The process at the other end."""
        return self.ends[1] if self.ends[0] is process else self.ends[0]

    def send(self, sender: SimulatedProcess, frame: Any) -> None:
        """Send a frame; it is lost if the connection is broken, noticed or not."""
        if self.is_open:
            self.network.send(self, 0 if self.ends[0] is sender else 1, frame)

    def forget(self) -> None:
        """Deliver nothing any more: a newer connection of the same processes took its place."""
        self.is_open = False
        self.is_forgotten = True
        self.limit = [0, 0]


class SimulatedNetwork:
    """Who lives, and how their frames travel.

    `fired` counts, by kind, what happened to them.
    """

    def __init__(
        self, clock: SimulatedClock, random: Random, fired: Counter[str], num_bytes: Callable[[object], int]
    ) -> None:
        self.clock = clock
        self.random = random
        self.fired = fired
        self.processes: dict[str, SimulatedProcess] = {}
        self._listening: dict[str, SimulatedProcess] = {}  # other addresses than names
        self.trace: Callable[[str], None] | None = None
        self.num_bytes = num_bytes
        self.latency_s = random.choice((0.0003, 0.001, 0.003))
        self.bytes_per_s = random.choice((2e6, 2e7, 1e9))
        self._cables: list[tuple[SimulatedProcess, SimulatedProcess]] = []
        self._partitions: list[tuple[frozenset[str], float]] = []
        self._number = 0

    def add(self, process: SimulatedProcess) -> None:
        """Let a process listen under its name."""
        self.processes[process.name] = process

    def listen(self, address: str, process: SimulatedProcess) -> None:
        """Let a process listen at another address than its name, in the place of whoever did."""
        self._listening[address] = process

    def remove(self, process: SimulatedProcess) -> None:
        """Take a process away and break its connections."""
        del self.processes[process.name]
        for connection in list(process.connections):
            self.cut(connection)
        self._cables = [pair for pair in self._cables if process not in pair]

    # Connections.

    def connect(self, source: SimulatedProcess, name: str, hello: Any) -> None:
        """Open a connection; `source` is told by `opened` or `refused`."""
        self.clock.after(self.latency_s * (0.5 + self.random.random()), self._arrive, source, name, hello)

    def _arrive(self, source: SimulatedProcess, name: str, hello: Any) -> None:
        target = self._listening.get(name) or self.processes.get(name)
        if not source.is_alive:
            return
        if target is not None and not target.is_alive:
            target = None
        if target is None or self._is_cut(source, target) or self._blocked_until_s(source, target) > 0:
            self.clock.after(_RECONNECT_S, source.run, source.refused, (name, hello))
            return
        if target.stopped_until_s > self.clock.now_s:
            self.clock.after(_RECONNECT_S, self._arrive, source, name, hello)
            return
        latency_s = self.latency_s * self.random.choice((0.5, 1.0, 4.0))
        connection = SimulatedConnection(self, source, target, hello, latency_s)
        if not target.accept(connection, hello):
            self.clock.after(_RECONNECT_S, source.run, source.refused, (name, hello))
            return
        former = target.accepted.get(source)
        if former is not None:
            former.forget()
            self.unlink(former)
            target.closed(former)
        target.accepted[source] = connection
        source.connections.append(connection)
        target.connections.append(connection)
        self.clock.after(latency_s, self._open, connection)

    def _open(self, connection: SimulatedConnection) -> None:
        source = connection.ends[0]
        if connection.is_open:  # if not, its break is told instead
            source.run(self._opened, (connection,))

    def _opened(self, connection: SimulatedConnection) -> None:
        if connection.is_open:
            connection.was_opened = True
            connection.ends[0].opened(connection)

    def send(self, connection: SimulatedConnection, direction: int, frame: Any) -> None:
        """Put a frame on its way."""
        clock = self.clock
        sender, receiver = connection.ends[direction], connection.ends[1 - direction]
        delay_s = connection.latency_s * (1 + self.random.random()) + sender.slow_s + receiver.slow_s
        arrival_s = max(connection.tail_s[direction], clock.now_s + delay_s) + self.num_bytes(frame) / self.bytes_per_s
        connection.tail_s[direction] = arrival_s
        connection.sent[direction] += 1
        self._number += 1
        clock.at(arrival_s, self._deliver, connection, direction, connection.sent[direction], self._number, frame)

    def _deliver(self, connection: SimulatedConnection, direction: int, index: int, number: int, frame: Any) -> None:
        sender, receiver = connection.ends[direction], connection.ends[1 - direction]
        if (connection.limit is not None and index > connection.limit[direction]) or not receiver.is_alive:
            return
        if self._is_cut(sender, receiver):
            connection.limit = list(connection.delivered)  # a stream has no gaps, even when the cable goes with its end
            return
        until_s = max(receiver.stopped_until_s, self._blocked_until_s(sender, receiver) if self._partitions else 0.0)
        if until_s > self.clock.now_s:
            self.clock.again_at(until_s, self._deliver, connection, direction, index, number, frame)
            return
        connection.delivered[direction] = index
        if number < sender.last_delivered:
            self.fired["reorder"] += 1
        else:
            sender.last_delivered = number
        if self.trace is not None:
            self.trace(f"{sender.name} -> {receiver.name}: {frame}")
        receiver.receive(connection, frame)
        if connection.is_ending[direction] and connection.limit is not None and index == connection.limit[direction]:
            self.clock.after(0.0, receiver.run, self._closed, (receiver, connection))

    # Faults.

    def cut(self, connection: SimulatedConnection) -> None:
        """Break a connection: in each direction some of what is under way still arrives, the rest is lost."""
        if not connection.is_open:
            return
        connection.is_open = False
        frozen = connection.limit is not None
        connection.limit = list(connection.delivered)
        for direction in (0, 1):
            sent = connection.sent[direction]
            if not frozen:
                connection.limit[direction] = self.random.randint(connection.delivered[direction], sent)
            if connection.limit[direction] < sent:
                self.fired["drop"] += 1
        self.unlink(connection)
        if self._is_cut(*connection.ends):
            return  # nobody hears of it
        for direction in (0, 1):
            end = connection.ends[1 - direction]
            delay_s = connection.latency_s * self.random.random()
            if connection.limit[direction] > connection.delivered[direction]:
                connection.is_ending[direction] = True  # the end hears of it behind the last frame that arrives
            elif end.is_alive:
                self.clock.after(delay_s, end.run, self._closed, (end, connection))

    def _closed(self, end: SimulatedProcess, connection: SimulatedConnection) -> None:
        if connection.is_forgotten and end is connection.ends[1]:
            return  # it was told when the newer one came
        if end.accepted.get(connection.peer(end)) is connection:
            del end.accepted[connection.peer(end)]
        end.closed(connection)

    def close(self, connection: SimulatedConnection) -> None:
        """Close a connection in good order, as far as its two ends are concerned: as a break."""
        self.cut(connection)

    def unlink(self, connection: SimulatedConnection) -> None:
        """Take a connection out of its ends' lists."""
        for end in connection.ends:
            if connection in end.connections:
                end.connections.remove(connection)

    def part(self, names: Iterable[str], duration_s: float) -> None:
        """Let nothing pass between these processes and all others for a while; some connections break over it."""
        island = frozenset(names)
        self._partitions.append((island, self.clock.now_s + duration_s))
        crossing = {
            connection: None
            for name in sorted(island)
            if name in self.processes
            for connection in self.processes[name].connections
            if connection.peer(self.processes[name]).name not in island
        }
        for connection in crossing:
            if self.random.random() < 0.5:
                self.clock.after(duration_s * self.random.random(), self.cut, connection)

    def cut_cable(self, one: SimulatedProcess, other: SimulatedProcess) -> None:
        """Let nothing pass between two processes as long as both live; no connection breaks over it."""
        self._cables.append((one, other))

    @property
    def has_cut_cables(self) -> bool:
        """Whether any cable is cut."""
        return bool(self._cables)

    def is_cut_off(self, process: SimulatedProcess) -> bool:
        """Whether a cable of a process is cut."""
        return any(process in pair for pair in self._cables)

    def _is_cut(self, one: SimulatedProcess, other: SimulatedProcess) -> bool:
        return bool(self._cables) and any(one in pair and other in pair for pair in self._cables)

    def _blocked_until_s(self, one: SimulatedProcess, other: SimulatedProcess) -> float:
        until_s = 0.0
        if self._partitions:
            now_s = self.clock.now_s
            self._partitions = [each for each in self._partitions if each[1] > now_s]
            for island, end_s in self._partitions:
                if (one.name in island) != (other.name in island):
                    until_s = max(until_s, end_s)
        return until_s
