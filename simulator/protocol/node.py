"""Members of a protocol run: registration, heartbeats, views, requests about jobs. They have no rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from typing_extensions import override

from paceline.protocol.membership import Member, Role
from paceline.protocol.scheduler import HEARTBEATS_PER_TIMEOUT, KnownViews, View, events, messages
from simulator.network import VirtualNetwork
from simulator.oracle import Oracle
from simulator.protocol.connections import MessageEnd, MessageProcess
from simulator.protocol.job_requests import JobRequests
from simulator.protocol.links import ServerLinks
from simulator.protocol.messages import Reply, Welcomed
from simulator.settings import RunSettings

SCHEDULER: Final = "scheduler"
"""The address at which the scheduler listens, whichever that is."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The parts of a cluster that its nodes use."""

    network: VirtualNetwork
    oracle: Oracle
    settings: RunSettings


class SimulatedNode(MessageProcess):
    """A process that registers at the scheduler, sends heartbeats and takes views."""

    def __init__(self, name: str, around: Surroundings, role: Role, *, is_extra: bool = False) -> None:
        super().__init__(name, around.network)
        self.settings = around.settings
        self.oracle = around.oracle
        self.role: Role = role
        self.is_extra = is_extra
        self.member: Member | None = None
        self.views = KnownViews()
        self.scheduler: MessageEnd | None = None
        self.is_leaving = False
        self.jobs = JobRequests(self.send_to_scheduler, lambda: self.own_now_s)
        self.links = ServerLinks(self, role.value, self.address)
        self._cluster_name = ""
        self.later(0.0, self._connect)
        self._heartbeat_s = around.settings.heartbeat_timeout_s / HEARTBEATS_PER_TIMEOUT
        self.later(self._heartbeat_s * (0.5 + self.world.random.random()), self._beat)

    @property
    def incarnation(self) -> int:
        """The incarnation; 0 before the welcome."""
        return 0 if self.member is None else self.member.incarnation

    # The parts of subclasses.

    def welcomed(self) -> None:
        """Begin, as a member."""

    def view_changed(self, view: View) -> None:
        """Take a newer view."""

    def attached(self, scheduler: MessageEnd) -> None:
        """Repeat to the scheduler the messages that it may lack."""

    def unreachable(self) -> tuple[int, ...]:
        """Return the servers that this node cannot reach, for a heartbeat."""
        return ()

    def link_changed(self, server: int, *, is_up: bool) -> None:
        """Take note of a new link to a server, or of its break."""

    def receive_from_peer(self, connection: MessageEnd, message: Any) -> None:
        """Take a message of a worker or server."""

    # Connections.

    def address(self, incarnation: int) -> str | None:
        """Return the name of a member's process."""
        for member in () if self.views.committed is None else self.views.committed.members:
            if member.incarnation == incarnation:
                return str(member.address)
        return None

    @override
    def accept(self, connection: MessageEnd, hello: Any) -> bool:
        return False

    @override
    def opened(self, connection: MessageEnd) -> None:
        if connection.hello[0] == "node":
            self.scheduler = connection
            self._introduce(connection)
        elif self.links.opened(connection):
            self.link_changed(connection.hello[2], is_up=True)

    @override
    def refused(self, hello: Any) -> None:
        if hello[0] == "node":
            self._connect()
        else:
            self.links.refused(hello[2])

    @override
    def closed(self, connection: MessageEnd) -> None:
        if connection.hello[0] == "node":
            self.scheduler = None
            self._connect()
            return
        if self.links.closed(connection):
            self.link_changed(connection.hello[2], is_up=False)
        self.links.connect()

    @override
    def receive(self, connection: MessageEnd, message: Any) -> None:
        if connection.hello[0] != "node":
            self.receive_from_peer(connection, message)
        elif connection is self.scheduler:
            self._receive_from_scheduler(connection, message)

    # The scheduler.

    def send_to_scheduler(self, message: Any) -> None:
        """Send a message to the scheduler; it is lost if there is no connection."""
        if self.scheduler is not None:
            self.scheduler.send(message)

    def report(self, message: events.MemberMessage) -> None:
        """Send a message about this member; it is lost if there is no connection."""
        if self.scheduler is not None:
            self.scheduler.send(events.MessageReceived(self.scheduler.other, message))

    def _connect(self) -> None:
        self.connect(SCHEDULER, ("node", 0, 0))

    def _introduce(self, scheduler: MessageEnd) -> None:
        """Register, or rejoin with all that a new scheduler has to know."""
        if self.member is None:
            name = self.name
            self.report(messages.Register(node=name, role=self.role, address=name, is_extra=self.is_extra))
            return
        newest, former = self.views.newest, self.views.former
        assert newest is not None
        job = self.jobs.disconnected()
        rejoin = messages.Rejoin(
            member=self.member, cluster=self._cluster_name, view=newest, promised=self.views.promised,
            has_committed=self.views.is_committed, is_leaving=self.is_leaving, job=job,
            former=former.members if former else (),
        )  # fmt: skip
        self.report(rejoin)
        self.attached(scheduler)

    def _beat(self) -> None:
        if self.member is not None:
            self.report(messages.Heartbeat(unreachable=self.unreachable()))
        self.later(self._heartbeat_s, self._beat)

    def _receive_from_scheduler(self, scheduler: MessageEnd, message: Any) -> None:
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
                    self.report(messages.Prepared(view.term, view.epoch))
            case events.RequestPromise(_, term):
                if self.views.promise(term):
                    self.report(messages.Promised(term))
            case events.Expel() | events.Reject() | events.ReleaseServer():  # this incarnation may not come back
                self.kill()

    def take(self, view: View) -> None:
        """Take a committed view, from any process."""
        if not self.views.commit(view):
            return
        if view.version:
            self.oracle.mapped(view.version, view.groups, self.name)
        if self.member is None:
            return
        if self.role is not Role.OBSERVER and view.excludes(self.incarnation):
            self.kill()
        else:
            self.view_changed(view)
