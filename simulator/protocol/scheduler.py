"""The scheduler of a protocol run: its two cores between virtual connections. It has no rule of its own."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from typing_extensions import override

from paceline.errors import PeerError
from paceline.protocol.jobs import JobCore, JobRecord, Remembered
from paceline.protocol.jobs.messages import Answer, JobNews, ReceivedRequest
from paceline.protocol.membership import Member, Role
from paceline.protocol.scheduler import Phase, SchedulerCore, View, events
from paceline.protocol.scheduler.line import SchedulerEnd
from paceline.protocol.scheduler.messages import Leave, Rejoin
from simulator.protocol.connections import MessageEnd, MessageProcess
from simulator.protocol.messages import EndWork, JobMessage, Reply, Welcomed
from simulator.protocol.node import SCHEDULER, Surroundings

_FLUSH_S = 0.005


class _Session:
    """A member, and its connection."""

    __slots__ = ("connection", "end")

    def __init__(self, connection: Any, *, is_foreign: bool) -> None:
        self.connection: MessageEnd = connection
        self.end = SchedulerEnd(is_foreign=is_foreign)

    def answer(self, request: int, content: Any) -> None:
        self.connection.send(Reply(request, content, self.end.received))


class SimulatedScheduler(MessageProcess):
    """One scheduler process, at the address at which they all listen."""

    def __init__(self, name: str, around: Surroundings, *, replaces: bool, accepts_minority: bool) -> None:
        super().__init__(name, around.network)
        settings = self.settings = around.settings
        self.oracle = around.oracle
        self.network.listeners[SCHEDULER] = self
        self.core = SchedulerCore(
            num_servers=settings.num_servers, replicas=settings.replicas,
            heartbeat_timeout_s=settings.heartbeat_timeout_s, cluster=name,
            salt=self.world.random.getrandbits(16), replaces=replaces, accepts_minority=accepts_minority,
            num_buckets=settings.num_buckets,
        )  # fmt: skip
        self.jobs = JobCore(settings.num_workers)
        self._sessions: dict[int, _Session] = {}  # the members that were welcomed, by incarnation
        self._foreign: set[object] = set()  # connections of members that have rejoined
        self._flushes = self._has_news = False
        self.later(self.core.heartbeat_s, self._tick)

    @property
    def is_established(self) -> bool:
        """Whether it leads a cluster."""
        return self.core.is_established and self.core.phase is Phase.LEADING

    @override
    def accept(self, connection: MessageEnd, hello: Any) -> bool:
        return True

    @override
    def receive(self, connection: MessageEnd, message: Any) -> None:
        if isinstance(message, JobMessage):
            self._serve(connection, message)
            return
        kind = type(message.message)
        if kind is Rejoin:
            self._foreign.add(connection)
        self._feed(message)
        if kind is Rejoin:
            self._look_for_ended()
        elif kind is Leave:
            connection.send(events.Expel(connection, "it has left"))

    @override
    def closed(self, connection: MessageEnd) -> None:
        incarnation = self.core.incarnation_of(connection)
        self._foreign.discard(connection)
        self._feed(events.Disconnected(connection))
        if incarnation is not None:
            self.later(2 * self.network.latency_s, self._probe, connection.peer.name, incarnation)

    def _tick(self) -> None:
        self._feed(events.TimePassed())
        self._look_for_ended()
        self.later(self.core.heartbeat_s, self._tick)

    # Ends of processes: reported by the kernel, if all are on one host, or found because a name is gone.

    def process_ended(self, name: str) -> None:
        """Take the kernel's report that a process has ended."""
        member = self.core.membership.named(name)
        if member is not None:
            self._feed(events.ProcessEnded(member.incarnation))

    def _look_for_ended(self) -> None:
        for member in self.core.awaited:
            if not self.settings.is_one_host:
                self._probe(member.node, member.incarnation)
            elif member.node not in self.network.listeners:
                self._feed(events.ProcessEnded(member.incarnation))

    def _probe(self, name: str, incarnation: int) -> None:
        is_refused = name not in self.network.listeners and name not in self.network.powerless
        if is_refused and not self.settings.is_one_host and self.core.membership.find(incarnation):
            self._feed(events.Doubted(incarnation))

    # The core.

    def _feed(self, event: events.Event) -> None:
        for instruction in self.core.handle(event, self.own_now_s):
            self._execute(instruction)

    def _execute(self, instruction: events.Instruction) -> None:
        match instruction:
            case events.Admit(peer, member):
                self._welcome(peer, member)
            case events.Expel(peer) | events.Reject(peer) | events.ReleaseServer(peer):
                self._send([peer], instruction)
            case events.RequestPromise(peers) | events.Prepare(peers):
                self._send(peers, instruction)
            case events.Foreign(peer):
                peer.close()  # type: ignore[attr-defined]  # it comes again
                self.later(0.0, self.closed, peer)
            case events.Removed(member, reason):
                if reason is not None:
                    self.network.fired["dead"] += 1
                    self.network.fired["expel"] += "could not reach" in reason
                self.world.note(f"{member.node} ({member.incarnation}) is removed: {reason}")
                session = self._sessions.pop(member.incarnation, None)
                is_lost = reason is not None
                self._answer(self.jobs.removed(member, session, is_lost=is_lost, time_s=self.own_now_s))
            case events.TakenOver(returned, dead):
                self._take_over(returned, dead)
            case events.Publish(view):
                self.oracle.published(view)
                for session in self._sessions.values():
                    self._send([session.connection], events.Publish(_view_for(session.connection, self.core.committed)))
            case events.FlushSoon():
                if not self._flushes:
                    self._flushes = True
                    self.later(_FLUSH_S, self._flush)
            case events.BucketsLost(buckets):
                if self.core.term >= self.oracle.view.term:  # not of a superseded scheduler
                    self.oracle.lose(buckets)
            case events.Note(text):
                self.world.note(text)
            case events.Superseded():
                self.network.fired["superseded"] += 1
                self.kill()

    def _send(self, peers: Iterable[Any], message: Any) -> None:
        for peer in peers:
            peer.send(message)

    def _flush(self) -> None:
        self._flushes = False
        self._feed(events.Flush())

    # The jobs.

    def _welcome(self, peer: Any, member: Member) -> None:
        session = self._sessions.setdefault(member.incarnation, _Session(peer, is_foreign=peer in self._foreign))
        session.connection = peer
        view = _view_for(peer, self.core.committed)
        peer.send(Welcomed(member, self.core.cluster, view, session.end.welcome_number))
        for request, content in session.end.answers():
            session.answer(request, content)
        self._send_news([session], self.jobs.record())

    def _take_over(self, returned: Iterable[tuple[Any, Rejoin]], dead: Collection[Member]) -> None:
        remembered = []
        for peer, rejoin in returned:
            session = self._sessions[rejoin.member.incarnation] = _Session(peer, is_foreign=True)
            remembered.append(Remembered(session, rejoin.member, rejoin.job))
        self.jobs.restore(remembered, dead, self.own_now_s, term=self.core.term)
        self._answer(())

    def _serve(self, connection: MessageEnd, message: JobMessage) -> None:
        incarnation = self.core.incarnation_of(connection) or 0
        session = self._sessions.get(incarnation)
        if session is None or session.connection is not connection:
            return
        call = session, message.request
        if not session.end.is_new(message.sequence, message.lowest):
            if (answer := session.end.answer_to(message.request)) is not None:
                session.answer(message.request, answer)
        elif isinstance(message.content, EndWork):
            self._answer([*self.jobs.end(), Answer(call, EndWork())])
        else:
            asked = ReceivedRequest(call, session, incarnation, message.content)
            try:
                self._answer(self.jobs.handle(asked, self.core.membership, self.own_now_s))
            except PeerError as error:
                self._answer([Answer(call, error)])

    def _answer(self, answers: Iterable[Answer]) -> None:
        for answer in answers:
            call: Any = answer.call
            session, request = call
            if request:
                session.end.answered(request, answer.content)
                session.answer(request, answer.content)
        if not self._has_news:
            self._has_news = True
            self.later(0.0, self._flush_news)

    def _flush_news(self) -> None:
        self._has_news = False
        self._send_news(self._sessions.values(), self.jobs.take_news())

    def _send_news(self, sessions: Iterable[_Session], record: JobRecord | None) -> None:
        if record is not None:
            for session in sessions:
                if _role(session.connection) is Role.WORKER or self.jobs.concerns(session):
                    session.answer(0, JobNews(record=record))


def _view_for(peer: Any, view: View) -> View:
    return view.without_workers() if _role(peer) is Role.WORKER else view


def _role(peer: Any) -> Role:
    role: Role = peer.peer.role
    return role
