"""The scheduler's protocol: members, views and their chains, takeovers, sessions and jobs.

The scheduler stores no parameters, gradients or tables.

Source: one configuration manager for replicated data as in PacificA (Lin et al. 2008); a state that members can restore
as in OSDI'14 "Scaling Distributed Machine Learning with the Parameter Server", section 4.4; views as in Viewstamped
Replication Revisited (Liskov and Cowling 2012).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from msgspec.structs import replace

from paceline.errors import PacelineError, PeerError, ProtocolError, UsageError
from paceline.protocol.jobs import JobCore, RejoinedMember
from paceline.protocol.jobs.messages import Answer, CountersReceived, JobNews, JobRequest, ReceivedRequest
from paceline.protocol.membership import Member, Role
from paceline.protocol.placement import NUM_BUCKETS
from paceline.protocol.scheduler import events
from paceline.protocol.scheduler.cluster import ClusterCore, Phase
from paceline.protocol.scheduler.events import Event, Instruction, MessageReceived, SendMessage
from paceline.protocol.scheduler.messages import (
    CommitView,
    Drain,
    Elsewhere,
    EndCluster,
    Ended,
    Expelled,
    Filled,
    GetSettings,
    GetView,
    Heartbeat,
    Leave,
    Prepared,
    PrepareView,
    Promise,
    Promised,
    Register,
    Rejoin,
    SchedulerSettings,
    Welcome,
)
from paceline.protocol.scheduler.numbered_messages import MessageNumbers
from paceline.protocol.scheduler.sessions import PendingCall, Session, Sessions
from paceline.protocol.scheduler.views import View, ViewChange


class SentViews:
    """The last view that was sent on each connection. Workers receive no view if only workers changed."""

    def __init__(self) -> None:
        self._for_workers = View(is_partial=True)
        self._sent: dict[object, View] = {}  # the last committed view that was sent
        self._prepared: dict[object, View] = {}  # the last view that was sent to be prepared
        # The changes between two views, by the ids of the two objects. Many members receive the same change.
        self._changes: dict[tuple[int, int], tuple[View, View, PrepareView]] = {}

    def forget(self, peer: object) -> None:
        self._sent.pop(peer, None)
        self._prepared.pop(peer, None)

    def welcome(self, peer: object, role: Role, committed: View) -> View:
        view = self._sent[peer] = self._for_workers if role is Role.WORKER else committed
        return view

    def prepare(self, peer: object, view: View) -> PrepareView:
        sent = self._sent.get(peer)
        self._prepared[peer] = view
        return PrepareView(view) if sent is None else self._change(sent, view)

    def _change(self, base: View, view: View) -> PrepareView:
        key = id(base), id(view)
        if key not in self._changes:
            self._changes[key] = base, view, PrepareView(ViewChange.between(base, view))
        return self._changes[key][2]

    def commit(self, view: View) -> None:
        self._changes = {}
        partial = view.without_workers()
        if partial.term != self._for_workers.term or not partial.same_servers(self._for_workers):
            self._for_workers = partial

    def publish(self, peer: object, view: View) -> CommitView | ViewChange | None:
        """Return the message that gives a member the committed view; None if the member already has this view."""
        sent = self._sent.get(peer)
        if sent is None or sent is self._for_workers or sent.order >= view.order:
            return None
        new = self._sent[peer] = self._for_workers if sent.is_partial else view
        if self._prepared.get(peer) is view:
            return CommitView(view.term, view.epoch)
        change = self._change(sent, new).view
        assert isinstance(change, ViewChange)
        return change


_MAY_DIFFER: Final = ("cluster", "heartbeat_timeout_s")
"""The settings that may differ between a scheduler and its predecessor."""


class SchedulerCore:
    """The state of one scheduler.

    The `options` are the parameters of :class:`~paceline.protocol.scheduler.cluster.ClusterCore`.
    """

    def __init__(self, settings: SchedulerSettings, **options: Any) -> None:
        self.settings = settings
        """The settings that each member receives. A takeover changes `settings.cluster`, the name of the cluster."""
        self.cluster = ClusterCore(
            num_servers=settings.num_servers,
            replicas=settings.replicas,
            heartbeat_timeout_s=settings.heartbeat_timeout_s,
            name=settings.cluster,
            **options,
        )
        self.jobs = JobCore(settings.num_workers)
        self.sessions = Sessions()
        self._num_buckets = options.get("num_buckets", NUM_BUCKETS)
        self._views = SentViews()
        self._held: list[tuple[object, Any, MessageNumbers, bytes]] = []  # messages that wait for the takeover
        self._has_news = False
        self._refused_clusters: set[str] = set()  # clusters with other settings than this scheduler's

    @property
    def heartbeat_s(self) -> float:
        return self.cluster.heartbeat_s

    def is_watched(self, incarnation: int) -> bool:
        """Whether the runtime must report the end of this process."""
        return self.cluster.phase is Phase.RECOVERING or self.cluster.membership.find(incarnation) is not None

    def connected(self, peer: object) -> None:
        self.sessions.connect(peer)

    def disconnected(self, peer: object, time_s: float) -> list[Instruction]:
        """Record that a connection ended. Its process may live and connect again."""
        session = self.sessions.disconnect(peer)
        self._views.forget(peer)
        self._held = [message for message in self._held if message[0] is not peer]
        out: list[Instruction] = []
        if session.incarnation is None:
            out += self._answer(self.jobs.forget(session))
        out += self.handle(events.Disconnected(peer), time_s)
        if session.incarnation is not None and session.peer is None:
            out.append(events.MemberDisconnected(session.incarnation))
        return out

    def check(self, peer: object, message: Any) -> None:
        if isinstance(message, Register) and self.sessions.has_joined(peer):
            raise ProtocolError(f"node {message.node!r} has registered twice on one connection")
        if isinstance(message, Rejoin):
            view, expected = message.view, self._num_buckets if message.view.is_ready else 0
            if view.num_buckets != expected:
                raise ProtocolError(
                    f"a view of version {view.version} with chains of {view.num_buckets} buckets: expected {expected}"
                )

    def receive(
        self, peer: object, message: Any, numbers: MessageNumbers, time_s: float, body: bytes = b""
    ) -> list[Instruction]:
        """Handle a message that :meth:`check` accepts. For a repeated message, only the stored answer is sent again."""
        session = self.sessions.connected[peer]
        if not session.end.receive(numbers.sequence, numbers.lowest):
            return [*session.repeat(numbers.request)]
        match message:
            case Register():
                self.sessions.join(peer, numbers.request)
                return self.handle(MessageReceived(peer, message), time_s)
            case Rejoin():
                return self._rejoin(peer, message, numbers.request, time_s)
            case Heartbeat(progress=progress):
                out = self.handle(MessageReceived(peer, message), time_s)
                if progress:
                    counters = CountersReceived(counters=progress)
                    request = ReceivedRequest(None, session, session.incarnation or 0, counters)
                    out += self._answer(self.jobs.handle(request, self.cluster.membership, time_s))
                return out
            case Leave():
                return [*self.handle(MessageReceived(peer, message), time_s), events.Close(peer)]
            case Drain() | Filled() | Prepared() | Promised():
                return self.handle(MessageReceived(peer, message), time_s)
            case _ if self._is_recovering and not isinstance(message, EndCluster):
                self._held.append((peer, message, numbers, body))
                return []
            case _:
                return self._serve(PendingCall(session, numbers.request), message, time_s, body)

    @property
    def _is_recovering(self) -> bool:
        """Whether requests wait until the former scheduler's members have rejoined."""
        phase = self.cluster.phase
        return phase is Phase.RECOVERING or not (self.cluster.is_established or phase is Phase.FORMING)

    def _serve(self, call: PendingCall, message: Any, time_s: float, body: bytes) -> list[Instruction]:
        match message:
            case GetView():
                return [*self.reply(call, self.cluster.newest)]
            case GetSettings():
                return [*self.reply(call, self.settings)]
            case EndCluster():
                return [*self.end("the end of the cluster was requested"), *self.reply(call, None)]
            case JobRequest():
                request = ReceivedRequest(call, call.session, call.session.incarnation or 0, message, body)
                try:
                    answers = self.jobs.handle(request, self.cluster.membership, time_s)
                except PacelineError as error:
                    return [*self.reply(call, error)]
                return self._answer(answers) + self._send_news_soon()
            case _:
                return [events.ServeRequest(call, message)]

    def reply(self, call: PendingCall, content: Any, body: bytes = b"") -> list[SendMessage]:
        return call.session.answer(call.request, content, body)

    def end(self, reason: str) -> list[Instruction]:
        out = self._answer(self.jobs.end())
        for session in self.sessions.connected.values():
            out += session.notify(Ended(reason=reason))
        return [*out, events.ClusterEnded()]

    def handle(self, event: Event | events.NewsDue, time_s: float) -> list[Instruction]:
        if isinstance(event, events.NewsDue):
            return self._send_news()
        out: list[Instruction] = []
        was_recovering = self.cluster.phase is Phase.RECOVERING
        instructions = self.cluster.handle(event, time_s)
        if was_recovering and self.cluster.phase is not Phase.RECOVERING:
            out.append(events.WatchOnly(self.cluster.newest.incarnations))
        for instruction in instructions:
            out += self._carry_out(instruction, time_s)
        if self._held and not self._is_recovering:
            held, self._held = self._held, []
            for peer, message, numbers, body in held:
                out += self._serve(PendingCall(self.sessions.connected[peer], numbers.request), message, time_s, body)
        return out

    def _rejoin(self, peer: object, rejoin: Rejoin, request: int, time_s: float) -> list[Instruction]:
        out: list[Instruction]
        if self.cluster.phase is not Phase.LEADING and (name := self._differing_setting(rejoin)):
            out = [SendMessage(peer, Elsewhere(), request)]
            if rejoin.cluster not in self._refused_clusters:
                self._refused_clusters.add(rejoin.cluster)
                expected, actual = getattr(self.settings, name), getattr(rejoin.settings, name)
                out.append(
                    events.NotifyOperator(
                        f"cannot take over a cluster with {name}={actual}: this scheduler was started with "
                        f"{name}={expected}. Start it with the former scheduler's settings"
                    )
                )
            return out
        self.sessions.join(peer, request)
        self.sessions.connected[peer].end.is_foreign = True
        return self.handle(MessageReceived(peer, rejoin), time_s)

    def _differing_setting(self, rejoin: Rejoin) -> str | None:
        """Return the first setting of a former scheduler's cluster that differs from this scheduler's setting."""
        for name in self.settings.__struct_fields__:
            if name not in _MAY_DIFFER and getattr(self.settings, name) != getattr(rejoin.settings, name):
                return name
        return None

    def _carry_out(self, instruction: Instruction, time_s: float) -> list[Instruction]:
        sessions = self.sessions
        match instruction:
            case events.Admit(peer, member):
                return self._welcome(peer, member)
            case events.Reject(peer, reason):
                return [*sessions.answer_joining(peer, UsageError(reason))]
            case events.SendElsewhere(peer):
                return [*sessions.answer_joining(peer, Elsewhere())]
            case events.DeclareDead(peer, reason):
                error = PeerError(f"this process was declared dead: {reason}; start it again")
                return [*sessions.notify([peer], Expelled(reason=reason)), *sessions.answer_joining(peer, error)]
            case events.ReleaseServer(peer):
                return [*sessions.notify([peer], Ended(reason="its buckets are on other servers"))]
            case events.RequestPromise(peers, term):
                return [*sessions.notify(peers, Promise(term))]
            case events.Prepare(peers, view):
                return [send for peer in peers for send in sessions.notify([peer], self._views.prepare(peer, view))]
            case events.Publish(view):
                return [instruction, *self._publish(view)]
            case events.Removed(member, reason):
                session = sessions.members.pop(member.incarnation, None)
                answers = self.jobs.removed(member, session, is_lost=reason is not None, time_s=time_s)
                return [instruction, *self._answer(answers), *self._send_news_soon()]
            case events.TakenOver():
                return [instruction, *self._take_over(instruction, time_s)]
            case _:
                return [instruction]

    def _welcome(self, peer: object, member: Member) -> list[Instruction]:
        found = self.sessions.welcome(peer, member.incarnation)
        if found is None:
            return []
        session, is_resumed = found
        welcome = Welcome(
            rank=member.rank,
            incarnation=member.incarnation,
            heartbeat_s=self.cluster.heartbeat_s,
            settings=self.settings,
            view=self._views.welcome(peer, member.role, self.cluster.committed),
            received=session.end.welcome_number,
        )
        out: list[Instruction] = [*self.sessions.answer_joining(peer, welcome)]
        if is_resumed:
            out += session.repeat_all()
        record = self.jobs.record()
        if record is not None and (member.role is Role.WORKER or self.jobs.concerns(session)):
            out += session.notify(JobNews(record=record))
        return [*out, events.WatchProcess(member, is_connected=True)]

    def _take_over(self, taken: events.TakenOver, time_s: float) -> list[Instruction]:
        self.settings = replace(self.settings, cluster=self.cluster.name)
        rejoined = [
            RejoinedMember(self.sessions.take_over(peer, rejoin.member.incarnation), rejoin.member, rejoin.job)
            for peer, rejoin in taken.returned
        ]
        self.jobs.restore(rejoined, list(taken.dead), time_s, term=self.cluster.term)
        return self._send_news_soon()

    def _publish(self, view: View) -> list[SendMessage]:
        self._views.commit(view)
        out: list[SendMessage] = []
        for _, session in self.sessions:
            message = None if session.peer is None else self._views.publish(session.peer, view)
            if message is not None:
                out += session.notify(message)
        return out

    def _answer(self, answers: Iterable[Answer]) -> list[Instruction]:
        out: list[Instruction] = []
        for answer in answers:
            assert isinstance(answer.call, PendingCall)
            out += self.reply(answer.call, answer.content, answer.body)
        return out

    def _send_news_soon(self) -> list[Instruction]:
        """Send the job's new facts after a short delay, together with facts that arrive during the delay."""
        is_due, self._has_news = self._has_news, True
        return [] if is_due else [events.NewsSoon()]

    def _send_news(self) -> list[Instruction]:
        self._has_news = False
        record = self.jobs.take_news()
        if record is None:
            return []
        workers = {member.incarnation for member in self.cluster.newest.members if member.role is Role.WORKER}
        news = JobNews(record=record)
        keepers: list[Session] = [
            session for incarnation, session in self.sessions if incarnation in workers or self.jobs.concerns(session)
        ]
        return [send for session in keepers for send in session.notify(news)]

    def validate(self) -> None:
        self.cluster.validate()
        if self.jobs.ledger is not None:
            self.jobs.ledger.validate()
