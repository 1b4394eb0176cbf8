"""A scheduler that leads its cluster: it adds and removes members, and publishes a view after each change."""

from __future__ import annotations

from typing import Final

from paceline.errors import UsageError
from paceline.protocol.chains import Planner
from paceline.protocol.membership import INCARNATION_RANGE, Member, Membership, Role
from paceline.protocol.scheduler import events
from paceline.protocol.scheduler.events import Event, Instruction, MessageReceived
from paceline.protocol.scheduler.members import MemberPeers, Newcomers
from paceline.protocol.scheduler.messages import Drain, Filled, Heartbeat, Leave, Prepared, Register, Rejoin
from paceline.protocol.scheduler.next_view import NextView
from paceline.protocol.scheduler.publication import Committed, Proposed
from paceline.protocol.scheduler.recovery import Succession
from paceline.protocol.scheduler.views import View

_PROBABLY_ENDED: Final = "its connection broke, and its host refuses connections to its address"


class Leader:
    """The cluster of one scheduler. The cluster starts with :meth:`form` or :meth:`take_over`."""

    def __init__(self, membership: Membership, following: NextView) -> None:
        self.membership = membership
        self.next = following
        self.publication = following.publication
        self.newcomers = Newcomers()
        self.peers = MemberPeers()
        self._taken_over: events.TakenOver | None = None
        self._connected: list[tuple[object, Member]] = []  # members that connected during this event
        self._welcomes: list[tuple[object, Member]] = []  # new members, until a view with them is committed
        self._removed: list[events.Removed] = []  # removed members, until a view without them is committed
        self._has_changed = self._is_flushing = False
        self._time_s = 0.0
        self._out: list[Instruction] = []

    def form(self, time_s: float) -> list[Instruction]:
        self._time_s, self._has_changed = time_s, True
        self.publication.form(self.newcomers.highest_term)
        for peer, registration in self.newcomers.take():
            self._register(peer, registration)
        return self._finish()

    def take_over(self, succession: Succession, time_s: float) -> list[Instruction]:
        self._time_s, self._has_changed = time_s, True
        latest, present, absent = succession.evidence.latest, succession.present(), succession.absent()
        self.publication.take_over(latest, succession.term)
        self.membership = Membership.rebuild(
            [*present, *absent],
            max(latest.last_incarnation + 1, self.publication.epoch * INCARNATION_RANGE),
            expected_servers=self.membership.expected_servers,
            time_s=time_s,
            heartbeat_timeout_s=self.membership.heartbeat_timeout_s,
            last_known=latest.last_incarnation,
        )
        for server in absent:
            self.membership.suspect(server.incarnation)
        self.next.take_over(succession, self.membership)
        back = []
        for peer, rejoin in succession.evidence.by_peer.items():
            member = None
            if succession.goes_on(rejoin):
                member = self.membership.find(rejoin.member.incarnation)
                member = member or self.membership.readmit(rejoin.member, time_s)
            if member is None:
                self._out.append(_dismiss(peer, rejoin))
            else:
                back.append((peer, rejoin))
                self._connect(peer, member)
        for peer, registration in self.newcomers.take_nodes({member.node for member in self.membership.members}):
            member = self.membership.named(registration.node)
            assert member is not None
            self._connect(peer, member)
        dead = tuple(member for member in latest.members if self.membership.find(member.incarnation) is None)
        self._taken_over = events.TakenOver(tuple(back), dead)
        return self._finish()

    def handle(self, event: Event, time_s: float) -> list[Instruction]:
        self._time_s = time_s
        match event:
            case MessageReceived(peer, Register() as registration):
                self._register(peer, registration)
            case MessageReceived(peer, Rejoin() as rejoin):
                self._rejoin(peer, rejoin)
            case MessageReceived(peer, Heartbeat(unreachable=unreachable)):
                self._heartbeat(peer, unreachable)
            case events.Disconnected(peer):
                self.newcomers.forget(peer)
                self.peers.disconnect(peer)
            case events.ProcessEnded(incarnation):
                self._ended(incarnation, events.PROCESS_ENDED)
            case MessageReceived(peer, Leave()):
                self.newcomers.forget(peer)
                # The process ends, so the next view needs no answer from this member.
                self._ended(self.peers.incarnation_of(peer), None)
            case events.Suspected(incarnation):
                if self.membership.suspect(incarnation):
                    self.next.suspects.suspect(incarnation, _PROBABLY_ENDED)
                self._handle_silent()
            case MessageReceived(peer, Drain()):
                self._drain(self.peers.incarnation_of(peer))
            case MessageReceived(_, Filled() as filled):
                if self.next.filled(filled.version, filled.target, filled.buckets):
                    self._flush_soon()
            case MessageReceived(peer, Prepared(term, epoch)):
                if self.publication.prepared(self.peers.incarnation_of(peer) or 0, term, epoch):
                    proposal = self.publication.proposal
                    self._has_changed |= proposal is not None and proposal.is_accepted(self.next.ended)
            case events.Flush():
                self._is_flushing, self._has_changed = False, True
                if self.next.has_fills:
                    self._plan()
            case events.TimePassed():
                ranks, groups = self.membership.servers, self.next.planner.groups
                if self.publication.is_established and self.next.suspects.suspect_unreachable(ranks, groups, time_s):
                    self._plan()
                self._handle_silent()
                self._has_changed |= self.membership.expire_unknown(time_s)
            case _:  # the message Promised needs no action after a takeover
                pass
        return self._finish()

    def _register(self, peer: object, registration: Register) -> None:
        if not self.publication.is_established:
            self.newcomers.add(peer, registration)
            return
        is_known = self.membership.named(registration.node) is not None
        try:
            if registration.role is Role.SERVER and not (registration.is_extra or is_known):
                _check_room(self.membership, self.next.planner)
            member = self.membership.register(
                registration.node,
                registration.role,
                self._time_s,
                rank=registration.rank,
                address=registration.address,
                process=registration.process,
            )
        except UsageError as error:
            self._out.append(events.Reject(peer, str(error)))
            return
        self._connect(peer, member)
        self._record_heartbeat(member.incarnation)
        if member.role is Role.WORKER and not is_known:
            self._flush_soon()
        if member.role is Role.SERVER:
            if not self.next.planner.version and self.membership.ready:
                self.next.planner.start(self.membership.servers)
            self._plan()

    def _flush_soon(self) -> None:
        """Publish a new worker or a filled replica after a short delay, together with other changes in this time."""
        if not self._is_flushing:
            self._is_flushing = True
            self._out.append(events.FlushSoon())

    def _connect(self, peer: object, member: Member) -> None:
        self.peers.connect(member.incarnation, peer)
        self.next.drains.connected(member.incarnation)
        self._connected.append((peer, member))
        proposal = self.publication.proposal
        if proposal is not None and member.incarnation in proposal.audience:
            self._out.append(events.Prepare((peer,), proposal.view))

    def _rejoin(self, peer: object, returned: Rejoin) -> None:
        incarnation = returned.member.incarnation
        member = self.membership.find(incarnation)
        if member is None:
            # A process that is in no view is an observer, or registered just before the scheduler died. A worker that
            # has had shards is not readmitted, because its shards were reassigned and would count twice.
            is_new = self.membership.is_unknown(incarnation) and not returned.has_worked
            if is_new or returned.member.role is Role.OBSERVER:
                member = self.membership.readmit(returned.member, self._time_s)
            if member is None:
                self._out.append(_dismiss(peer, returned))
                return
            self._flush_soon()
        self._connect(peer, member)
        self._record_heartbeat(incarnation)
        if returned.is_leaving:
            self._drain(incarnation)

    def _heartbeat(self, peer: object, unreachable: tuple[int, ...]) -> None:
        incarnation = self.peers.incarnation_of(peer)
        if incarnation is None:
            return
        member = self.membership.find(incarnation)
        if member is None:
            self._out.append(events.DeclareDead(peer, "it was silent too long"))
            return
        self._record_heartbeat(incarnation)
        if member.role is Role.SERVER:
            self.next.suspects.report(incarnation, unreachable, self._time_s)

    def _record_heartbeat(self, incarnation: int) -> None:
        self.membership.record_heartbeat(incarnation, self._time_s)
        is_reported = self.next.suspects.record_heartbeat(incarnation)
        if is_reported is not None:
            self._plan()
        if is_reported and (member := self.membership.find(incarnation)) is not None:
            self._out.append(events.NotifyOperator(f"server {member.rank} is back: it sends heartbeats again"))

    def _drain(self, incarnation: int | None) -> None:
        servers = self.membership.servers
        if incarnation is not None and incarnation in servers:
            self.next.drains.add(incarnation, servers)
            self._plan()

    def _ended(self, incarnation: int | None, reason: str | None) -> None:
        if incarnation is not None and self.membership.find(incarnation) is not None:
            self.next.ended.add(incarnation)
            self._remove(incarnation, reason)

    def _remove(self, incarnation: int, reason: str | None) -> None:
        """Remove a member that is dead for this `reason`, or that leaves (`reason` is None)."""
        member = self.membership.remove(incarnation)
        if member is None:
            return
        peer = self.peers.remove(incarnation)
        if peer is not None and reason is not None:
            self._out.append(events.DeclareDead(peer, reason))
        if self._taken_over is not None:
            self._taken_over = self._taken_over.without(member)
        elif member.role is Role.WORKER and incarnation in self.publication.incarnations:
            # The removal is reported when a view without this member is committed.
            self._removed.append(events.Removed(member, reason))
        else:
            self._out.append(events.Removed(member, reason))
        self.next.removed(incarnation)
        self._has_changed = True
        if member.role is Role.SERVER:
            self._plan()

    def _handle_silent(self) -> None:
        """Remove overdue workers and observers, and suspect overdue servers if enough other servers remain."""
        suspects = self.next.suspects
        overdue = self.membership.overdue(self._time_s)
        for member in overdue:
            if member.role is not Role.SERVER:
                self._remove(member.incarnation, suspects.reason(member.incarnation))
        silent = {member.incarnation: member for member in overdue if member.role is Role.SERVER}
        responsive = self.membership.servers.keys() - silent.keys()
        if silent.keys() <= suspects.silent:
            self._out += suspects.wait_no_more()
        elif self.publication.may_follow(responsive, self.next.ended):
            suspects.fall_silent(silent)
            self._plan()
        else:
            voters = self.publication.committed.voters
            self._out += suspects.wait_for(tuple(member for server, member in silent.items() if server in voters))

    def _plan(self) -> None:
        self._has_changed = True
        self.next.plan(self.membership.servers)

    def _publish(self) -> None:
        self._has_changed = False
        departing = self.next.departing()
        match self.next.offer(self.membership, departing):
            case Committed(view, former):
                self._commit(view, former, departing)
            case Proposed(proposal):
                self._out.append(events.Prepare(self.peers.of(sorted(proposal.audience)), proposal.view))
                self._has_changed = proposal.is_accepted(self.next.ended)  # true if the view needs no answers
        self._out += self.next.notes(self.membership)
        released = self.next.drains.release_all(self.membership.servers, self.peers.connected)
        self._out += [events.ReleaseServer(peer) for peer in self.peers.of(released)]

    def _commit(self, view: View, former: View, departing: dict[int, str | None]) -> None:
        self._out += self.next.committed(view, former)
        self._connected, self._welcomes = [*self._welcomes, *self._connected], []
        # A removed worker's leases are reassigned only after the commit. Before the commit, another scheduler may take
        # over from a view in which the worker is still a member.
        members = self.publication.incarnations
        self._out += [removed for removed in self._removed if removed.member.incarnation not in members]
        self._removed = [removed for removed in self._removed if removed.member.incarnation in members]
        for server, reason in departing.items():
            if reason is None:
                self._out += [events.ReleaseServer(peer) for peer in self.peers.of([server])]
            self._remove(server, reason)
        for peer, registration in self.newcomers.take():
            self._register(peer, registration)
        self._has_changed = True  # publish the changes that came during the preparation

    def _finish(self) -> list[Instruction]:
        while self._has_changed:
            self._publish()
        if self.publication.is_established:
            if self._taken_over is not None:
                self._out.append(self._taken_over)
                self._taken_over = None
            self._welcome()
        out, self._out = self._out, []
        return out

    def _welcome(self) -> None:
        connected, self._connected = self._connected, []
        for peer, member in connected:
            if self.membership.find(member.incarnation) is None:
                continue
            if member.role is Role.OBSERVER or member.incarnation in self.publication.incarnations:
                self._out.append(events.Admit(peer, member))
            else:
                self._welcomes.append((peer, member))

    def validate(self) -> None:
        self.membership.validate()
        self.next.validate(self.membership.servers)
        self.peers.validate()


def _check_room(membership: Membership, planner: Planner) -> None:
    if planner.version and membership.ready:
        raise UsageError(
            f"this cluster has its {membership.expected_servers} server(s): to add one while it runs, start it with "
            "'paceline server --join'"
        )


def _dismiss(peer: object, returned: Rejoin) -> Instruction:
    """Release a server that wanted to leave; declare any other process dead, because it is not readmitted."""
    if returned.is_leaving and returned.member.role is Role.SERVER:
        return events.ReleaseServer(peer)
    return events.DeclareDead(peer, "it did not reconnect in time")
