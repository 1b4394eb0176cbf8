"""What servers and workers have in common: they are members of a cluster, and know its newest view."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from paceline.protocol.membership import Member, Role
from paceline.protocol.scheduler import HEARTBEATS_PER_TIMEOUT, KnownViews, View
from paceline.simulation.line import Line
from paceline.simulation.messages import (
    Beat,
    Map,
    PreparedView,
    PrepareView,
    PromiseTerm,
    RegisterNode,
    Rejoin,
    Thrown,
    Welcomed,
)
from paceline.simulation.network import Connection, Process

if TYPE_CHECKING:
    from paceline.simulation.cluster import Cluster

SCHEDULER: Final = "scheduler"
"""The address at which the scheduler listens, whichever that is."""
TIMEOUT_S: Final = 1.0
HEARTBEAT_S: Final = TIMEOUT_S / HEARTBEATS_PER_TIMEOUT


class Node(Process):
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
        self.scheduler: Connection | None = None
        self.is_leaving = False
        self.line = Line(self)
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

    def is_gone(self, incarnation: int) -> bool:
        """Whether that incarnation is no member any more, as far as the view says."""
        return self.map is not None and self.map.excludes(incarnation)

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

    # The scheduler's connection.

    def _connect(self) -> None:
        self.network.connect(self, self.cluster.find_scheduler(), ("node", 0, 0))

    def scheduler_opened(self, connection: Connection) -> None:
        """Register, or say who this is."""
        self.scheduler = connection
        if self.member is None:
            connection.send(self, RegisterNode(self.role, self.is_extra))
            return
        newest = self.views.newest
        assert newest is not None
        connection.send(
            self,
            Rejoin(
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

    def is_current(self, connection: Connection) -> bool:
        """Whether a frame of this connection is taken: of the scheduler, only what comes on the newest."""
        return connection.hello[0] != "node" or connection is self.scheduler

    def scheduler_closed(self) -> None:
        """Connect again."""
        self.scheduler = None
        self._connect()

    def _beat(self) -> None:
        if self.member is not None:
            self.tell(Beat(self.incarnation, self.unreachable()))
        self.later(HEARTBEAT_S, self._beat)

    def on_welcomed(self, _: Connection, frame: Welcomed) -> None:
        """Take the welcome."""
        if self.member is None:
            self.member, self.cluster_name = frame.member, frame.cluster
            self.welcomed()
        self.line.welcomed(self.incarnation, frame.received)
        self.take(frame.view)

    def on_thrown(self, _: Connection, __: Thrown) -> None:
        """Stop: this incarnation is dead, and may not come back."""
        self.cluster.ended(self)

    def on_prepare(self, connection: Connection, frame: PrepareView) -> None:
        """Keep a view that the next scheduler has to hear of, should this one die."""
        if self.views.prepare(frame.view):
            connection.send(self, PreparedView(frame.view.term, frame.view.epoch))

    def on_promise(self, connection: Connection, frame: PromiseTerm) -> None:
        """Promise to prepare nothing of a scheduler before this one."""
        if self.views.promise(frame.term):
            connection.send(self, frame)

    def on_map(self, _: Connection, frame: Map) -> None:
        """Take what the scheduler has published."""
        self.take(frame.view)

    def take(self, view: View) -> None:
        """Take a view, from whomever."""
        former = self.map
        if not self.views.commit(view):
            return
        if view.version:
            self.cluster.oracle.mapped(view.version, view.groups, self.name)
        if self.member is not None and self.role is not Role.OBSERVER and self.is_gone(self.incarnation):
            self.cluster.ended(self)
            return
        if self.member is not None:
            self.mapped(former, view)
