"""Simulate connections between hosts. They behave like TCP, and transmit bytes or whole messages.

All data arrives in order, after a delay. A cut path loses no data: the data arrives after the repair. A connection may
be reset at both ends or at one end. In the latter case, the other end detects this when it sends, or by keepalive.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeVar

from simulator.world import VirtualProcess, VirtualWorld

KEEPALIVE_S: Final = 5.0
RETRANSMIT_S: Final = 0.3
_LATE_S: Final = 0.3
_HICCUP, _HICCUP_S = 0.02, 0.02
_FORMER: Final = 0.3
"""While a new and a former listener of an address live, this share of the connections reaches the former listener."""


class Refused(Exception):  # noqa: N818 - an answer, not an error
    """No process listens at an address."""


class End:
    """One end of a connection; abstract. `changed` is called when data arrives and when the connection ends."""

    def __init__(self, network: VirtualNetwork, process: VirtualProcess, path: tuple[str, str]) -> None:
        self.network = network
        self.process = process
        self.other: End
        self.path = path
        self.name = ""
        self.is_reset = False
        self.has_ended = False
        """Whether the other end is closed, so that no more data will arrive."""
        self.is_closed = False
        self.changed: Callable[[], None] = lambda: None
        self._last_s = 0.0  # time at which the last transmission arrives
        self._in_flight: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._num_stalled = 0

    def __repr__(self) -> str:
        return self.name

    @property
    def is_open(self) -> bool:
        """Whether this end can send."""
        return not (self.is_closed or self.is_reset or self.has_ended)

    def close(self) -> None:
        """Close normally, so that all data that was sent arrives."""
        self._close(self.other.end)

    def abort(self) -> None:
        """Close, and reset the other end."""
        self._close(self.other.reset)

    def crash(self) -> None:
        """Close because the process dies: some of the last transmissions are lost."""
        if not self.is_closed:
            random = self.network.world.random
            for _ in range(random.randint(0, len(self._in_flight))):
                self._in_flight.pop()
                self.network.fired["drop"] += 1
            self.abort()

    def vanish(self) -> None:
        """Close without notifying the other end: the host lost power."""
        self.is_closed = True
        self.changed = lambda: None
        self.network.forget(self)
        self.network.world.after(KEEPALIVE_S, self.other.reset)

    def _close(self, notify: Callable[[], None]) -> None:
        if not self.is_closed:
            self.is_closed = True
            self.changed = lambda: None
            if not self.is_reset:
                self.transmit(notify)
            self.network.forget(self)

    def must_break(self) -> bool:
        """Begin the reset that is planned for this end, if any; return whether the current transmission is lost."""
        world = self.network.world
        if self in self.network.breaking:
            world.after(0.0, self.reset)
            world.after(0.0, self.other.reset)
            return True
        if self in self.network.late:
            self._last_s = max(self._last_s, world.time_s) + world.random.random() * _LATE_S
            world.after(0.0, self.reset)
            world.after(KEEPALIVE_S, self.other.reset)
        return False

    # The events of this end.

    def arrive(self, data: Any) -> None:
        """Receive data from the other end."""
        raise NotImplementedError

    def num_bytes(self, data: Any) -> int:
        """Return the size of a transmission."""
        raise NotImplementedError

    def end(self) -> None:
        """Record that the other end is closed."""
        self.has_ended = True
        if not self.is_closed:
            self.changed()

    def reset(self) -> None:
        """Break the connection at this end. Data in flight to this end is lost."""
        if not self.is_closed and not self.is_reset:
            self.is_reset = True
            self.network.fired["drop"] += bool(self.other._in_flight)
            self.network.forget(self)
            self.changed()

    # Transmissions to the other end.

    def transmit(self, call: Callable[..., None], *arguments: Any) -> None:
        """Call a function at the other end, after all earlier transmissions."""
        if self.process.is_dead and self.process.is_silent:
            return
        self._in_flight.append((call, arguments))
        world, network = self.network.world, self.network
        delay_s = network.delay_s(self.path) + (
            self.num_bytes(arguments[0]) / network.bytes_per_s if arguments else 0.0
        )
        self._last_s = max(self._last_s, world.time_s + delay_s)
        world.at(self._last_s, self._deliver_next)

    def _deliver_next(self) -> None:
        if self.network.is_cut(self.path):
            self._num_stalled += 1
            self.network.stalled[self] = None
        elif self._in_flight:
            call, arguments = self._in_flight.popleft()
            labels = [str(len(part)) if isinstance(part, bytes) else type(part).__name__ for part in arguments]
            self.network.world.note(f"{self.name} {call.__name__} {' '.join(labels)}", *arguments)
            call(*arguments)

    def mended(self) -> None:
        """Deliver all traffic that waited for the path."""
        stalled, self._num_stalled = self._num_stalled, 0
        world = self.network.world
        self._last_s = max(self._last_s, world.time_s + world.random.random() * RETRANSMIT_S)
        for _ in range(stalled):
            world.at(self._last_s, self._deliver_next)


AnyEnd = TypeVar("AnyEnd", bound=End)


class VirtualNetwork:
    """All connections, the listeners, and the state of the paths between hosts. `fired` counts events by kind."""

    def __init__(self, world: VirtualWorld, latencies_s: Sequence[float], bandwidths: Sequence[float]) -> None:
        self.world = world
        self.fired: Counter[str] = Counter()
        self.latency_s = world.random.choice(latencies_s)
        self.bytes_per_s = world.random.choice(bandwidths)
        self.ends: dict[End, None] = {}
        self.listeners: dict[str, Any] = {}
        """Address → listener; its `process` may be dead."""
        self.former: dict[str, Any] = {}
        """Address → its former listener. While this listener lives, some connections still reach it."""
        self.stalled: dict[End, None] = {}
        self.cuts: Counter[frozenset[str]] = Counter()
        """Path → number of faults that cut the path now."""
        self.slow: dict[str, float] = {}
        """Host → additional delay of its traffic in seconds."""
        self.breaking: set[End] = set()
        """Ends whose next transmission is lost and resets the connection."""
        self.late: set[End] = set()
        """Ends that are reset after their next write. The written data arrives late, perhaps after its repeat."""
        self.refusing: set[str] = set()
        """Addresses that refuse connections."""
        self.refused: set[str] = set()
        """Hosts that were refused by such an address. Their servers may be declared dead after the timeout."""
        self.powerless: set[str] = set()
        """Addresses of hosts without power, which do not answer."""
        self._number = 0

    def delay_s(self, path: tuple[str, str]) -> float:
        """Return the delay of the next transmission."""
        random = self.world.random
        base = self.latency_s * (0.5 + random.random())
        if random.random() < _HICCUP:
            base += random.random() * _HICCUP_S
        return base + sum(self.slow[host] * random.random() for host in path if host in self.slow)

    # Paths.

    def is_cut(self, path: tuple[str, str]) -> bool:
        """Return whether the path between two hosts is cut."""
        return bool(self.cuts) and frozenset(path) in self.cuts

    def is_any_cut(self, host: str) -> bool:
        """Return whether a path from this host to another host is cut."""
        return any(host in path for path in self.cuts)

    def cut_path(self, one: str, other: str) -> None:
        """Cut the path between two hosts."""
        self.cuts[frozenset((one, other))] += 1

    def mend_path(self, one: str, other: str) -> None:
        """End one cut of the path between two hosts."""
        path = frozenset((one, other))
        if path in self.cuts:  # false if one of the hosts is dead
            self.cuts[path] -= 1
            if not self.cuts[path]:
                del self.cuts[path]
        stalled, self.stalled = list(self.stalled), {}
        for end in stalled:
            if self.is_cut(end.path):
                self.stalled[end] = None
            else:
                end.mended()

    # Connections.

    def reach(self, source: str, address: str) -> Any | None:
        """Return the listener at an address; None if the host `source` gets no answer. Raises Refused."""
        if address in self.powerless:
            return None
        listener = self.listeners.get(address)
        former = self.former.get(address)
        if former is not None and not former.process.is_dead and self.world.random.random() < _FORMER:
            listener = former
        if listener is not None and self.is_cut((source, listener.process.host)):
            return None
        if address in self.refusing:
            self.refused.add(source)
        if listener is None or address in self.refusing:
            raise Refused
        return listener

    def connect(
        self, local: VirtualProcess, remote: VirtualProcess, make_end: Callable[..., AnyEnd]
    ) -> tuple[AnyEnd, AnyEnd]:
        """Return both ends of a new connection."""
        self._number += 1
        near = make_end(self, local, (local.host, remote.host))
        far = make_end(self, remote, (remote.host, local.host))
        near.other, far.other = far, near
        near.name = f"#{self._number} {local.name}>{remote.name}"
        far.name = f"#{self._number} {local.name}<{remote.name}"
        self.ends[near] = self.ends[far] = None
        return near, far

    def ends_of(self, processes: Iterable[VirtualProcess]) -> list[End]:
        """Return the open ends of some processes."""
        wanted = set(processes)
        return [end for end in self.ends if end.process in wanted]

    def forget(self, end: End) -> None:
        """Remove a closed end from the network."""
        self.ends.pop(end, None)
        self.breaking.discard(end)
        self.late.discard(end)

    def ended(self, process: VirtualProcess, *, is_silent: bool = False) -> None:
        """End the connections and listeners of a dead process."""
        for end in self.ends_of([process]):
            if is_silent:
                end.vanish()
            else:
                end.crash()
        for path in [path for path in self.cuts if process.host in path]:
            del self.cuts[path]
        for address, listener in list(self.listeners.items()):
            if listener.process is process:
                del self.listeners[address]
                if is_silent:
                    self.powerless.add(address)
