"""Processes that exchange whole messages, and their connections, which are opened again after a break."""

from __future__ import annotations

from typing import Any, Final

from typing_extensions import override

from paceline.protocol.replication import StateReceived
from paceline.protocol.scheduler.messages import PrepareView, Welcome
from paceline.protocol.scheduler.views import View, ViewChange
from simulator.network import End, Refused, VirtualNetwork
from simulator.world import VirtualProcess

SCHEDULER: Final = 0
"""The target of a link to the current scheduler. All other targets are incarnations of servers."""
_RECONNECT_S: Final = 0.03
_NUM_BYTES: Final[dict[type, int]] = {
    **dict.fromkeys((View, ViewChange, PrepareView, Welcome), 2000),
    StateReceived: 20_000,
}


class MessageEnd(End):
    """One end of a connection. `source` and `target` are the incarnations of its two processes."""

    other: MessageEnd

    def __init__(self, network: VirtualNetwork, process: MessageProcess, path: tuple[str, str]) -> None:
        super().__init__(network, process, path)
        self.process: MessageProcess = process
        self.source = self.target = 0
        self.is_opener = False
        self._is_lost = False
        self.changed = self._changed

    def send(self, message: Any) -> None:
        """Send a message. It is lost if the connection is broken, even if this end has not detected the break."""
        if self.is_open and not self.must_break():
            self.transmit(self.other.arrive, message)

    @override
    def arrive(self, data: Any) -> None:
        if self.is_closed:
            self.transmit(self.other.reset)
        else:
            self.process.run(self._receive, data)

    @override
    def num_bytes(self, data: Any) -> int:
        return _NUM_BYTES.get(type(getattr(data, "event", getattr(data, "message", data))), 200)

    def _receive(self, message: Any) -> None:
        if not (self.is_closed or self.is_reset):
            self.process.receive(self, message)

    def _changed(self) -> None:
        if not self._is_lost:
            self._is_lost = True
            self.process.run(self._lost)

    def _lost(self) -> None:
        if not self.is_closed:
            self.close()
            self.process.closed(self)


class MessageProcess(VirtualProcess):
    """A process without threads: the simulation calls it for each message. After a crash, a new process replaces it."""

    def __init__(self, name: str, network: VirtualNetwork) -> None:
        super().__init__(network.world, name, name)
        self.network = network
        self.links: dict[int, MessageEnd | None] = {}
        """The wanted connections by target; the value is None while the connection does not exist."""
        self._connecting: set[int] = set()
        self._accepted: dict[VirtualProcess, MessageEnd] = {}
        network.listeners[name] = self

    @property
    def process(self) -> VirtualProcess:
        return self

    @property
    def own_time_s(self) -> float:
        return self.world.time_s + self.clock_offset_s

    # Subclasses override these methods.

    @property
    def incarnation(self) -> int:
        return 0

    def address(self, target: int) -> str | None:
        """Return the address of a target; None if the address is unknown."""
        return None

    def accepts(self, connection: MessageEnd) -> bool:
        """Return whether to accept a connection of another process."""
        return False

    def link_changed(self, target: int, *, is_up: bool) -> None:
        """Record that a link was opened or has broken."""

    def peer_lost(self, connection: MessageEnd) -> None:
        """Record the end of an accepted connection."""

    def receive(self, connection: MessageEnd, message: Any) -> None:
        """Receive a message."""
        raise NotImplementedError

    # Links.

    def want(self, target: int) -> None:
        self.links.setdefault(target, None)
        self.connect()

    def drop(self, target: int) -> None:
        link = self.links.pop(target, None)
        if link is not None:
            link.close()

    def send(self, target: int, message: Any) -> None:
        """Send a message on a link; it is lost without a connection."""
        link = self.links.get(target)
        if link is not None:
            link.send(message)

    def connect(self) -> None:
        """Open all missing links whose addresses are known."""
        for target, link in self.links.items():
            address = self.address(target) if link is None and target not in self._connecting else None
            if address is not None:
                self._connecting.add(target)
                self.later(self.network.delay_s((self.host, address)), self._reach, target, address)

    def _reach(self, target: int, address: str) -> None:
        try:
            process = self.network.reach(self.host, address)
        except Refused:
            process = None
        if process is not None and not process.is_paused:
            near, far = self.network.connect(self, process, MessageEnd)
            near.source = far.source = self.incarnation
            near.target = far.target = target
            near.is_opener = True
            if process.admit(far):
                self.later(self.network.delay_s(near.path), self._open, near)
                return
            self.network.forget(near)
            self.network.forget(far)
        self.later(_RECONNECT_S, self._retry, target)

    def _retry(self, target: int) -> None:
        self._connecting.discard(target)
        self.connect()

    def admit(self, connection: MessageEnd) -> bool:
        """Accept a connection, which replaces a former connection of the same process; return False to refuse it."""
        if not self.accepts(connection):
            return False
        opener = connection.other.process
        former = self._accepted.get(opener)
        self._accepted[opener] = connection
        if former is not None and not former.is_closed:
            former.close()
            self.peer_lost(former)
        return True

    def _open(self, connection: MessageEnd) -> None:
        if not connection.is_open:
            return
        target = connection.target
        self._connecting.discard(target)
        if self.links.get(target, connection) is None:
            self.links[target] = connection
            self.link_changed(target, is_up=True)
        else:
            connection.close()

    def closed(self, connection: MessageEnd) -> None:
        """Record the end of a connection. If it was a link, open it again."""
        target = connection.target
        if not connection.is_opener:
            self.peer_lost(connection)
            return
        if self.links.get(target) is connection:
            self.links[target] = None
            self.link_changed(target, is_up=False)
        else:
            self._connecting.discard(target)
        self.connect()
