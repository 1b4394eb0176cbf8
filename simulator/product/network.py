"""Streams of bytes between virtual hosts: what TCP does to a connection, good and bad.

Bytes arrive in order, cut into pieces anywhere, after a delay; a receiver that does not read stops the sender. A path
that is cut loses nothing: what is on it arrives when it is mended. A connection may be reset, at both ends or at one:
the other end of a half-open one hears of it when it sends, or by keepalive.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Final

from simulator.product.world import VirtualProcess, VirtualWorld

KEEPALIVE_S: Final = 5.0
_RETRANSMIT_S: Final = 0.3
_LATE_S: Final = 0.3
WINDOWS: Final = (300, 2_000, 20_000, 200_000)
"""How many bytes a connection holds between its two ends."""


class End:
    """One end of a connection; `changed` is called when there is something to read, room to write, or an end."""

    def __init__(self, network: VirtualNetwork, process: VirtualProcess, path: tuple[str, str], window: int) -> None:
        self.network = network
        self.process = process
        self.other: End
        self.path = path
        self.window = window
        self.arrived: deque[bytes] = deque()
        self.num_arrived = 0
        self.is_reset = False
        self.has_ended = False
        """No more bytes will come."""
        self.is_closed = False
        self.changed: Callable[[], None] = lambda: None
        self.name = ""
        self._num_sent = 0  # and not read by the other end
        self._last_s = 0.0  # when what was sent last arrives
        self._under_way: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._num_stalled = 0

    @property
    def room(self) -> int:
        """How many bytes may be written."""
        return max(self.window - self._num_sent, 0)

    def write(self, data: memoryview) -> int:
        """Send what there is room for; return how much that was."""
        taken = min(len(data), self.room)
        world, random = self.network.world, self.network.world.random
        if taken and self in self.network.breaking:
            world.after(0.0, self.reset)
            world.after(0.0, self.other.reset)
        elif taken and not self.is_closed:
            if self in self.network.late:
                self._last_s = max(self._last_s, world.now_s) + random.random() * _LATE_S
                world.after(0.0, self.reset)
                world.after(KEEPALIVE_S, self.other.reset)
            self._num_sent += taken
            at = 0
            while at < taken:
                size = taken - at if random.random() < 0.6 else random.randint(1, taken - at)
                self._transmit(self.other.arrive, bytes(data[at : at + size]))
                at += size
        return taken

    def read(self, view: memoryview) -> int:
        """Take what has come, as much as there is place for."""
        taken = 0
        while self.arrived and taken < len(view):
            data = self.arrived.popleft()
            size = min(len(data), len(view) - taken)
            view[taken : taken + size] = data[:size]
            if size < len(data):
                self.arrived.appendleft(data[size:])
            taken += size
        self.num_arrived -= taken
        if taken:
            self._transmit(self.other.has_read, taken)
        return taken

    def close(self) -> None:
        """Close in good order; with anything unread that is a reset, as TCP has it."""
        if self.is_closed:
            return
        self.is_closed = True
        self.changed = lambda: None
        if self.arrived and not self.has_ended:
            self._transmit(self.other.reset)
        else:
            self._transmit(self.other.end)
        self.arrived.clear()
        self.network.forget(self)

    def abort(self) -> None:
        """Close at once; the other end is told."""
        if not self.is_closed:
            self.is_closed = True
            self.changed = lambda: None
            self._transmit(self.other.reset)
            self.network.forget(self)

    def vanish(self) -> None:
        """Be gone without a word: the host has no power."""
        self.is_closed = True
        self.changed = lambda: None
        self.network.forget(self)
        self.network.world.after(KEEPALIVE_S, self.other.reset)

    # What happens to it.

    def arrive(self, data: bytes) -> None:
        """Have bytes come."""
        if self.is_closed:  # this end is closed
            self._transmit(self.other.reset)
        elif not (self.is_reset or self.has_ended):
            self.arrived.append(data)
            self.num_arrived += len(data)
            self.changed()

    def has_read(self, size: int) -> None:
        """Know that the other end has read so much."""
        self._num_sent -= size
        if not self.is_closed:
            self.changed()

    def end(self) -> None:
        """Have the other end closed."""
        self.has_ended = True
        if not self.is_closed:
            self.changed()

    def reset(self) -> None:
        """Have the connection reset: what was not read is lost."""
        if not self.is_closed and not self.is_reset:
            self.is_reset = True
            self.arrived.clear()
            self.network.forget(self)
            self.changed()

    def _transmit(self, call: Callable[..., None], *arguments: Any) -> None:
        """Let something happen at the other end, behind all that was sent before."""
        self._under_way.append((call, arguments))
        world = self.network.world
        self._last_s = max(self._last_s, world.now_s + self.network.delay_s(self.path))
        world.at(self._last_s, self._deliver_next)

    def _deliver_next(self) -> None:
        if self.network.is_cut(self.path):
            self._num_stalled += 1
            self.network.stalled[self] = None
            return
        call, arguments = self._under_way.popleft()
        self.network.world.note(f"{self.name} {call.__name__} {_size(arguments)}")
        call(*arguments)

    def mended(self) -> None:
        """Let arrive what waited for the path."""
        stalled, self._num_stalled = self._num_stalled, 0
        world = self.network.world
        self._last_s = max(self._last_s, world.now_s + world.random.random() * _RETRANSMIT_S)
        for _ in range(stalled):
            world.at(self._last_s, self._deliver_next)


def _size(arguments: tuple[Any, ...]) -> str:
    return " ".join(str(len(each)) if isinstance(each, bytes) else str(each) for each in arguments)


class VirtualNetwork:
    """All connections, who listens where, and the state of the paths between hosts."""

    def __init__(self, world: VirtualWorld) -> None:
        self.world = world
        self.ends: dict[End, None] = {}
        self.listeners: dict[str, Any] = {}
        self.stalled: dict[End, None] = {}
        self.cut: set[frozenset[str]] = set()
        self.slow: dict[str, float] = {}
        """Host → how long what it sends and receives takes."""
        self.breaking: set[End] = set()
        """Ends whose connection is reset at what they send next, which is lost."""
        self.late: set[End] = set()
        """Ends that are reset after their next write. It arrives late, perhaps after its repeat on a new connection."""
        self.refusing: set[str] = set()
        """Names of listeners that refuse connections."""
        self.powerless: set[str] = set()
        """Names of listeners whose host answers nobody."""
        self._number = 0

    def delay_s(self, path: tuple[str, str]) -> float:
        """Return how long the next bytes take."""
        random = self.world.random
        base = 5e-5 + random.random() * 3e-4
        if random.random() < 0.02:
            base += random.random() * 0.02
        return base + sum(self.slow[host] * random.random() for host in path if host in self.slow)

    def is_cut(self, path: tuple[str, str]) -> bool:
        """Return whether nothing gets through between two hosts."""
        return frozenset(path) in self.cut

    def is_any_cut(self, host: str) -> bool:
        """Return whether a host is cut off from another."""
        return any(host in path for path in self.cut)

    def cut_path(self, one: str, other: str) -> None:
        """Let nothing through between two hosts."""
        self.cut.add(frozenset((one, other)))

    def mend_path(self, one: str, other: str) -> None:
        """Let all through again."""
        self.cut.discard(frozenset((one, other)))
        stalled, self.stalled = list(self.stalled), {}
        for end in stalled:
            if self.is_cut(end.path):
                self.stalled[end] = None
            else:
                end.mended()

    def connect(self, ours: VirtualProcess, theirs: VirtualProcess) -> tuple[End, End]:
        """Return both ends of a new connection."""
        window = self.world.random.choice(WINDOWS)
        self._number += 1
        near = End(self, ours, (ours.host, theirs.host), window)
        far = End(self, theirs, (theirs.host, ours.host), window)
        near.other, far.other = far, near
        near.name = f"#{self._number} {ours.name}>{theirs.name}"
        far.name = f"#{self._number} {ours.name}<{theirs.name}"
        self.ends[near] = self.ends[far] = None
        return near, far

    def forget(self, end: End) -> None:
        """Note that an end is no more."""
        self.ends.pop(end, None)
        self.breaking.discard(end)
        self.late.discard(end)

    def ended(self, process: VirtualProcess, *, is_silent: bool = False) -> None:
        """End the connections and listeners of a process that is dead."""
        for end in [end for end in self.ends if end.process is process]:
            if is_silent:
                end.vanish()
            else:
                end.abort()
        for name, listener in list(self.listeners.items()):
            if listener.process is process:
                del self.listeners[name]
                if is_silent:
                    self.powerless.add(name)
