"""The decisions about one cluster: its members, the chains of its buckets, and takeovers.

A scheduler begins by *forming* a cluster of the expected number of new servers, or by *recovering* the cluster of a
dead scheduler (:class:`~paceline.protocol.scheduler.recovery.Recovery`). After that it is *leading*
(:class:`~paceline.protocol.scheduler.leading.Leader`) until another scheduler takes over: it publishes a new view
(:class:`View`) at every change.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from msgspec.structs import replace

from paceline.protocol.chains import Planner
from paceline.protocol.membership import Member, Membership, Role
from paceline.protocol.own_time import OwnTime
from paceline.protocol.placement import NUM_BUCKETS
from paceline.protocol.scheduler import events
from paceline.protocol.scheduler.events import Event, Instruction, MessageReceived
from paceline.protocol.scheduler.leading import Leader
from paceline.protocol.scheduler.members import Newcomers
from paceline.protocol.scheduler.messages import Drain, Heartbeat, Leave, Promised, Register, Rejoin
from paceline.protocol.scheduler.next_view import NextView, Suspects
from paceline.protocol.scheduler.publication import Publication
from paceline.protocol.scheduler.recovery import Abandoned, Recovery, Succession
from paceline.protocol.scheduler.views import View
from paceline.protocol.transitions import OUTSIDE, StateTable, Transition


class Phase(Enum):
    """The phase of a scheduler."""

    FORMING = "forming"
    """The scheduler waits for the first servers of the cluster."""
    RECOVERING = "recovering"
    """The scheduler waits for the members of a cluster whose scheduler died."""
    LEADING = "leading"
    SUPERSEDED = "superseded"
    """Another scheduler has taken over the cluster of this scheduler."""

    def after(self, event: str) -> Phase:
        return Phase(PHASE.target(self.value, event))


PHASE: Final = StateTable(
    "a scheduler",
    tuple(phase.value for phase in Phase),
    (
        Transition(OUTSIDE, "start", "forming"),
        Transition(OUTSIDE, "start", "recovering", when="it replaces another one"),
        Transition("forming", "Rejoin", "recovering"),
        Transition("forming", "form", "leading", when="its first servers have registered"),
        Transition("recovering", "form", "leading", when="the same, and no server has rejoined in time"),
        Transition(
            "recovering", "give up", "forming", when="no member is back, or all servers with buckets have ended"
        ),
        Transition("recovering", "take over", "leading", "TakenOver", when="a quorum is back"),
        Transition("leading", "Rejoin", "superseded", "Superseded", when="of a later term"),
    ),
)
"""The phases. Names in lower case are conditions, which may become true at any event."""


HEARTBEATS_PER_TIMEOUT: Final = 10


class ClusterCore:
    """One scheduler's cluster.

    The cluster starts with `num_servers` servers; `replicas` servers may fail without loss. A member is overdue after
    `heartbeat_timeout_s` of silence. `name` is unique to a new cluster, `salt` to this scheduler. With `replaces`,
    members of a former scheduler's cluster will rejoin. With `accepts_minority`, this scheduler takes over after the
    timeout even if too few members are back, which is safe only if the missing members are dead.
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
        """The name of the cluster; it changes with a takeover."""
        self.phase = Phase.RECOVERING if replaces else Phase.FORMING
        self.heartbeat_s = heartbeat_timeout_s / HEARTBEATS_PER_TIMEOUT
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
        self._is_flushing = False  # whether a recovering scheduler has requested a Flush
        self._time = OwnTime(2 * self.heartbeat_s)

    @property
    def membership(self) -> Membership:
        return self._leader.membership

    @property
    def term(self) -> int:
        return self._leader.publication.term

    @property
    def committed(self) -> View:
        return self._leader.publication.committed

    @property
    def newest(self) -> View:
        """The committed view with the current members."""
        members = (*self.membership.of(Role.SERVER), *self.membership.of(Role.WORKER))
        return replace(
            self.committed,
            members=members,
            last_incarnation=self.membership.last_incarnation,
            num_waiting=self.newcomers.num_servers,
        )

    @property
    def is_established(self) -> bool:
        return self._leader.publication.is_established

    @property
    def newcomers(self) -> Newcomers:
        return self._leader.newcomers

    @property
    def missing_members(self) -> tuple[Member, ...]:
        """While recovering, the members that have not rejoined. Their processes may have ended."""
        return self._recovery.missing_members() if self.phase is Phase.RECOVERING else ()

    @property
    def suspects(self) -> Suspects:
        return self._leader.next.suspects

    @property
    def needed(self) -> tuple[Member, ...]:
        """The silent or absent servers without which the scheduler cannot continue."""
        return self._recovery.needed or self.suspects.needed

    def incarnation_of(self, peer: object) -> int | None:
        return self._leader.peers.incarnation_of(peer)

    def handle(self, event: Event, time_s: float) -> list[Instruction]:
        """Handle one event; return the instructions, in order.

        `time_s` is the time by any clock. The time between two events counts as at most two heartbeat intervals. So
        neither a jump of the clock nor a pause of the scheduler makes members overdue.
        """
        self._pass_time(time_s)
        match self.phase, event:
            case Phase.SUPERSEDED, _:
                return []
            case Phase.LEADING, MessageReceived(peer, Rejoin(cluster=cluster)) if cluster != self.name:
                return [events.SendElsewhere(peer)]
            case Phase.LEADING, MessageReceived(_, Rejoin(highest_term=term)) if term > self.term:
                self.phase = self.phase.after("Rejoin")
                return [events.Superseded(term)]
            case Phase.FORMING | Phase.RECOVERING, MessageReceived(_, Heartbeat()):
                return []
            case Phase.LEADING, _:
                return self._leader.handle(event, self._time.now_s)
        out = self._await(event)
        if self.phase is Phase.RECOVERING:
            if not isinstance(event, (events.Flush, events.TimePassed)):
                return out + self._flush_soon()
            out += self._recover()
        if self.phase is not Phase.LEADING:
            out += self._form()
        return out

    def _pass_time(self, time_s: float) -> None:
        if self._time.read(time_s) > self._timeout_s / 4:  # this process was stopped, so reports may be old
            self.suspects.forget_reports()

    def _await(self, event: Event) -> list[Instruction]:
        newcomers, recovery = self.newcomers, self._recovery
        match event:
            case MessageReceived(peer, Register() as registration):
                newcomers.add(peer, registration)
            case MessageReceived(peer, Rejoin() as rejoin):
                if self.phase is Phase.FORMING:
                    self.phase = self.phase.after("Rejoin")
                recovery.add(peer, rejoin, self._time.now_s)
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
            case events.Flush():
                self._is_flushing = False
            case events.ProcessEnded(incarnation):
                recovery.ended(incarnation)
            case events.Suspected(incarnation) if self.phase is Phase.RECOVERING:
                recovery.suspect(incarnation)
            case _:
                pass
        return []

    def _flush_soon(self) -> list[Instruction]:
        """Decide about all messages of a short time together, because each decision considers all members."""
        is_flushing, self._is_flushing = self._is_flushing, True
        return [] if is_flushing else [events.FlushSoon()]

    def _recover(self) -> list[Instruction]:
        out: list[Instruction] = []
        for outcome in self._recovery.decide(self.newcomers.nodes, self._time.now_s, self.newcomers.highest_term):
            match outcome:
                case Succession():
                    self.phase, self.name = self.phase.after("take over"), outcome.cluster
                    out += self._leader.take_over(outcome, self._time.now_s)
                    self._recovery.reset()
                case Abandoned():
                    self.phase = self.phase.after("give up")
                    self._recovery.reset()
                case _:
                    out.append(outcome)
        return out

    def _form(self) -> list[Instruction]:
        """Start a new cluster when its servers have registered and no member of another cluster rejoins."""
        may_form = self.phase is Phase.FORMING or self._recovery.is_hopeless(self._time.now_s)
        newcomers = self.newcomers
        if not may_form or not newcomers.nodes or newcomers.num_servers < self.membership.expected_servers:
            return []
        out: list[Instruction] = [*self._recovery.reject_all()]
        self._recovery.reset()
        self.phase = self.phase.after("form")
        return out + self._leader.form(self._time.now_s)

    def validate(self) -> None:
        self._leader.validate()
        assert not self.is_established or self.phase in (Phase.LEADING, Phase.SUPERSEDED)
