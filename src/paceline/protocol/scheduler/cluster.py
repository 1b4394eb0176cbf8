"""The decisions about one cluster: its members, the chains of its buckets, and take-overs.

A scheduler begins by *forming* a cluster, of as many new servers as are expected, or, if members of a cluster come to
it whose scheduler died, by *recovering* that (:class:`~paceline.protocol.scheduler.recovery.Recovery`). After that it
is *leading* (:class:`~paceline.protocol.scheduler.leading.Leader`): it publishes a new view (:class:`View`) whenever
something changes. It ends when another scheduler has taken over.
"""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from paceline.protocol.chains import Planner
from paceline.protocol.membership import Member, Membership, Role
from paceline.protocol.placement import NUM_BUCKETS
from paceline.protocol.scheduler import events
from paceline.protocol.scheduler.departures import Suspects
from paceline.protocol.scheduler.events import Event, Instruction, MessageReceived
from paceline.protocol.scheduler.leading import Leader
from paceline.protocol.scheduler.members import Newcomers
from paceline.protocol.scheduler.messages import Drain, Leave, Promised, Register, Rejoin
from paceline.protocol.scheduler.next_view import NextView
from paceline.protocol.scheduler.phases import Phase
from paceline.protocol.scheduler.publication import Publication
from paceline.protocol.scheduler.recovery import Abandoned, Recovery, Succession
from paceline.protocol.scheduler.views import View

HEARTBEATS_PER_TIMEOUT: Final = 10
"""How many signs of life a member gives within the time-out."""


class ClusterCore:
    """One scheduler's cluster.

    Arguments: `num_servers`, how many servers the cluster begins with; `replicas`, how many of them may fail without
    loss; `heartbeat_timeout_s`, how long a member may be silent; `name`, a new cluster's name, which no other has;
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
        name: str = "",
        salt: int = 0,
        replaces: bool = False,
        accepts_minority: bool = False,
        num_buckets: int = NUM_BUCKETS,
    ) -> None:
        self.name = name
        """The cluster's name; another one after a take-over."""
        self.phase = Phase.RECOVERING if replaces else Phase.FORMING
        self.heartbeat_s = heartbeat_timeout_s / HEARTBEATS_PER_TIMEOUT
        """How often members give a sign of life."""
        self._timeout_s = heartbeat_timeout_s
        self._recovery = Recovery(
            replicas=replicas,
            timeout_s=heartbeat_timeout_s,
            salt=salt,
            replaces=replaces,
            accepts_minority=accepts_minority,
        )
        following = NextView(Planner(num_buckets, replicas), Publication(replicas, salt), heartbeat_timeout_s)
        self._leader = Leader(Membership(num_servers, heartbeat_timeout_s), following)
        self._now_s = 0.0
        self._last_s: float | None = None

    @property
    def membership(self) -> Membership:
        """The members."""
        return self._leader.membership

    @property
    def planner(self) -> Planner:
        """The chains that there are to be."""
        return self._leader.next.planner

    @property
    def term(self) -> int:
        """The scheduler's term."""
        return self._leader.publication.term

    @property
    def committed(self) -> View:
        """The view that members act on."""
        return self._leader.publication.committed

    @property
    def newest(self) -> View:
        """The committed view with the members of now."""
        members = (*self.membership.of(Role.SERVER), *self.membership.of(Role.WORKER))
        return replace(
            self.committed,
            members=members,
            last_incarnation=self.membership.last_incarnation,
            num_waiting=self.newcomers.num_servers,
        )

    @property
    def is_established(self) -> bool:
        """Whether a view of this scheduler's was committed."""
        return self._leader.publication.is_established

    @property
    def newcomers(self) -> Newcomers:
        """The processes that have registered and wait until there is a cluster."""
        return self._leader.newcomers

    @property
    def awaited(self) -> tuple[Member, ...]:
        """The members that are not back, while it is recovering: whether they have ended is worth knowing."""
        return self._recovery.awaited() if self.phase is Phase.RECOVERING else ()

    @property
    def suspects(self) -> Suspects:
        """The members that may live, though they are not heard or not reached."""
        return self._leader.next.suspects

    @property
    def needed(self) -> tuple[Member, ...]:
        """The servers without which it can do nothing: too many are silent, or absent when it is to take over."""
        return self._recovery.needed or self.suspects.needed

    def incarnation_of(self, peer: object) -> int | None:
        """The incarnation of the member that speaks on a connection."""
        return self._leader.peers.incarnation_of(peer)

    def handle(self, event: Event, now_s: float) -> list[Instruction]:
        """Take one event; return what to do, in order.

        `now_s` is any clock: between two events no more counts than two heartbeats, so a clock that jumps, or a
        scheduler that was stopped, makes nobody overdue.
        """
        self._pass_time(now_s)
        match self.phase, event:
            case Phase.SUPERSEDED, _:
                return []
            case Phase.LEADING, MessageReceived(peer, Rejoin(cluster=cluster)) if cluster != self.name:
                return [events.Foreign(peer)]
            case Phase.LEADING, MessageReceived(_, Rejoin(highest_term=term)) if term > self.term:
                self.phase = self.phase.after("Rejoin")
                return [events.Superseded(term)]
            case Phase.LEADING, _:
                return self._leader.handle(event, self._now_s)
        out = self._await(event)
        if self.phase is Phase.RECOVERING:
            out += self._recover()
        if self.phase is not Phase.LEADING:
            out += self._form()
        return out

    def _pass_time(self, now_s: float) -> None:
        elapsed_s = 0.0 if self._last_s is None else max(now_s - self._last_s, 0.0)
        if elapsed_s > self._timeout_s / 4:  # it was asleep: what servers say of one another may be of before
            self.suspects.forget_reports()
        self._now_s += min(elapsed_s, 2 * self.heartbeat_s)
        self._last_s = now_s

    def _await(self, event: Event) -> list[Instruction]:
        """Take an event before there is a cluster."""
        newcomers, recovery = self.newcomers, self._recovery
        match event:
            case MessageReceived(peer, Register() as registration):
                newcomers.add(peer, registration)
            case MessageReceived(peer, Rejoin() as rejoin):
                if self.phase is Phase.FORMING:
                    self.phase = self.phase.after("Rejoin")
                recovery.add(peer, rejoin, self._now_s)
            case events.Disconnected(peer):
                newcomers.forget(peer)
                recovery.forget(peer)
            case MessageReceived(peer, Leave()):
                newcomers.forget(peer)
                return recovery.leave(peer)
            case MessageReceived(peer, Drain()):
                recovery.drain(peer)
            case MessageReceived(peer, Promised(term)):
                recovery.promise(peer, term)
            case events.ProcessEnded(incarnation):
                recovery.ended(incarnation)
            case events.Doubted(incarnation) if self.phase is Phase.RECOVERING:
                recovery.doubt(incarnation)
            case _:
                pass
        return []

    def _recover(self) -> list[Instruction]:
        """Take over when the members that are needed are back."""
        out: list[Instruction] = []
        for each in self._recovery.decide(self.newcomers.nodes, self._now_s):
            match each:
                case Succession():
                    self.phase, self.name = self.phase.after("take over"), each.cluster
                    out += self._leader.take_over(each, self._now_s)
                    self._recovery.reset()
                case Abandoned():
                    self.phase = self.phase.after("give up")
                    self._recovery.reset()
                case _:
                    out.append(each)
        return out

    def _form(self) -> list[Instruction]:
        """Begin a new cluster when the servers that it needs are there, and no other one comes back."""
        may_form = self.phase is Phase.FORMING or self._recovery.is_hopeless(self._now_s)
        newcomers = self.newcomers
        if not may_form or not newcomers.nodes or newcomers.num_servers < self.membership.expected_servers:
            return []
        out: list[Instruction] = [*self._recovery.reject_all()]
        self._recovery.reset()
        self.phase = self.phase.after("form")
        return out + self._leader.form(self._now_s)

    def validate(self) -> None:
        """Assert the invariants."""
        self._leader.validate()
        assert not self.is_established or self.phase in (Phase.LEADING, Phase.SUPERSEDED)
