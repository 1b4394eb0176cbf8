"""Processes that exchange whole messages, and the connections between them."""

from __future__ import annotations

from typing import Any, Final

from typing_extensions import override

from paceline.protocol.replication import StateReceived
from paceline.protocol.scheduler.messages import PrepareView, Welcome
from paceline.protocol.scheduler.views import View, ViewChange
from simulator.network import End, Refused, VirtualNetwork
from simulator.world import VirtualProcess

_RECONNECT_S: Final = 0.03
_NUM_BYTES: Final[dict[type, int]] = {
    **dict.fromkeys((View, ViewChange, PrepareView, Welcome), 2000),
    StateReceived: 20_000,
}


class MessageEnd(End):
    """One process's end of a connection."""

    other: MessageEnd

    def __init__(self, network: VirtualNetwork, process: MessageProcess, path: tuple[str, str]) -> None:
        super().__init__(network, process, path)
        self.process: MessageProcess = process
        self.hello: Any = None
        """The kind and the incarnation of the opener, and the incarnation of the wanted process."""
        self.is_opener = False
        self.was_opened = False
        self._is_lost = False
        self.changed = self._changed

    @property
    def peer(self) -> MessageProcess:
        return self.other.process

    def send(self, message: Any) -> None:
        """Send a message; it is lost if the connection is broken, noticed or not."""
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
    """A process that is called for each message. A restart after a crash makes a new process."""

    def __init__(self, name: str, network: VirtualNetwork) -> None:
        super().__init__(network.world, name, name)
        self.network = network
        self._accepted: dict[VirtualProcess, MessageEnd] = {}
        network.listeners[name] = self

    @property
    def process(self) -> VirtualProcess:
        return self

    @property
    def own_time_s(self) -> float:
        return self.world.time_s + self.clock_offset_s

    def accept(self, connection: MessageEnd, hello: Any) -> bool:
        """Return whether to take a connection of another process."""
        raise NotImplementedError

    def opened(self, connection: MessageEnd) -> None:
        """Record a connection that this process has opened."""
        raise NotImplementedError

    def refused(self, hello: Any) -> None:
        raise NotImplementedError

    def closed(self, connection: MessageEnd) -> None:
        raise NotImplementedError

    def receive(self, connection: MessageEnd, message: Any) -> None:
        """Take a message."""
        raise NotImplementedError

    def connect(self, address: str, hello: Any) -> None:
        """Open a connection. Later :meth:`opened` or :meth:`refused` is called."""
        self.later(self.network.delay_s((self.host, address)), self._reach, address, hello)

    def _reach(self, address: str, hello: Any) -> None:
        try:
            target = self.network.reach(self.host, address)
        except Refused:
            target = None
        if target is not None and not target.is_paused:
            near, far = self.network.connect(self, target, MessageEnd)
            near.hello = far.hello = hello
            near.is_opener = True
            if target.admit(far):
                self.later(self.network.delay_s(near.path), self._open, near)
                return
            self.network.forget(near)
            self.network.forget(far)
        self.later(_RECONNECT_S, self.refused, hello)

    def admit(self, connection: MessageEnd) -> bool:
        """Take a connection, in the place of a former one of the same process; return False if it is refused."""
        if not self.accept(connection, connection.hello):
            return False
        former = self._accepted.get(connection.peer)
        self._accepted[connection.peer] = connection
        if former is not None and not former.is_closed:
            former.close()
            self.closed(former)
        return True

    def _open(self, connection: MessageEnd) -> None:
        if connection.is_open:
            connection.was_opened = True
            self.opened(connection)
