"""What servers and workers have in common: they are members of a cluster, and know its newest view."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from typing_extensions import override

from paceline.protocol.membership import Member, Role
from paceline.protocol.scheduler import HEARTBEATS_PER_TIMEOUT, KnownViews, View
from simulator.line import Line
from simulator.messages import (
    Beat,
    Map,
    NewsFrame,
    PreparedView,
    PrepareView,
    PromiseTerm,
    RegisterNode,
    RejoinFrame,
    Reply,
    Thrown,
    Welcomed,
)
from simulator.network import SimulatedConnection, SimulatedProcess
from simulator.server_links import ServerLinks

if TYPE_CHECKING:
    from simulator.cluster import Cluster

SCHEDULER: Final = "scheduler"
"""The address at which the scheduler listens, whichever that is."""
TIMEOUT_S: Final = 1.0
HEARTBEAT_S: Final = TIMEOUT_S / HEARTBEATS_PER_TIMEOUT


class SimulatedNode(SimulatedProcess):
    """A process that registers at the scheduler, sends heartbeats and takes views."""

    def __init__(self, host: str, name: str, cluster: Cluster, *, role: Role, is_extra: bool = False) -> None:
        super().__init__(name, cluster.network)
        self.host = host
        self.cluster = cluster
        self.role = role
        self.is_extra = is_extra
        self.member: Member | None = None
        self.cluster_name = ""
        self.views: KnownViews[View] = KnownViews()
        self.scheduler: SimulatedConnection | None = None
        self.is_leaving = False
        self.line = Line(self)
        self.links = ServerLinks(self, role.value, self.address)
        self.handlers: dict[type, Callable[[SimulatedConnection, Any], None]] = {
            Reply: self.line.on_reply,
            NewsFrame: self.line.on_news,
            **dict.fromkeys((Welcomed, Thrown, Map, PrepareView, PromiseTerm), self._hear),
        }
        """What a process does with each kind of frame."""
        self.later(0.0, self._connect)
        self.later(HEARTBEAT_S * (0.5 + cluster.random.random()), self._beat)

    @property
    def incarnation(self) -> int:
        """The incarnation; 0 before the welcome."""
        return 0 if self.member is None else self.member.incarnation

    @property
    def map(self) -> View | None:
        """The newest committed view."""
        return self.views.committed

    # What subclasses do.

    def welcomed(self) -> None:
        """Begin, as a member."""
        raise NotImplementedError

    def mapped(self, former: View | None, new: View) -> None:
        """Take a view that is newer than the one before."""
        raise NotImplementedError

    def attached(self) -> None:
        """Say to the scheduler (again) what it may not know."""
        raise NotImplementedError

    def unreachable(self) -> tuple[int, ...]:
        """Look whom this node cannot reach, for a heartbeat."""
        return ()

    def link_changed(self, server: int, *, is_up: bool) -> None:
        """Note that there is a link to a server, or that it broke."""
        raise NotImplementedError

    def address(self, incarnation: int) -> str | None:
        """The name of the process of a member."""
        for member in () if self.map is None else self.map.members:
            if member.incarnation == incarnation:
                return str(member.address)
        return None

    def tell(self, frame: Any) -> None:
        """Send a frame to the scheduler; it is lost if there is no connection."""
        if self.scheduler is not None:
            self.scheduler.send(self, frame)

    # Connections.

    @override
    def accept(self, connection: SimulatedConnection, hello: Any) -> bool:
        return False

    @override
    def opened(self, connection: SimulatedConnection) -> None:
        if connection.hello[0] == "node":
            self.scheduler = connection
            self._introduce(connection)
        elif self.links.opened(connection):
            self.link_changed(connection.hello[2], is_up=True)

    @override
    def refused(self, name: str, hello: Any) -> None:
        if hello[0] == "node":
            self._connect()
        else:
            self.links.refused(hello[2])

    @override
    def closed(self, connection: SimulatedConnection) -> None:
        if connection.hello[0] == "node":
            self.scheduler = None
            self._connect()
            return
        if self.links.closed(connection):
            self.link_changed(connection.hello[2], is_up=False)
        self.links.connect()

    @override
    def receive(self, connection: SimulatedConnection, frame: Any) -> None:
        if connection.hello[0] != "node" or connection is self.scheduler:  # of schedulers, only the newest
            self.handlers[type(frame)](connection, frame)

    # The scheduler.

    def _connect(self) -> None:
        self.network.connect(self, self.cluster.find_scheduler(), ("node", 0, 0))

    def _introduce(self, connection: SimulatedConnection) -> None:
        """Register, or say who this is."""
        if self.member is None:
            connection.send(self, RegisterNode(self.role, self.is_extra))
            return
        newest = self.views.newest
        assert newest is not None
        connection.send(
            self,
            RejoinFrame(
                self.member,
                self.cluster_name,
                newest,
                self.views.promised,
                self.views.is_committed,
                () if self.views.former is None else self.views.former.members,
                self.is_leaving,
                self.line.rejoins(),
            ),
        )
        self.attached()

    def _beat(self) -> None:
        if self.member is not None:
            self.tell(Beat(self.incarnation, self.unreachable()))
        self.later(HEARTBEAT_S, self._beat)

    def _hear(self, connection: SimulatedConnection, frame: Any) -> None:
        match frame:
            case Welcomed(member, cluster, view, received):
                if self.member is None:
                    self.member, self.cluster_name, self.links.incarnation = member, cluster, member.incarnation
                    self.welcomed()
                self.line.welcomed(self.incarnation, received)
                self.take(view)
            case Map(view):
                self.take(view)
            case PrepareView(view):
                if self.views.prepare(view):
                    connection.send(self, PreparedView(view.term, view.epoch))
            case PromiseTerm(term):
                if self.views.promise(term):
                    connection.send(self, frame)
            case Thrown():  # this incarnation is dead, and may not come back
                self.cluster.ended(self)

    def take(self, view: View) -> None:
        """Take a view, from whomever."""
        former = self.map
        if not self.views.commit(view):
            return
        if view.version:
            self.cluster.oracle.mapped(view.version, view.groups, self.name)
        if self.member is None:
            return
        if self.role is not Role.OBSERVER and view.excludes(self.incarnation):
            self.cluster.ended(self)
        else:
            self.mapped(former, view)
