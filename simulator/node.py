"""Members of a protocol run: registration, heartbeats, views, requests about jobs. They have no rules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from typing_extensions import override

from paceline.protocol.membership import Member, Role
from paceline.protocol.scheduler import HEARTBEATS_PER_TIMEOUT, KnownViews, Returned, View, events
from simulator.job_requests import JobRequests
from simulator.messages import Reply, Welcomed
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
        self.views: KnownViews[View] = KnownViews()
        self.scheduler: SimulatedConnection | None = None
        self.is_leaving = False
        self.jobs = JobRequests(self.send_to_scheduler, lambda: self.own_now_s)
        self.links = ServerLinks(self, role.value, self.address)
        self._cluster_name = ""
        self.later(0.0, self._connect)
        self.later(HEARTBEAT_S * (0.5 + cluster.random.random()), self._beat)

    @property
    def incarnation(self) -> int:
        """The incarnation; 0 before the welcome."""
        return 0 if self.member is None else self.member.incarnation

    # The parts of subclasses.

    def welcomed(self) -> None:
        """Begin, as a member."""

    def view_changed(self, view: View) -> None:
        """Take a newer view."""

    def attached(self, scheduler: SimulatedConnection) -> None:
        """Repeat to the scheduler the messages that it may lack."""

    def unreachable(self) -> tuple[int, ...]:
        """Return the servers that this node cannot reach, for a heartbeat."""
        return ()

    def link_changed(self, server: int, *, is_up: bool) -> None:
        """Take note of a new link to a server, or of its break."""

    def receive_from_peer(self, connection: SimulatedConnection, message: Any) -> None:
        """Take a message of a worker or server."""

    # Connections.

    def address(self, incarnation: int) -> str | None:
        """Return the name of a member's process."""
        for member in () if self.views.committed is None else self.views.committed.members:
            if member.incarnation == incarnation:
                return str(member.address)
        return None

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
        if connection.hello[0] != "node":
            self.receive_from_peer(connection, frame)
        elif connection is self.scheduler:  # of schedulers, only the newest
            self._receive_from_scheduler(connection, frame)

    # The scheduler.

    def send_to_scheduler(self, message: Any) -> None:
        """Send a message to the scheduler; it is lost if there is no connection."""
        if self.scheduler is not None:
            self.scheduler.send(self, message)

    def _connect(self) -> None:
        self.network.connect(self, self.cluster.find_scheduler(), ("node", 0, 0))

    def _introduce(self, scheduler: SimulatedConnection) -> None:
        """Register, or rejoin with all that a new scheduler has to know."""
        if self.member is None:
            scheduler.send(
                self,
                events.MemberRegistering(scheduler, self.name, self.role, address=self.name, is_extra=self.is_extra),
            )
            return
        newest, former = self.views.newest, self.views.former
        assert newest is not None
        job = self.jobs.disconnected()
        returned = Returned(
            scheduler, self.member, self._cluster_name, newest, self.views.promised, self.views.is_committed,
            self.is_leaving, job=job.number if job else 0, has_posted=job is not None and job.posted is not None,
            has_worked=job is not None and job.has_worked, former=former.members if former else (), knowledge=job,
        )  # fmt: skip
        scheduler.send(self, events.MemberRejoining(returned))
        self.attached(scheduler)

    def _beat(self) -> None:
        if self.member is not None:
            self.send_to_scheduler(events.HeartbeatReceived(self.scheduler, self.unreachable()))
        self.later(HEARTBEAT_S, self._beat)

    def _receive_from_scheduler(self, scheduler: SimulatedConnection, message: Any) -> None:
        match message:
            case Reply():
                self.jobs.take_reply(message)
            case Welcomed(member, cluster, view, received):
                if self.member is None:
                    self.member, self._cluster_name, self.links.incarnation = member, cluster, member.incarnation
                    self.welcomed()
                self.jobs.welcomed(member.incarnation, received)
                self.take(view)
            case events.Publish(view):
                self.take(view)
            case events.Prepare(_, view):
                if self.views.prepare(view):
                    scheduler.send(self, events.ViewPrepared(scheduler, view.term, view.epoch))
            case events.RequestPromise(_, term):
                if self.views.promise(term):
                    scheduler.send(self, events.TermPromised(scheduler, term))
            case events.Expel() | events.Reject() | events.ReleaseServer():  # this incarnation may not come back
                self.cluster.ended(self)

    def take(self, view: View) -> None:
        """Take a committed view, from any process."""
        if not self.views.commit(view):
            return
        if view.version:
            self.cluster.oracle.mapped(view.version, view.groups, self.name)
        if self.member is None:
            return
        if self.role is not Role.OBSERVER and view.excludes(self.incarnation):
            self.cluster.ended(self)
        else:
            self.view_changed(view)
