"""The scheduler: who is a member, which table has which number, which worker reads which shard.

One asyncio loop with a transport's :class:`Handler`. The rules are those of
:class:`paceline.protocol.scheduler.SchedulerCore`, which is told what members say and what becomes of their connections
and processes. Tables and jobs are beside it. It sees no parameters and no gradients; while tables and members stay as
they are, nobody waits for it. It may die: the members keep what it knew, and a new one that is started in its place
learns it from them.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Callable
from typing import Any

import msgspec

from paceline.errors import PacelineError, PeerError, ProtocolError, UsageError
from paceline.protocol import NUM_BUCKETS, Member, Role
from paceline.protocol.scheduler import Phase, SchedulerCore, View, events
from paceline.protocol.scheduler.events import MessageReceived
from paceline.protocol.scheduler.sent_views import SentViews
from paceline.ps import messages
from paceline.ps.fail_stop import Fail, must_succeed
from paceline.ps.messages import CALL, NOTICE
from paceline.ps.scheduler.jobs import Jobs
from paceline.ps.scheduler.notes import Notes
from paceline.ps.scheduler.processes import ProcessWatch
from paceline.ps.scheduler.sessions import PendingCall, ProcessSession, Sessions, notify_all
from paceline.ps.scheduler.tables import Tables
from paceline.transport import Endpoint, Handler, Header, Peer, frame_parts

_FLUSH_S = 0.02
"""How long new workers may wait until the others hear of them, so that all who come at once are told of together."""


class Scheduler(Handler):
    """One scheduler of a cluster with these valid settings.

    Members of a cluster whose scheduler died may come to it: it takes their cluster over. With `replaces` it knows that
    there are some, and begins no other cluster before they have had the heartbeat's time-out to come; with
    `accepts_minority` it takes over from those that have come by then, however few. `on_note` is called with what
    whoever runs the cluster should know, who is declared dead and why among it; of processes that have ended only with
    `tells_ends`, for their launcher may say it. `on_loss` is called if buckets are lost, which everybody who needs them
    hears too, `fail` with an exception after which this scheduler must not go on (:mod:`paceline.ps.fail_stop`).
    """

    def __init__(
        self,
        settings: messages.ClusterSettings,
        *,
        fail: Fail,
        replaces: bool = False,
        accepts_minority: bool = False,
        on_note: Callable[[str], None] = lambda text: None,
        on_loss: Callable[[str], None] = lambda text: None,
        tells_ends: bool = True,
    ) -> None:
        self.settings = messages.Settings(**msgspec.structs.asdict(settings), cluster=secrets.token_hex(8))
        self.core = SchedulerCore(
            num_servers=settings.num_servers,
            replicas=settings.replicas,
            heartbeat_timeout_s=settings.heartbeat_timeout_s,
            cluster=self.settings.cluster,
            salt=secrets.randbits(16),
            replaces=replaces,
            accepts_minority=accepts_minority,
        )
        self.notes = Notes(on_note, on_loss, tells_ends=tells_ends)
        self.jobs = Jobs(settings.num_workers)
        self._fail = fail
        self._tables = Tables()
        self.sessions = Sessions()
        self._views = SentViews()
        self._held: list[tuple[Peer, Header, Any, bytes]] = []  # what has come while members are awaited
        self._processes = ProcessWatch(
            self.process_ended, lambda incarnation: self._feed(events.Doubted(incarnation)), fail
        )
        self._timer: asyncio.TimerHandle | None = None
        self._flush: asyncio.TimerHandle | None = None  # the latest
        self.failure: PacelineError | None = None
        """Why it has ended, if that was not asked for."""
        self.ended = asyncio.Event()
        """Set when the cluster shall end."""

    # Connections.

    @must_succeed
    def connected(self, peer: Peer) -> None:
        """Take note of a connection; the clock begins with the first one."""
        self.sessions.connected[peer] = ProcessSession(peer)
        if self._timer is None:
            self._tick()

    def frame_received(self, peer: Peer, header: Header, meta: memoryview, body: memoryview) -> None:
        """Take a message."""
        if header.kind not in (CALL, NOTICE):
            raise ProtocolError(f"the scheduler knows no frame of kind {header.kind}; is the peer of this version?")
        request = messages.decode_to_scheduler(meta)
        try:
            if self.sessions.connected[peer].is_new(header):
                self._take(peer, header, request, body)
        except PacelineError:
            raise
        except Exception as error:
            self._fail(error)
            raise

    def _take(self, peer: Peer, header: Header, request: Any, body: memoryview) -> None:
        match request:
            case messages.Register():
                if self.sessions.has_asked(peer):
                    raise ProtocolError(f"node {request.node!r} asked twice to join on one connection")
                self.sessions.ask(peer, header.request)
                self._feed(MessageReceived(peer, request))
            case messages.Rejoin():
                self._rejoin(peer, header, request)
            case messages.Heartbeat(progress=progress):
                self._feed(MessageReceived(peer, request))
                if progress:
                    self.jobs.note_progress(self.sessions.connected[peer], progress, self.core.membership)
            case messages.Leave():
                self._feed(MessageReceived(peer, request))
                peer.close()  # which the other end waits for
            case messages.Drain() | messages.Filled() | messages.Prepared() | messages.Promised():
                self._feed(MessageReceived(peer, request))
            case _ if self._must_wait(request):
                self._held.append((peer, header, request, bytes(body)))
            case _:
                call = PendingCall(self.sessions.connected[peer], header.request)
                try:
                    self._serve(call, request, body)
                except PacelineError as error:
                    call.refuse(error)

    def _must_wait(self, request: Any) -> bool:
        """Whether a request needs what the members of a former scheduler's cluster have still to tell."""
        is_recovering = self.core.phase is Phase.RECOVERING or not (
            self.core.is_established or self.core.phase is Phase.FORMING
        )
        return is_recovering and not isinstance(request, messages.EndCluster)

    def _serve(self, call: PendingCall, request: Any, body: memoryview) -> None:
        match request:
            case messages.GetView():
                call.answer(self.core.newest)
            case messages.GetSettings():
                call.answer(self.settings)
            case messages.DeclareTable(spec=spec):
                call.answer(self._tables.declare(spec))
            case messages.NoteUpdate(table=table, update=update):
                call.answer(self._tables.note_update(table, update))
            case messages.ListTables():
                call.answer(self._tables.specs)
            case messages.EndCluster():
                self.end("the cluster was told to end")
                call.answer(None)
            case _:
                self.jobs.serve(call, request, body, self.core.membership)
                self._tell_news_soon()

    @must_succeed
    def disconnected(self, peer: Peer, reason: Exception | None) -> None:
        """Take note that a connection broke. That is no death: who is a member comes again."""
        session = self.sessions.disconnect(peer)
        self._views.forget(peer)
        self._held = [each for each in self._held if each[0] is not peer]
        if session.incarnation is None:
            self.jobs.forget(session)
        self._feed(events.Disconnected(peer))
        if session.incarnation is not None and session.peer is None:
            self._processes.disconnected(session.incarnation)

    def close(self) -> None:
        """Stop the timers."""
        self._processes.close()
        for timer in (self._timer, self._flush):
            if timer is not None:
                timer.cancel()

    def process_ended(self, incarnation: int) -> None:
        """Take the word that the process of a member has ended, of somebody who knows."""
        self._feed(events.ProcessEnded(incarnation))

    def _tick(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self.core.heartbeat_s, self._tick)
        self._feed(events.TimePassed())

    # The core.

    def _rejoin(self, peer: Peer, header: Header, request: messages.Rejoin[Endpoint, messages.Knowledge]) -> None:
        knowledge = request.knowledge
        if knowledge is None:
            raise ProtocolError(f"{request.member.node} has rejoined without its settings")
        if request.view.num_buckets not in (0, NUM_BUCKETS):
            raise ProtocolError(f"a view with chains of {request.view.num_buckets} buckets: expected {NUM_BUCKETS}")
        if self.core.phase is not Phase.LEADING and not self.notes.has_settings(knowledge.settings, self.settings):
            peer.send(*frame_parts(messages.RESULT, request=header.request, meta=messages.encode(messages.Elsewhere())))
            return
        self.sessions.ask(peer, header.request)
        self.sessions.connected[peer].end.is_foreign = True
        self._feed(MessageReceived(peer, request))
        for each in self.core.awaited:
            endpoint, process = each.address, each.process
            assert endpoint is None or isinstance(endpoint, Endpoint)
            # It may be found at once that one has ended, and that the cluster can be taken over without it.
            if self.core.phase is Phase.RECOVERING or each.incarnation in self.core.newest.incarnations:
                self._processes.watch(each.incarnation, process, endpoint, connected=False)

    @must_succeed
    def _feed(self, event: events.Event) -> None:
        was_recovering = self.core.phase is Phase.RECOVERING
        for instruction in self.core.handle(event, time.monotonic()):
            self._execute(instruction)
        if was_recovering and self.core.phase is not Phase.RECOVERING:
            self._processes.keep(self.core.newest.incarnations)
        if self._held and not self._must_wait(None):
            held, self._held = self._held, []
            for peer, header, request, body in held:
                self._take(peer, header, request, memoryview(body))

    def _execute(self, instruction: events.Instruction) -> None:
        match instruction:
            case events.Admit(peer, member):
                self._welcome(peer, member)
            case events.Reject(peer, reason):
                self.sessions.refuse(peer, UsageError(reason))
            case events.Foreign(peer):
                self.sessions.answer_asked(peer, messages.Elsewhere())
            case events.Expel(peer, reason):
                self.sessions.notify(peer, messages.Expelled(reason=reason))
                self.sessions.refuse(peer, PeerError(f"this process was declared dead: {reason}; start it again"))
            case events.ReleaseServer(peer):
                self.sessions.notify(peer, messages.Ended(reason="its buckets are on other servers"))
            case events.Removed():
                self._removed(instruction)
            case events.TakenOver():
                self._take_over(instruction)
            case events.RequestPromise(peers, term):
                for peer in peers:
                    self.sessions.notify(peer, messages.Promise(term=term))
            case events.Prepare(peers, view):
                for peer in peers:
                    self.sessions.notify(peer, self._views.prepare(peer, view))
            case events.Publish(view):
                self._publish(view)
            case events.FlushSoon():
                loop = asyncio.get_running_loop()
                last_s = -math.inf if self._flush is None else self._flush.when()
                self._flush = loop.call_at(max(loop.time(), last_s + _FLUSH_S), lambda: self._feed(events.Flush()))
            case events.BucketsLost(buckets):
                if not self.ended.is_set():  # at the end servers leave, with what they hold
                    self.notes.lost(buckets)
            case events.Note(text):
                self.notes.note(text)
            case events.Superseded(term):
                self.failure = PeerError(
                    f"another scheduler has taken over this cluster (in term {term}): this one ends"
                )
                self.ended.set()

    def _welcome(self, peer: Any, member: Member) -> None:
        found = self.sessions.welcome(peer, member.incarnation)
        if found is None:
            return
        session, is_resumed = found
        welcome = messages.Welcome(
            rank=member.rank,
            incarnation=member.incarnation,
            heartbeat_s=self.core.heartbeat_s,
            settings=self.settings,
            view=self._views.welcome(peer, member.role, self.core.committed),
            received=session.end.welcome_number,
        )
        self.sessions.answer_asked(peer, welcome)
        if is_resumed:
            session.answer_again()
        record = self.jobs.record()
        if record is not None and (member.role is Role.WORKER or self.jobs.concerns(session)):
            session.notify(messages.encode(record))
        assert member.address is None or isinstance(member.address, Endpoint)
        self._processes.watch(member.incarnation, member.process, member.address, connected=True)

    def _removed(self, removed: events.Removed) -> None:
        session = self.sessions.members.pop(removed.member.incarnation, None)
        self._processes.forget(removed.member.incarnation)
        self.jobs.removed(removed, session)
        self._tell_news_soon()
        if removed.reason is not None and not self.ended.is_set():
            self.notes.declared_dead(removed.member, removed.reason)

    def _take_over(self, taken: events.TakenOver) -> None:
        """Take over what the members know together."""
        self.settings = msgspec.structs.replace(self.settings, cluster=self.core.cluster)
        rejoins = []
        for peer, rejoin in taken.returned:
            session = self.sessions.take_over(peer, rejoin.member.incarnation)
            rejoins.append((session, rejoin))
        for _, rejoin in sorted(
            rejoins, key=lambda each: each[1].member.role is not Role.SERVER
        ):  # they know the tables best
            assert rejoin.knowledge is not None
            self._tables.restore(rejoin.knowledge.tables)
        self.jobs.restore(rejoins, taken.dead, term=self.core.term)
        self._tell_news_soon()
        for member in taken.dead:
            self.notes.declared_dead(member, "it has not come to this scheduler, which took over")

    # Views.

    def _publish(self, view: View) -> None:
        self._views.commit(view)
        for session in self.sessions.members.values():
            message = None if session.peer is None else self._views.publish(session.peer, view)
            if message is not None:
                session.notify(messages.encode(message))

    # Work.

    def _tell_news_soon(self) -> None:
        """Tell what became of the job to those that keep it: a batch for all that comes at once."""
        asyncio.get_running_loop().call_soon(self._tell_news)

    def _tell_news(self) -> None:
        news = self.jobs.take_news()
        if news is None:
            return
        workers = {member.incarnation for member in self.core.newest.members if member.role is Role.WORKER}
        keepers = [s for each, s in self.sessions.members.items() if each in workers or self.jobs.concerns(s)]
        notify_all(keepers, news)

    def end(self, reason: str) -> None:
        """Tell every process of the cluster to end in good order."""
        self.jobs.end()
        notify_all(self.sessions.connected.values(), messages.Ended(reason=reason))
        self.ended.set()
