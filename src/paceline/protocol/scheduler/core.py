"""The scheduler's protocol: who is a member, which servers are each bucket's chain, and who takes over from whom.

A scheduler holds one :class:`SchedulerCore`, and so does each simulated one. Its runtime feeds it what members send,
what becomes of their connections and processes, and the clock, and does as the instructions bid. Parameters, gradients
and work never come here.

A scheduler begins by *forming* a cluster, of as many new servers as are expected, or, where members of one come to it
whose scheduler died, by *recovering* that. After that it is *leading*: it publishes a new view (:class:`View`) whenever
something changes. It ends when another one has taken over from it.

Source: one configuration manager beside replicated data as in PacificA (Lin et al. 2008), its state soft as in OSDI'14
"Scaling Distributed Machine Learning with the Parameter Server", section 4.4; views as in Viewstamped Replication
Revisited (Liskov and Cowling 2012).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from enum import Enum
from typing import Final

from paceline.errors import UsageError
from paceline.protocol.buckets import count
from paceline.protocol.chains import VERSION_GAP, Planner, lost_buckets
from paceline.protocol.membership import INCARNATION_RANGE, Member, Membership, Role
from paceline.protocol.placement import NUM_BUCKETS
from paceline.protocol.reachability import Reachability
from paceline.protocol.scheduler import events
from paceline.protocol.scheduler.events import Event, Instruction
from paceline.protocol.scheduler.publication import Committed, Proposed, Publication
from paceline.protocol.scheduler.recovery import Recovery, Returned
from paceline.protocol.scheduler.views import View, may_commit
from paceline.protocol.transitions import OUTSIDE, StateTable, Transition

HEARTBEATS_PER_TIMEOUT: Final = 10
"""How many signs of life a member gives within the time-out."""

MEMBER: Final = StateTable(
    "an incarnation of a node",
    ("live", "silent", "gone"),
    (
        Transition(OUTSIDE, "Register", OUTSIDE, "Refuse", when="rank taken or negative"),
        Transition(OUTSIDE, "form", OUTSIDE, "Refuse", when="the same"),
        Transition(OUTSIDE, "publish", OUTSIDE, "Refuse", when="the same"),
        Transition(OUTSIDE, "Register", "live"),
        Transition(OUTSIDE, "form", "live", when="it has registered before"),
        Transition(OUTSIDE, "publish", "live", when="it has registered while members were awaited"),
        Transition(OUTSIDE, "Rejoin", "live", when="no view tells of it"),
        Transition(OUTSIDE, "take over", "live", when="it is back"),
        Transition(OUTSIDE, "take over", "silent", when="an absent server"),
        Transition(OUTSIDE, "take over", "gone", when="absent"),
        Transition(OUTSIDE, "take over", "gone", "Expel", when="back, but not in the newest view"),
        Transition(OUTSIDE, "Rejoin", "gone", "Expel", when="not in the newest view"),
        Transition(OUTSIDE, "Leave", "gone", "Expel", when="while members are awaited"),
        Transition(OUTSIDE, "give up", "gone", "Expel"),
        Transition(OUTSIDE, "take over", "gone", "Release", when="not in the newest view, and was draining"),
        Transition(OUTSIDE, "Rejoin", "gone", "Release", when="the same"),
        Transition("live", "Register", "live"),
        Transition("live", "Rejoin", "live"),
        Transition("live", "Heartbeat", "live"),
        Transition("live", "welcome", "live", "Welcome", when="it is in the committed view"),
        Transition("live", "publish", "live", "Release", when="all servers drain"),
        Transition("live", "Clock", "silent", when="an overdue server"),
        Transition("live", "Doubted", "silent", when="a server"),
        Transition("live", "Clock", "gone", "Expel", when="overdue, and no server"),
        Transition("live", "Doubted", "gone", "Expel", when="no server"),
        Transition("live", "Ended", "gone", "Expel"),
        Transition("live", "publish", "gone", "Expel", when="cut off from others, or silent and in no chain"),
        Transition("live", "publish", "gone", "Release", when="it drains, and no chain needs it"),
        Transition("live", "Clock", "gone", when="not connected"),
        Transition("live", "Doubted", "gone", when="not connected"),
        Transition("live", "Ended", "gone", when="not connected"),
        Transition("live", "publish", "gone", when="not connected"),
        Transition("live", "Leave", "gone"),
        Transition("silent", "Register", "live"),
        Transition("silent", "Rejoin", "live"),
        Transition("silent", "Heartbeat", "live"),
        Transition("silent", "welcome", "silent", "Welcome", when="it is in the committed view"),
        Transition("silent", "publish", "silent", "Release", when="all servers drain"),
        Transition("silent", "Ended", "gone", "Expel"),
        Transition("silent", "publish", "gone", "Expel", when="no chain needs it"),
        Transition("silent", "publish", "gone", "Release", when="it drains, and no chain needs it"),
        Transition("silent", "Ended", "gone", when="not connected"),
        Transition("silent", "publish", "gone", when="not connected"),
        Transition("silent", "Leave", "gone"),
        Transition("gone", "take over", "silent", when="no view that is known tells that it is gone"),
        Transition("gone", "Heartbeat", "gone", "Expel"),
        Transition("gone", "Rejoin", "gone", "Expel"),
        Transition("gone", "Rejoin", "gone", "Release", when="it was draining"),
        Transition("gone", "Rejoin", "live", when="an observer"),
    ),
)
"""What becomes of those that register or come back; the instructions are those to themselves.

In lower case: what any event may bring about, because it was the last that was missing. The scheduler forms a cluster,
takes over, or gives up the cluster whose servers have all ended; it publishes a view; it welcomes those that are in it.
"""


class Phase(Enum):
    """What a scheduler is doing."""

    FORMING = "forming"
    """It waits for the servers that the cluster begins with."""
    RECOVERING = "recovering"
    """It waits for the members of a cluster whose scheduler died."""
    LEADING = "leading"
    SUPERSEDED = "superseded"
    """Another scheduler has taken over from it."""


class SchedulerCore:
    """One scheduler's state.

    Arguments: `num_servers`, how many servers the cluster begins with; `replicas`, how many of them may fail without
    loss; `heartbeat_timeout_s`, how long a member may be silent; `cluster`, a new cluster's name, which no other has;
    `salt`, a number that no other scheduler has; `replaces`, whether the members of a cluster are sure to come;
    `accepts_minority`, whether it takes over from whoever has come within the time-out, though too few have (safe only
    if those that are missing are dead).
    """

    def __init__(
        self,
        *,
        num_servers: int,
        replicas: int = 0,
        heartbeat_timeout_s: float = 10.0,
        cluster: str = "",
        salt: int = 0,
        replaces: bool = False,
        accepts_minority: bool = False,
        num_buckets: int = NUM_BUCKETS,
    ) -> None:
        self._num_servers = num_servers
        self._replicas = replicas
        self._timeout_s = heartbeat_timeout_s
        self._replaces = replaces
        self._accepts_minority = accepts_minority
        self.cluster = cluster
        """The cluster's name; another one after a take-over."""
        self.phase = Phase.RECOVERING if replaces else Phase.FORMING
        self.membership = Membership(num_servers, heartbeat_timeout_s)
        self.planner = Planner(num_buckets, replicas)
        self.reachability = Reachability(heartbeat_timeout_s / 2)
        self.needed: tuple[Member, ...] = ()
        """The servers without which it can do nothing: too many are silent, or absent when it is to take over."""
        self._publication = Publication(replicas, salt)
        self._recovery = Recovery()
        self._newcomers: dict[object, events.Register] = {}
        self._peers: dict[int, object] = {}  # incarnation → its connection
        self._incarnations: dict[object, int] = {}
        self._leaving: set[int] = set()  # servers that want to go when their buckets are elsewhere
        self._all_leave = False  # since the last that wanted to, while none died
        self._released: set[int] = set()  # where all are draining
        self._silent: dict[int, bool] = {}  # servers that are overdue → whether it was told that they are waited for
        self._cut_off: dict[int, str] = {}  # servers that are heard, and others do not reach; why they have to go
        self._former = ""  # the cluster that is to be taken over
        self._ended: set[int] = set()  # incarnations whose processes are known to have ended
        self._doubts: dict[int, str] = {}  # members that count as silent before they are overdue → why
        self._asked_term = 0  # while recovering: the term that is to be its own
        self._asked: set[object] = set()  # whom it has asked to promise that
        self._filled: list[tuple[int, int]] = []  # what was reported since the last commit: target, buckets
        # Incarnations that the scheduler before may have given, and no view tells of: who has one may still come.
        self._unknown = range(0)
        self._taken_over: events.TakenOver | None = None
        self._welcomes: list[tuple[object, Member]] = []
        self._published: frozenset[int] = frozenset()  # the members that are in the committed view
        self._has_changed = self._is_flushing = False
        self._now_s = 0.0
        self._last_s: float | None = None
        self._deadline_s = heartbeat_timeout_s
        self._out: list[Instruction] = []

    @property
    def heartbeat_s(self) -> float:
        """How often members give a sign of life."""
        return self._timeout_s / HEARTBEATS_PER_TIMEOUT

    @property
    def term(self) -> int:
        """The scheduler's term."""
        return self._publication.term

    @property
    def committed(self) -> View:
        """The view that members act on."""
        return self._publication.committed

    @property
    def newest(self) -> View:
        """The committed view with the members of now."""
        return replace(self.committed, members=self._members(), last_incarnation=self._last_incarnation)

    @property
    def _last_incarnation(self) -> int:
        """See :attr:`View.last_incarnation`."""
        return self._unknown.start - 1 if self._unknown else self.membership.last_incarnation

    @property
    def is_established(self) -> bool:
        """Whether a view of this scheduler's was committed."""
        return self._publication.is_established

    @property
    def num_waiting_servers(self) -> int:
        """How many of the servers that the cluster begins with have come, while it is forming."""
        return sum(each.role is Role.SERVER and not each.is_extra for each in self._newcomers.values())

    @property
    def awaited(self) -> tuple[Member, ...]:
        """The members that are not back, while it is recovering: whether they have ended is worth knowing."""
        return self._recovery.awaited(self._ended) if self.phase is Phase.RECOVERING else ()

    def incarnation_of(self, peer: object) -> int | None:
        """The incarnation of the member that speaks on a connection."""
        return self._incarnations.get(peer)

    def handle(self, event: Event, now_s: float) -> list[Instruction]:
        """Take one event; return what to do, in order.

        `now_s` is any clock: between two events no more counts than two heartbeats, so a clock that jumps, or a
        scheduler that was stopped, makes nobody overdue.
        """
        if self.phase is Phase.SUPERSEDED:
            return []
        self._pass_time(now_s)
        self._take(event)
        if self.phase is Phase.RECOVERING:
            self._recover()
        if self.phase in (Phase.FORMING, Phase.RECOVERING):
            self._form()
        while self._has_changed and self.phase is Phase.LEADING:
            self._publish()
        self._welcome()
        out, self._out = self._out, []
        return out

    def _pass_time(self, now_s: float) -> None:
        elapsed_s = 0.0 if self._last_s is None else max(now_s - self._last_s, 0.0)
        if elapsed_s > self._timeout_s / 4:  # it was asleep: what servers say of one another may be of before
            self.reachability = Reachability(self._timeout_s / 2)
        self._now_s += min(elapsed_s, 2 * self.heartbeat_s)
        self._last_s = now_s

    def _take(self, event: Event) -> None:
        match event:
            case events.Register():
                self._register(event)
            case events.Rejoin(returned):
                self._rejoin(returned)
            case events.Heartbeat(peer, unreachable):
                self._heartbeat(peer, unreachable)
            case events.Disconnected(peer):
                self._disconnected(peer)
            case events.Ended(incarnation):
                if self.phase is not Phase.LEADING or self.membership.find(incarnation) is not None:
                    self._ended.add(incarnation)
                self._remove([incarnation], events.PROCESS_ENDED)
            case events.Doubted(incarnation):
                if self.phase is Phase.RECOVERING or self.membership.find(incarnation) is not None:
                    self._doubts[incarnation] = "its connection broke, and nobody listens at its address any more"
                self.membership.doubt(incarnation)
                self._look_for_silent()
            case events.Leave(peer):
                self._leave(peer)
            case events.Drain(peer):
                self._recovery.drain(peer)
                self._drain(self._incarnations.get(peer))
            case events.Filled(version, target, buckets):
                # What was said of another view may not hold any more; of this one it is said again.
                if version == self.committed.version and self.phase is Phase.LEADING:
                    self._filled.append((target, buckets))
                    self._plan()
            case events.Prepared(peer, term, epoch):
                self._has_changed |= self._publication.prepared(self._incarnations.get(peer, 0), term, epoch)
            case events.Promised(peer, term):
                self._recovery.promise(peer, term)
            case events.Flush():
                self._is_flushing, self._has_changed = False, True
            case events.Clock():
                self._look_at_links()
                self._look_for_silent()
                if self._unknown and self._is_late:
                    self._unknown, self._has_changed = range(0), True

    # Members.

    def _register(self, event: events.Register) -> None:
        if not self.is_established:
            again = [peer for peer, each in self._newcomers.items() if each.node == event.node]
            for peer in again:
                del self._newcomers[peer]
            self._newcomers[event.peer] = event
            return
        is_known = self.membership.named(event.node) is not None
        try:
            if event.role is Role.SERVER and not (event.is_extra or is_known):
                self._check_room()
            member = self.membership.register(
                event.node, event.role, self._now_s, rank=event.rank, address=event.address, process=event.process
            )
        except UsageError as error:
            self._out.append(events.Refuse(event.peer, str(error)))
            return
        self._connect(event.peer, member)
        self._heard(member.incarnation)
        if member.role is Role.WORKER and not is_known:
            self._flush_soon()
        if member.role is Role.SERVER:
            if not self.planner.version and self.membership.ready:
                self.planner.start({each.incarnation: each.rank for each in self.membership.of(Role.SERVER)})
            self._plan()

    def _register_newcomers(self) -> None:
        """Take in who has waited: first those that ask for a rank, last the servers that no cluster begins with."""
        newcomers, self._newcomers = self._newcomers, {}
        for event in sorted(newcomers.values(), key=lambda each: (each.is_extra, each.rank is None)):
            self._register(event)

    def _flush_soon(self) -> None:
        """Publish a new worker, together with those that come in the next moment."""
        if not self._is_flushing:
            self._is_flushing = True
            self._out.append(events.FlushSoon())

    def _check_room(self) -> None:
        """Raise UsageError if the servers are all there that the cluster begins with."""
        if self.planner.version and self.membership.ready:
            raise UsageError(
                f"this cluster has its {self._num_servers} server(s): to add one while it runs, start it with "
                "'paceline server --join'"
            )

    def _connect(self, peer: object, member: Member) -> None:
        """Know a member by this connection from now on, and welcome it."""
        former = self._peers.get(member.incarnation)
        if former is not None:
            self._incarnations.pop(former, None)
        self._peers[member.incarnation] = peer
        self._incarnations[peer] = member.incarnation
        self._released.discard(member.incarnation)
        self._welcomes.append((peer, member))
        proposal = self._publication.proposal
        if proposal is not None and member.incarnation in proposal.audience:
            self._out.append(events.Prepare((peer,), proposal.view))

    def _rejoin(self, returned: Returned) -> None:
        if self.phase is not Phase.LEADING:
            if self._recovery.is_empty:
                self.phase, self._deadline_s = Phase.RECOVERING, self._now_s + self._timeout_s
            self._recovery.add(returned)
        elif returned.cluster != self.cluster:
            self._out.append(events.Foreign(returned.peer))
        elif (term := max(returned.view.term, returned.promised)) > self.term:
            self.phase = Phase.SUPERSEDED
            self._out.append(events.Superseded(term))
        else:
            self._welcome_back(returned)

    def _welcome_back(self, returned: Returned) -> None:
        incarnation = returned.member.incarnation
        member = self.membership.find(incarnation)
        if member is None:
            # One that is in no view joined just before the scheduler died, or is an observer.
            is_unknown = incarnation in self._unknown or returned.member.role is Role.OBSERVER
            member = self.membership.readmit(returned.member, self._now_s) if is_unknown else None
            if member is None:
                self._send_away(returned)
                return
            self._flush_soon()
        self._connect(returned.peer, member)
        self._heard(incarnation)
        if returned.is_leaving:
            self._drain(incarnation)

    def _send_away(self, returned: Returned) -> None:
        """Tell one that was removed that it was: a server that wanted to leave may."""
        if returned.is_leaving and returned.member.role is Role.SERVER:
            self._out.append(events.Release(returned.peer))
        else:
            self._out.append(events.Expel(returned.peer, "it was not heard from in time"))

    def _heartbeat(self, peer: object, unreachable: tuple[int, ...]) -> None:
        incarnation = self._incarnations.get(peer)
        if incarnation is None:
            return
        member = self.membership.find(incarnation)
        if member is None:
            self._out.append(events.Expel(peer, "it was silent too long"))
            return
        self._heard(incarnation)
        if member.role is Role.SERVER:
            self.reachability.heard(incarnation, unreachable, self._now_s)

    def _heard(self, incarnation: int) -> None:
        self.membership.heard(incarnation, self._now_s)
        self._doubts.pop(incarnation, None)
        was_told = self._silent.pop(incarnation, None)
        if was_told is not None:
            self._plan()
        if was_told and (member := self.membership.find(incarnation)) is not None:
            self._out.append(events.Note(f"server {member.rank} is back: it is heard again"))

    def _disconnected(self, peer: object) -> None:
        self._newcomers.pop(peer, None)
        self._recovery.forget(peer)
        if self.phase is Phase.RECOVERING and self._recovery.is_empty and not self._replaces:
            self._forget_former()
            self.phase = Phase.FORMING
        incarnation = self._incarnations.pop(peer, None)
        if incarnation is not None and self._peers.get(incarnation) is peer:
            del self._peers[incarnation]

    def _leave(self, peer: object) -> None:
        incarnation = self._incarnations.get(peer)
        if incarnation is not None:
            self._ended.add(incarnation)  # its process ends, and can be asked for nothing
            self._remove([incarnation], None)
        cluster, returned = self._recovery.cluster, self._recovery.forget(peer)
        if returned is not None:
            if returned.cluster == cluster:
                self._ended.add(returned.member.incarnation)
            self._out.append(events.Expel(peer, "it has left"))
        self._newcomers.pop(peer, None)

    def _drain(self, incarnation: int | None) -> None:
        member = None if incarnation is None else self.membership.find(incarnation)
        if member is not None and member.role is Role.SERVER:
            self._leaving.add(member.incarnation)
            self._all_leave = {each.incarnation for each in self.membership.of(Role.SERVER)} <= self._leaving
            self._plan()

    def _remove(self, incarnations: Iterable[int], reason: str | None) -> None:
        """Remove members: dead for a reason, or by their own wish."""
        removed = [member for each in incarnations if (member := self.membership.remove(each)) is not None]
        for member in removed:
            peer = self._peers.pop(member.incarnation, None)
            if peer is not None and reason is not None:
                self._out.append(events.Expel(peer, reason))
            if self._taken_over is None:
                self._out.append(events.Removed(member, reason))
            else:
                self._taken_over = self._taken_over.without(member)
            for known in (self._leaving, self._released):
                known.discard(member.incarnation)
            self._silent.pop(member.incarnation, None)
            self._cut_off.pop(member.incarnation, None)
            self._doubts.pop(member.incarnation, None)
            if member.incarnation > self._last_incarnation:
                self._unknown = range(0)  # views must say that it is gone, and say so of all up to it
            self._has_changed = True
        if any(member.role is Role.SERVER for member in removed):
            self._plan()

    # Silence.

    def _look_for_silent(self) -> None:
        """Do without members that are overdue."""
        if self.phase is not Phase.LEADING:
            return
        overdue = self.membership.overdue(self._now_s)
        for each in overdue:
            if each.role is not Role.SERVER:
                self._remove([each.incarnation], self._silence(each.incarnation))
        silent = {each.incarnation for each in overdue if each.role is Role.SERVER}
        heard = {each.incarnation for each in self.membership.of(Role.SERVER)} - silent
        voters = self.committed.voters
        if not silent - self._silent.keys():
            if self.needed:
                self._out.append(events.Note("hears enough of the servers that have buckets again, and goes on"))
            self.needed = ()
        elif may_commit(voters, self._ended, heard, self._replicas):
            self._silent = {**dict.fromkeys(silent, False), **self._silent}
            self._plan()
        else:
            self._need(tuple(each for each in overdue if each.incarnation in voters), "to go on without them")

    def _silence(self, incarnation: int) -> str:
        """Why a member that is not heard is given up."""
        return self._doubts.get(incarnation, f"nothing was heard from it for {self._timeout_s:g} s")

    def _look_at_links(self) -> None:
        """Find a server that others cannot reach, though the scheduler hears all of them."""
        if not self.is_established:
            return
        ranks = {each.incarnation: each.rank for each in self.membership.of(Role.SERVER)}
        living = ranks.keys() - self._cut_off.keys()
        cut_off = self.reachability.decide(living, self.planner.groups, self._now_s)
        if cut_off is not None:
            others = " and ".join(f"server {ranks[other]}" for other in cut_off.others)
            reason = f"it and {others} could not reach each other for {self._timeout_s:g} s, though all of them live"
            self._cut_off[cut_off.server] = reason
            self._plan()

    def _need(self, servers: tuple[Member, ...], aim: str) -> None:
        """Wait for these servers, and say so."""
        if servers == self.needed:
            return
        self.needed = servers
        names = " and ".join(f"server {each.rank} ({each.node})" for each in servers)
        advice = "If these are dead, start the scheduler again with --accept-minority"
        if self._accepts_minority and self.phase is Phase.RECOVERING:
            advice = "One of them has to be back, --accept-minority or not; if all are dead, start a new cluster"
        self._out.append(
            events.Note(f"waits for {names}: too few of the servers that have buckets are heard {aim}. {advice}")
        )

    # Views.

    def _plan(self) -> None:
        """Have the chains follow the servers that live, from the committed ones on."""
        self._has_changed = True
        if not self.committed.version:
            return
        doubtful = self._silent.keys() | self._cut_off.keys()
        servers = {each.incarnation: each.rank for each in self.membership.of(Role.SERVER)}
        # A doubtful server that is filled is a member only of chains that have no other: the view waits for it.
        alone = sum(group.buckets for group in self.committed.groups if servers.keys().isdisjoint(group.members))
        filled = [(target, buckets & alone if target in doubtful else buckets) for target, buckets in self._filled]
        self.planner.restore(self.committed.groups, filled)
        self.planner.servers_changed(servers, self._leaving, doubtful)

    def _departing(self) -> dict[int, str | None]:
        """Return the servers that no chain needs any more, and the reason of those that do not leave as they wish.

        One that is silent, and has what nobody else has, stays, however long: nothing would be gained without it.
        """
        reasons: dict[int, str | None] = dict.fromkeys(self._leaving)
        reasons.update({each: self._silence(each) for each in self._silent})
        reasons.update(self._cut_off)
        needed = {each for group in self.planner.groups for each in (*group.members, group.filling)}
        return {server: reason for server, reason in reasons.items() if server not in needed}

    def _publish(self) -> None:
        """Prepare, or commit, the view that there is to be now."""
        self._has_changed = False
        departing = self._departing()
        servers = (each for each in self.membership.of(Role.SERVER) if each.incarnation not in departing)
        wanted = View(
            version=self.planner.version,
            members=(*servers, *self.membership.of(Role.WORKER)),
            groups=self.planner.groups,
            last_incarnation=self._last_incarnation,
        )
        released = departing.keys() & self._leaving
        match self._publication.offer(wanted, released=released, ended=self._ended):
            case Committed(view, former):
                self._commit(view, former, departing)
            case Proposed(proposal):
                peers = tuple(self._peers[each] for each in sorted(proposal.audience) if each in self._peers)
                self._out.append(events.Prepare(peers, proposal.view))
                self._has_changed = proposal.is_accepted(self._ended)  # where nobody has to be asked
        if self._publication.proposal is not None:
            self._note_silent(self._publication.proposal.gaining)
        self._release_all()

    def _commit(self, view: View, former: View, departing: dict[int, str | None]) -> None:
        if view.version != former.version:
            self._filled = []
        self._ended &= view.servers.keys()
        self._published = frozenset(member.incarnation for member in view.members)
        self._out.append(events.Publish(view))
        lost = lost_buckets(view.groups) & ~lost_buckets(former.groups)
        if lost:
            self._out.append(events.Lost(lost))
        for server, reason in departing.items():
            if reason is None and server in self._peers:
                self._out.append(events.Release(self._peers[server]))
            self._remove([server], reason)
        self._note_silent(self._silent)
        self._register_newcomers()
        self._has_changed = True  # what has changed meanwhile has waited

    def _members(self) -> tuple[Member, ...]:
        return (*self.membership.of(Role.SERVER), *self.membership.of(Role.WORKER))

    def _note_silent(self, servers: Iterable[int]) -> None:
        """Say once of each of these servers that is silent that it is waited for."""
        for server in servers:
            member = self.membership.find(server)
            if member is None or self._silent.get(server, True):
                continue
            self._silent[server] = True
            num_buckets = count(self.planner.member_of(server))
            self._out.append(
                events.Note(
                    f"server {member.rank} is silent, and nobody else has {num_buckets} of its buckets: requests for "
                    "those wait until it is back"
                )
            )

    def _welcome(self) -> None:
        """Welcome those that are in the committed view: should this scheduler die, others know of them."""
        if not self.is_established:
            return
        if self._taken_over is not None:
            self._out.append(self._taken_over)
            self._taken_over = None
        waiting, self._welcomes = self._welcomes, []
        for peer, member in waiting:
            if self.membership.find(member.incarnation) is None:
                continue
            if member.role is Role.OBSERVER or member.incarnation in self._published:
                self._out.append(events.Welcome(peer, member))
            else:
                self._welcomes.append((peer, member))

    def _release_all(self) -> None:
        """Release all servers if all wanted to go: nobody is left to relieve them.

        Not those that are left alone since the others died: with them would go what nobody else has.
        """
        servers = {each.incarnation for each in self.membership.of(Role.SERVER)}
        self._all_leave = self._all_leave and servers <= self._leaving
        for each in sorted(servers - self._released) if self._all_leave else ():
            if each in self._peers:
                self._released.add(each)
                self._out.append(events.Release(self._peers[each]))

    # Beginnings.

    @property
    def _is_late(self) -> bool:
        return self._now_s >= self._deadline_s

    def _form(self) -> None:
        """Begin a new cluster when the servers that it needs are there, and no other one comes back."""
        # A server of another cluster has what nobody else may have: it is waited for.
        has_servers = any(each.member.role is Role.SERVER for each in self._recovery.all())
        may_form = self.phase is Phase.FORMING or (self._is_late and not has_servers)
        if not may_form or not self._newcomers or self.num_waiting_servers < self._num_servers:
            return
        for returned in self._recovery.all():
            self._out.append(events.Foreign(returned.peer))
        self._forget_former()
        self.phase, self._publication.is_established = Phase.LEADING, True
        self._register_newcomers()
        self._has_changed = True

    def _forget_former(self) -> None:
        """Forget the cluster that was to be taken over: a new one gives the same incarnations to others."""
        self._recovery, self._former, self._replaces = Recovery(), "", False
        self._ended, self._doubts, self.needed = set(), {}, ()

    def _recover(self) -> None:
        """Take over when the members that are needed are back."""
        recovery, latest = self._recovery, self._recovery.latest_view()
        if recovery.cluster not in ("", self._former):
            if self._former:  # of two that come here the other has more: its incarnations are others
                self._ended, self._doubts = set(), {}
            self._former = recovery.cluster
        if recovery.is_empty:
            if self._is_late:  # nobody is left: this scheduler's cluster is new
                self._forget_former()
                self.phase = Phase.FORMING
            return
        # Members that register again never heard their welcome: they have prepared no view and hold no bucket.
        named = {each.node for each in self._newcomers.values()}
        unheard = {member.incarnation for member in latest.members if member.node in named}
        without = self._ended | unheard
        is_complete = self._is_late or recovery.is_complete(without | self._doubts.keys())
        has_quorum, missing = recovery.has_quorum(without, self._replicas), set[int]()
        if self._accepts_minority and self._is_late and not has_quorum and recovery.has_voter:
            # Whoever runs the cluster says that those that are missing are dead; without one that is back all is lost.
            missing = set(recovery.absent_voters(without))
            has_quorum, without = True, without | missing
        if latest.voters and latest.voters <= self._ended:
            if is_complete:
                self._give_up(recovery)
        elif has_quorum:
            if is_complete and self._has_promises(recovery, without):
                self._ended |= missing
                self._take_over(recovery, latest, unheard - self._ended)
        elif self._is_late:
            self._need(recovery.missing_voters(without), "to take over from the scheduler before")

    def _has_promises(self, recovery: Recovery, without: Collection[int]) -> bool:
        """Whether enough servers prepare nothing of a former scheduler any more; ask those that have not said so.

        Else one that has come here, and goes back to a former one that lives, could prepare a view there.
        """
        if recovery.highest_term > self._asked_term:
            self._asked_term, self._asked = self._publication.term_after(recovery.highest_term), set()
        servers = [each.peer for each in recovery.ours() if each.member.role is Role.SERVER]
        peers = tuple(peer for peer in servers if peer not in self._asked)
        if peers:
            self._asked.update(peers)
            self._out.append(events.Promise(peers, self._asked_term))
        return recovery.has_quorum(without, self._replicas, promised=self._asked_term)

    def _give_up(self, recovery: Recovery) -> None:
        """Send away the members of a cluster whose servers have all ended; the next one is new."""
        self._out.append(events.Note("all servers of the former cluster have ended: its members are sent away"))
        for each in recovery.ours():
            self._out.append(events.Expel(each.peer, "the servers of its cluster are gone"))
        for each in recovery.others():
            self._out.append(events.Foreign(each.peer))
        self._forget_former()
        self.phase = Phase.FORMING

    def _take_over(self, recovery: Recovery, latest: View, unheard: Collection[int]) -> None:
        """Go on from the newest view; `unheard` are members that never heard their welcome."""
        ours = recovery.ours()
        returned = [each for each in ours if recovery.is_member(each) and each.member.incarnation not in self._ended]
        for each in recovery.others():
            self._out.append(events.Foreign(each.peer))
        self.phase, self.cluster = Phase.LEADING, ours[0].cluster
        self._recovery, self._doubts, self.needed = Recovery(), {}, ()
        self._publication.take_over(latest, self._asked_term)
        known = {member.incarnation: member for member in latest.members if member.incarnation not in self._ended}
        present = {each.member.incarnation: each.member for each in returned}
        present.update((each, known[each]) for each in unheard)
        self._leaving = {each.member.incarnation for each in returned if each.is_leaving} & latest.servers.keys()
        # Where some are missing they may have died, though they did not want to leave: what is left is not given up.
        self._all_leave = latest.servers.keys() <= self._leaving and len(latest.servers) >= self._num_servers
        self._rebuild(present, {each: m for each, m in known.items() if each not in present and m.role is Role.SERVER})
        back = []
        for each in ours:
            if each in returned and (member := self._find_or_readmit(each.member)) is not None:
                back.append(each)
                self._connect(each.peer, member)
            else:
                self._send_away(each)
        for peer, event in list(self._newcomers.items()):
            member = self.membership.named(event.node)
            if member is not None:
                del self._newcomers[peer]
                self._connect(peer, member)
        dead = tuple(member for member in latest.members if self.membership.find(member.incarnation) is None)
        self._taken_over = events.TakenOver(tuple(back), dead)
        self._has_changed = True

    def _find_or_readmit(self, member: Member) -> Member | None:
        return self.membership.find(member.incarnation) or self.membership.readmit(member, self._now_s)

    def _rebuild(self, present: dict[int, Member], absent: dict[int, Member]) -> None:
        """Rebuild members and chains from the newest view. Servers that are absent are silent."""
        latest = self.committed
        first = max(latest.last_incarnation + 1, self._publication.epoch * INCARNATION_RANGE)
        self._unknown, self._deadline_s = range(latest.last_incarnation + 1, first), self._now_s + self._timeout_s
        self.membership = Membership.rebuild(
            [*present.values(), *absent.values()],
            first,
            expected_servers=self._num_servers,
            now_s=self._now_s,
            heartbeat_timeout_s=self._timeout_s,
        )
        self._silent = dict.fromkeys(absent, False)
        for each in absent:
            self._doubts[each] = "it has not come to the scheduler that took over"
            self.membership.doubt(each)
        if latest.version:
            servers = {each.incarnation: each.rank for each in self.membership.of(Role.SERVER)}
            version = latest.version + VERSION_GAP
            self.planner, _ = Planner.rebuild(
                latest.groups, version, servers, self._replicas, self._leaving, self._silent
            )

    def validate(self) -> None:
        """Assert the invariants."""
        self.membership.validate()
        self.planner.validate()
        servers = {each.incarnation for each in self.membership.of(Role.SERVER)}
        assert self._silent.keys() | self._cut_off.keys() <= servers, "a doubtful server that is no member"
        assert self._leaving <= {*servers, *self._ended}, "a draining server that is no member"
        assert all(self._incarnations.get(peer) == each for each, peer in self._peers.items())
        proposal = self._publication.proposal
        assert proposal is None or proposal.committed is self.committed
        assert not self.is_established or self.phase in (Phase.LEADING, Phase.SUPERSEDED)
