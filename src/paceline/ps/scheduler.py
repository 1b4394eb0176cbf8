"""The scheduler: who is a member, which table has which number, which worker reads which shard.

One asyncio loop with a transport's :class:`Handler`. Its rules are `membership` and `shards` of
:mod:`paceline.protocol`. It sees no parameters and no gradients; while tables and members stay as they are, nobody
waits for it. It may die: the nodes keep what it knew, and a new one that is started in its place learns it from them
(:mod:`paceline.ps.recovery`).
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from typing import Any

import msgspec

from paceline.errors import PacelineError, PeerError, ProtocolError, TableMismatchError, UsageError
from paceline.protocol import (
    Accept,
    Consistency,
    Member,
    Membership,
    Planner,
    Reachability,
    Role,
    Sequential,
    StalePolicy,
    membership,
)
from paceline.protocol.buckets import from_bytes, to_bytes
from paceline.protocol.chains import VERSION_GAP
from paceline.ps import messages
from paceline.ps.job import JobBoard
from paceline.ps.messages import ALL_DONE, CALL, NOTICE, RESULT, MemberInfo, TableSpec
from paceline.ps.recovery import ROLES, Found, Recovery, Returned
from paceline.ps.rules import RULES, from_fields
from paceline.transport import Endpoint, Handler, Header, Peer

_MAX_TABLES = 65535
_SHORTEST_RECOVERY_S = 1.5
_UNANSWERED: Any = object()


class _KnownTable:
    """A table's number, its spec as first declared, and as it is now that hyperparameters may have changed."""

    __slots__ = ("declared", "number", "spec")

    def __init__(self, number: int, declared: TableSpec, spec: TableSpec | None = None) -> None:
        self.number = number
        self.declared = declared
        self.spec = declared if spec is None else spec


class Scheduler(Handler):
    """The soft state of one cluster.

    Arguments: how many servers and workers are expected (iterations begin when so many workers have joined; more may
    join later), the `consistency` and `stale` policy, how many `replicas` there are of every bucket, and after how long
    a silent member counts as dead.

    Members of a cluster whose scheduler died may come to it. From when the first one speaks it waits `recovery_s` for
    all of them (None: two periods of the heartbeat, at least 1.5 s). With `replaces` it knows that there are some, and
    waits for the first one as long as for a silent member.
    """

    def __init__(
        self,
        *,
        num_servers: int,
        num_workers: int,
        consistency: Consistency,
        stale: StalePolicy,
        replicas: int = 0,
        heartbeat_timeout_s: float = 10.0,
        recovery_s: float | None = None,
        replaces: bool = False,
    ) -> None:
        self._timeout_s = heartbeat_timeout_s
        self._membership = Membership(num_servers, heartbeat_timeout_s)
        self._heartbeat_s = heartbeat_timeout_s / 10.0
        self._reachability = Reachability(heartbeat_timeout_s / 2)
        self._num_workers = num_workers
        if isinstance(consistency, Sequential) and not isinstance(stale, Accept):
            raise UsageError(
                f"stale-gradient policy {stale} has nothing to do under sequential consistency, where no gradient is "
                "stale: leave it out, or choose bounded or eventual"
            )
        self._settings = messages.Settings(
            consistency=str(consistency),
            stale=str(stale),
            num_servers=num_servers,
            num_workers=num_workers,
            replicas=replicas,
            cluster=secrets.token_hex(8),
        )
        self._recovery_s = max(2 * self._heartbeat_s, _SHORTEST_RECOVERY_S) if recovery_s is None else recovery_s
        self._recovery: Recovery | None = Recovery() if replaces else None
        self._recovery_timer: asyncio.TimerHandle | None = None
        self._begun = False  # whether this cluster has members, new or taken over
        self._peers: dict[str, Peer] = {}  # node → connection
        self._nodes: dict[Peer, tuple[str, int]] = {}  # connection → node, incarnation
        self._endpoints: dict[str, Endpoint | None] = {}
        self._known_tables: dict[str, _KnownTable] = {}
        self._planner = Planner(replicas=replicas)
        self._leaving: set[int] = set()  # servers that want to go when their buckets are elsewhere
        self._job: JobBoard | None = None
        self._last_job = 0  # its number, also where its board died with a former scheduler
        self._job_poster: Peer | None = None
        self._news_to_tell = False
        self._job_seekers: dict[Peer, tuple[Header, int]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._looks_at_s = math.inf  # when the clock is looked at next
        self.ended = asyncio.Event()
        """Set when the cluster shall end."""
        self._calls: dict[type, Any] = {
            messages.GetMap: self._get_map,
            messages.GetSettings: self._get_settings,
            messages.Register: self._register,
            messages.DeclareTable: self._declare_table,
            messages.NoteUpdate: self._note_update,
            messages.ListTables: self._list_tables,
            messages.PostJob: self._post_job,
            messages.GetJob: self._get_job,
            messages.TakeLease: self._take_lease,
            messages.LeaseDone: self._lease_done,
            messages.FileEnded: self._file_ended,
            messages.Report: self._report,
            messages.JobFailed: self._job_failed,
            messages.JobStatus: self._job_status,
            messages.TakeReports: self._take_reports,
            messages.GetAccount: self._get_account,
            messages.EndCluster: self._end_cluster,
            messages.Heartbeat: self._heartbeat,
            messages.Leave: self._leave,
            messages.Filled: self._filled,
            messages.Drain: self._drain,
        }

    @property
    def num_members(self) -> int:
        """How many processes belong to the cluster, observers included."""
        return len(self._membership.members)

    def connected(self, peer: Peer) -> None:
        """See :meth:`Handler.connected`."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._heartbeat_s, self._look_at_clock)
            if self._recovery is not None:
                self._recover_within(self._timeout_s)

    def frame_received(self, peer: Peer, header: Header, meta: memoryview, body: memoryview) -> None:
        """See :meth:`Handler.frame_received`."""
        if header.kind not in (CALL, NOTICE):
            raise ProtocolError(f"the scheduler knows no frame of kind {header.kind}; is the peer of this version?")
        try:
            request = messages.decode_to_scheduler(meta)
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"the scheduler got a control message that it cannot read: {error}") from None
        if isinstance(request, messages.Rejoin):
            self._rejoin(peer, header, request)
        elif self._recovery is not None:
            self._recovery.hold(peer, header, request, body)
        else:
            self._serve(peer, header, request, body)

    def _serve(self, peer: Peer, header: Header, request: Any, body: memoryview) -> None:
        answer = self._calls[type(request)](peer, header, request, body)
        if header.kind == CALL and answer is not _UNANSWERED:
            data, parts = answer if isinstance(answer, tuple) else (answer, ())
            peer.send_frame(RESULT, request=header.request, meta=messages.encode(data), body=parts)

    def disconnected(self, peer: Peer, reason: Exception | None) -> None:
        """See :meth:`Handler.disconnected`. A broken connection is a death: a process keeps one as long as it lives."""
        if self._recovery is not None:
            self._recovery.forget(peer)
        self._job_seekers.pop(peer, None)
        self._abandon_job_of(peer)
        node = self._nodes.pop(peer, None)
        if node is not None:
            if self._peers.get(node[0]) is peer:
                del self._peers[node[0]]
                self._endpoints.pop(node[0], None)
            self._obey(self._membership.handle(membership.Disconnected(*node, time.monotonic())))

    def close(self) -> None:
        """Stop the timers."""
        for timer in (self._timer, self._recovery_timer):
            if timer is not None:
                timer.cancel()

    # In the place of another scheduler.

    def _rejoin(self, peer: Peer, header: Header, request: messages.Rejoin) -> None:
        if self._begun and request.settings.cluster != self._settings.cluster:
            raise _other_cluster()
        if self._begun and self._welcome_back(peer, header, request):
            return
        if self._begun:
            _expel(peer, "it was not heard from in time")
            raise PeerError("this process was declared dead: it was not heard from in time; start it again")
        self._check_settings(request.settings)
        if request.role not in ROLES:
            raise UsageError(f"role {request.role!r}: expected one of {', '.join(ROLES)}")
        if self._recovery is None:
            self._recovery = Recovery()
        if not self._recovery.num_rejoined:
            self._recover_within(self._recovery_s)
        self._recovery.add(peer, header, request)
        if self._recovery.is_complete():
            self._recover()

    def _welcome_back(self, peer: Peer, header: Header, request: messages.Rejoin) -> bool:
        """Take in an observer that comes late: nobody knew of it."""
        member = Member(request.node, ROLES[request.role], request.rank, request.incarnation, ())
        if not self._membership.readmit(member, time.monotonic()):
            return False
        self._nodes[peer] = (request.node, request.incarnation)
        self._peers[request.node] = peer
        welcome = self._welcome(request.rank, request.incarnation)
        peer.send_frame(RESULT, request=header.request, meta=messages.encode(welcome))
        return True

    def _check_settings(self, settings: messages.Settings) -> None:
        for name in ("consistency", "stale", "num_servers", "num_workers", "replicas"):
            ours, theirs = getattr(self._settings, name), getattr(settings, name)
            if ours != theirs:
                raise PeerError(
                    f"the new scheduler was started with {name}={ours}, but the cluster of this process has "
                    f"{name}={theirs}: start it with the settings of the one before"
                )

    def _recover_within(self, seconds: float) -> None:
        if self._recovery_timer is not None:
            self._recovery_timer.cancel()
        self._recovery_timer = asyncio.get_running_loop().call_later(seconds, self._recover)

    def _recover(self) -> None:
        """Take over what the nodes know together, and go on; who is not back is dead."""
        recovery, self._recovery = self._recovery, None
        assert recovery is not None
        if self._recovery_timer is not None:
            self._recovery_timer.cancel()
        if recovery.num_rejoined:
            found = recovery.decide()
            for each in found.others:
                each.peer.send_error(each.header, _other_cluster())
            for each in found.expelled:
                _refuse(each, "it was not heard from in time")
            if found.lost_all_servers:  # nothing is left of that cluster: this one is new
                for each in found.returned:
                    _refuse(each, "the servers of its cluster are gone")
            else:
                self._take_over(found)
        for peer, header, request, body in recovery.held():
            try:
                self._serve(peer, header, request, memoryview(body))
            except PacelineError as error:
                peer.send_error(header, error)

    def _take_over(self, found: Found) -> None:
        self._begun = True
        self._settings = msgspec.structs.replace(self._settings, cluster=found.settings.cluster)
        self._membership = Membership.rebuild(
            found.members(),
            found.epoch,
            expected_servers=self._settings.num_servers,
            now_s=time.monotonic(),
            heartbeat_timeout_s=self._timeout_s,
        )
        if found.version:
            servers = {m.incarnation: m.rank for m in self._membership.members if m.role is Role.SERVER}
            self._planner, _ = Planner.rebuild(
                found.groups, found.version + VERSION_GAP, servers, self._settings.replicas
            )
        for table in found.tables:
            known = _KnownTable(table.number, table.declared, table.spec)
            self._known_tables.setdefault(table.spec.name, known)
        for peer, _, rejoin in found.returned:
            self._nodes[peer] = (rejoin.node, rejoin.incarnation)
            self._peers[rejoin.node] = peer
            self._endpoints[rejoin.node] = rejoin.endpoint
        self._last_job = found.account.number
        if found.poster is not None:
            self._job_poster, known_to_poster = found.poster.peer, found.poster.rejoin.job
            assert known_to_poster is not None
            memories, dead = found.memories(), found.dead_workers()
            num_workers = max(self._num_workers, *(rank + 1 for rank in (*memories, *dead)), 1)
            self._job = JobBoard.restore(found.account, known_to_poster, memories, dead=dead, num_workers=num_workers)
        for peer, header, rejoin in found.returned:
            welcome = self._welcome(rejoin.rank, rejoin.incarnation)
            peer.send_frame(RESULT, request=header.request, meta=messages.encode(welcome))
        self._obey([self._membership.publish()])
        self._tell_news_soon()

    # Membership.

    def _look_at_clock(self) -> None:
        now, due = time.monotonic(), self._looks_at_s
        self._looks_at_s = now + self._heartbeat_s
        self._timer = asyncio.get_running_loop().call_later(self._heartbeat_s, self._look_at_clock)
        # If this process was asleep, what the others have said meanwhile is still to be read.
        if now < due + self._heartbeat_s:
            self._obey(self._membership.handle(membership.Clock(now)))
            self._look_at_links(now)

    def _look_at_links(self, now_s: float) -> None:
        """Expel a server that others cannot reach, though this process hears all of them."""
        ranks = {m.incarnation: m.rank for m in self._membership.members if m.role is Role.SERVER}
        cut_off = self._reachability.decide(ranks.keys(), self._planner.groups, now_s)
        if cut_off is not None:
            others = " and ".join(f"server {ranks[other]}" for other in cut_off.others)
            reason = f"it and {others} could not reach each other for {self._timeout_s:g} s, though all of them live"
            self._obey(self._membership.handle(membership.Expel(cut_off.server, reason)))

    def _get_map(self, peer: Peer, header: Header, request: messages.GetMap, body: memoryview) -> Any:
        return self._map()

    def _get_settings(self, peer: Peer, header: Header, request: messages.GetSettings, body: memoryview) -> Any:
        return self._settings

    def _register(self, peer: Peer, header: Header, request: messages.Register, body: memoryview) -> Any:
        role = ROLES.get(request.role)
        if role is None:
            raise UsageError(f"role {request.role!r}: expected one of {', '.join(ROLES)}")
        if peer in self._nodes:
            raise ProtocolError(f"node {self._nodes[peer][0]!r} asked twice to join on one connection")
        servers = sum(member.role is Role.SERVER for member in self._membership.members)
        if (
            role is Role.SERVER
            and self._planner.version
            and servers >= self._settings.num_servers
            and not request.extra
        ):
            raise UsageError(
                f"this cluster has its {self._settings.num_servers} server(s): to add one while it runs, start it with "
                "'paceline server --join'"
            )
        event = membership.Register(request.node, role, (), time.monotonic(), request.rank)
        instructions = self._membership.handle(event)
        for instruction in instructions:
            if isinstance(instruction, membership.Refuse):
                raise UsageError(instruction.reason)
            if isinstance(instruction, membership.Dead):  # the node's former process, of which nothing stays
                self._declared_dead(instruction)
            if isinstance(instruction, membership.Welcome):
                self._nodes[peer] = (request.node, instruction.incarnation)
                welcome = instruction
        self._begun = True
        self._endpoints[request.node] = request.endpoint
        self._peers[request.node] = peer
        self._obey([each for each in instructions if not isinstance(each, membership.Dead)])
        return self._welcome(welcome.rank, welcome.incarnation)

    def _welcome(self, rank: int, incarnation: int) -> messages.Welcome:
        return messages.Welcome(
            rank=rank,
            incarnation=incarnation,
            heartbeat_s=self._heartbeat_s,
            settings=self._settings,
            cluster=self._map(),
        )

    def _heartbeat(self, peer: Peer, header: Header, request: messages.Heartbeat, body: memoryview) -> None:
        node = self._nodes.get(peer)
        if node is not None:
            for instruction in self._membership.handle(membership.Heartbeat(*node, time.monotonic())):
                assert isinstance(instruction, membership.Expelled)
                _expel(peer, "it was silent too long")
            self._reachability.heard(node[1], request.unreachable, time.monotonic())
            if self._job is not None and request.progress:
                self._job.note_progress(node[1], request.progress)

    def _leave(self, peer: Peer, header: Header, request: messages.Leave, body: memoryview) -> None:
        self._abandon_job_of(peer)
        node = self._nodes.pop(peer, None)
        if node is None:
            return
        member = next((m for m in self._membership.members if m.incarnation == node[1]), None)
        if member is not None and member.role is Role.WORKER and self._job is not None:
            self._job.worker_left(member.rank)
        if self._peers.get(node[0]) is peer:
            del self._peers[node[0]]
            self._endpoints.pop(node[0], None)
        self._obey(self._membership.handle(membership.Leave(*node)))

    def _obey(self, instructions: list[membership.Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, membership.Publish):
                self._plan()
                self._publish()
            elif isinstance(instruction, membership.Dead):
                self._declared_dead(instruction)

    def _declared_dead(self, dead: membership.Dead) -> None:
        if dead.role is Role.WORKER and self._job is not None:
            self._job.worker_lost(dead.rank, dead.incarnation)
            self._tell_news_soon()
        peer = self._peers.get(dead.node)
        if peer is not None:
            _expel(peer, dead.reason)

    # Chains.

    def _plan(self) -> None:
        """Have the chains follow the servers that live."""
        servers = {m.incarnation: m.rank for m in self._membership.members if m.role is Role.SERVER}
        self._leaving &= servers.keys()
        if self._planner.version:
            self._planner.servers_changed(servers, self._leaving)
        elif self._membership.ready and servers:
            self._planner.start(servers)
        self._let_go()

    def _publish(self) -> None:
        notice = messages.encode(self._map())
        for node in self._peers.values():
            node.send_frame(NOTICE, meta=notice)

    def _filled(self, peer: Peer, header: Header, request: messages.Filled, body: memoryview) -> None:
        # What was said by another map may not hold any more; by this one it is said again.
        if request.version != self._planner.version:
            return
        if self._planner.filled(request.target, from_bytes(request.buckets), request.version):
            self._publish()
            self._let_go()

    def _drain(self, peer: Peer, header: Header, request: messages.Drain, body: memoryview) -> None:
        node = self._nodes.get(peer)
        if node is None:
            return
        self._leaving.add(node[1])
        before = self._planner.version
        self._plan()
        if self._planner.version != before:
            self._publish()

    def _let_go(self) -> None:
        """Tell servers that want to leave, and hold nothing any more, that they may; those that nobody relieves too."""
        servers = [m for m in self._membership.members if m.role is Role.SERVER]
        alone = all(m.incarnation in self._leaving for m in servers)
        for member in servers:
            if member.incarnation in self._leaving and (alone or not self._planner.holds(member.incarnation)):
                _end(self._peers[member.node], "its buckets are on other servers")

    def _map(self) -> messages.ClusterMap:
        members = tuple(
            MemberInfo(
                node=member.node,
                role=member.role.name.lower(),
                rank=member.rank,
                incarnation=member.incarnation,
                endpoint=self._endpoints.get(member.node),
            )
            for member in self._membership.members
            if member.role is not Role.OBSERVER
        )
        return messages.ClusterMap(
            epoch=self._membership.epoch,
            members=members,
            version=self._planner.version,
            groups=tuple(
                messages.GroupInfo(group.members, group.filling, to_bytes(group.buckets))
                for group in self._planner.groups
            ),
            last_incarnation=self._membership.last_incarnation,
        )

    # Tables.

    def _declare_table(self, peer: Peer, header: Header, request: messages.DeclareTable, body: memoryview) -> int:
        spec = request.spec
        known = self._known_tables.get(spec.name)
        if known is None:
            if len(self._known_tables) >= _MAX_TABLES:
                raise UsageError(f"a cluster has at most {_MAX_TABLES} tables")
            number = 1 + max((table.number for table in self._known_tables.values()), default=0)
            known = self._known_tables[spec.name] = _KnownTable(number, spec)
        if spec not in (known.declared, known.spec):
            raise TableMismatchError(
                f"table {spec.name!r} was declared as {spec}, and is known as {known.spec}: use the same settings in "
                "every process, or another name"
            )
        return known.number

    def _note_update(self, peer: Peer, header: Header, request: messages.NoteUpdate, body: memoryview) -> None:
        known = self._known_tables.get(request.table)
        if known is None:
            raise UsageError(f"there is no table {request.table!r} to change the hyperparameters of: declare it first")
        from_fields(RULES, request.update)  # raises what the servers would
        if request.update["kind"] != known.spec.update["kind"]:
            raise UsageError(
                f"table {request.table!r} is updated by {known.spec.update['kind']}, and its state is of that rule: it "
                f"cannot become {request.update['kind']}"
            )
        known.spec = known.spec.with_update(request.update)

    def _list_tables(self, peer: Peer, header: Header, request: messages.ListTables, body: memoryview) -> Any:
        return [known.spec for known in sorted(self._known_tables.values(), key=lambda known: known.number)]

    # Work.

    def _post_job(self, peer: Peer, header: Header, request: messages.PostJob, body: memoryview) -> int:
        self._last_job = number = self._last_job + 1
        if self._job is not None:
            self._job.end()
        ranks = [m.rank for m in self._membership.members if m.role is Role.WORKER]
        # Strided work is dealt by rank: whoever is expected has a place in it, here or not.
        self._job = JobBoard(number, request, max(self._num_workers, max(ranks, default=-1) + 1), ranks)
        self._job_poster = peer
        self._tell_news_soon()
        for seeker, (asked, after) in list(self._job_seekers.items()):
            if after < number:
                del self._job_seekers[seeker]
                answer = messages.Job(number=number, description=request.description)
                seeker.send_frame(RESULT, request=asked.request, meta=messages.encode(answer))
        return number

    def _abandon_job_of(self, peer: Peer) -> None:
        """Have workers stop what nobody awaits any more."""
        if self._job is not None and peer is self._job_poster:
            self._job.fail("PeerError", "whoever posted the job is gone")

    def _get_job(self, peer: Peer, header: Header, request: messages.GetJob, body: memoryview) -> Any:
        job = self._job
        if self.ended.is_set():
            return messages.Job(number=-1)
        if job is not None and job.number > request.after:
            return messages.Job(number=job.number, description=job.description)
        if job is not None:
            job.worker_rests(self._rank(peer))
        self._job_seekers[peer] = (header, request.after)
        return _UNANSWERED

    def _rank(self, peer: Peer) -> int:
        node = self._nodes.get(peer)
        for member in self._membership.members:
            if node is not None and member.incarnation == node[1] and member.role is Role.WORKER:
                return member.rank
        raise PeerError("this process is no worker of the cluster (any more)")

    def _current(self, number: int) -> JobBoard:
        if self._job is None or self._job.number != number:
            raise PeerError(f"there is no job {number}, or it is over")
        return self._job

    def _unless_over(self, number: int) -> JobBoard | None:
        """Return a job; None if another one was posted since, or it died with its poster: it concerns nobody."""
        is_over = number <= self._last_job and (self._job is None or number != self._job.number)
        return None if is_over else self._current(number)

    def _take_lease(self, peer: Peer, header: Header, request: messages.TakeLease, body: memoryview) -> Any:
        job = self._unless_over(request.job)
        if job is None:
            return messages.Lease(lease=ALL_DONE)
        job.take_lease(peer, header, self._rank(peer), request.wait)
        return _UNANSWERED

    def _lease_done(self, peer: Peer, header: Header, request: messages.LeaseDone, body: memoryview) -> None:
        job = self._unless_over(request.job)
        if job is not None:
            job.lease_done(self._rank(peer), self._nodes[peer][1], request)
            job.note_progress(self._nodes[peer][1], request.progress)
            self._tell_news_soon()

    def _file_ended(self, peer: Peer, header: Header, request: messages.FileEnded, body: memoryview) -> None:
        job = self._unless_over(request.job)
        if job is not None:
            job.file_ended(request.file, request.num_shards)
            self._tell_news_soon()

    def _report(self, peer: Peer, header: Header, request: messages.Report, body: memoryview) -> None:
        job = self._unless_over(request.job)
        if job is not None:
            job.add_report(self._rank(peer), self._nodes[peer][1], request, bytes(body))

    def _job_failed(self, peer: Peer, header: Header, request: messages.JobFailed, body: memoryview) -> None:
        job = self._unless_over(request.job)
        if job is not None:
            job.fail(request.error, request.message)

    def _job_status(self, peer: Peer, header: Header, request: messages.JobStatus, body: memoryview) -> Any:
        workers = sum(member.role is Role.WORKER for member in self._membership.members)
        return self._current(request.job).state(workers)

    def _get_account(self, peer: Peer, header: Header, request: messages.GetAccount, body: memoryview) -> Any:
        return self._current(request.job).account()

    def _take_reports(self, peer: Peer, header: Header, request: messages.TakeReports, body: memoryview) -> Any:
        report = self._current(request.job).take_report()
        self._tell_news_soon()
        return None if report is None else (report[0], (report[1],))

    def _tell_news_soon(self) -> None:
        if not self._news_to_tell:
            self._news_to_tell = True
            asyncio.get_running_loop().call_soon(self._tell_news)

    def _tell_news(self) -> None:
        """Tell what became of the job to those that keep it: a batch for all that came at once."""
        self._news_to_tell = False
        news = None if self._job is None else self._job.take_news()
        if news is None:
            return
        notice = messages.encode(news)
        workers = {member.node for member in self._membership.members if member.role is Role.WORKER}
        for node, peer in self._peers.items():
            if node in workers or peer is self._job_poster:
                peer.send_frame(NOTICE, meta=notice)

    def _end_cluster(self, peer: Peer, header: Header, request: messages.EndCluster, body: memoryview) -> None:
        self.end("the cluster was told to end")

    def end(self, reason: str) -> None:
        """Tell every process of the cluster to end in good order."""
        for seeker, (asked, _) in self._job_seekers.items():
            seeker.send_frame(RESULT, request=asked.request, meta=messages.encode(messages.Job(number=-1)))
        self._job_seekers.clear()
        if self._job is not None:
            self._job.end()
        notice = messages.encode(messages.Ended(reason=reason))
        for peer in self._peers.values():
            peer.send_frame(NOTICE, meta=notice)
        self.ended.set()


def _other_cluster() -> PeerError:
    return PeerError(
        "the scheduler was started for a new cluster, and this process belongs to the one before: end it, and start it "
        "again if it is to join"
    )


def _refuse(returned: Returned, reason: str) -> None:
    _expel(returned.peer, reason)
    returned.peer.send_error(returned.header, PeerError(f"this process was declared dead: {reason}; start it again"))


def _end(peer: Peer, reason: str) -> None:
    peer.send_frame(NOTICE, meta=messages.encode(messages.Ended(reason=reason)))


def _expel(peer: Peer, reason: str) -> None:
    peer.send_frame(NOTICE, meta=messages.encode(messages.Expelled(reason=reason)))
