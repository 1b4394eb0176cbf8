"""The scheduler: who is a member, which table has which number, which worker reads which shard.

One asyncio loop with a transport's :class:`Handler`. Its rules are `membership` and `shards` of
:mod:`paceline.protocol`. It sees no parameters and no gradients; while tables and members stay as they are, nobody
waits for it.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec

from paceline.errors import PeerError, ProtocolError, TableMismatchError, UsageError
from paceline.protocol import Accept, Consistency, Membership, Role, Sequential, StalePolicy, membership
from paceline.ps import messages
from paceline.ps.job import JobBoard
from paceline.ps.messages import ALL_DONE, CALL, NOTICE, RESULT, MemberInfo, TableSpec
from paceline.ps.rules import RULES, from_fields
from paceline.transport import Endpoint, Handler, Header, Peer

_MAX_TABLES = 65535
_ROLES = {"server": Role.SERVER, "worker": Role.WORKER, "observer": Role.OBSERVER}
_UNANSWERED: Any = object()


class _KnownTable:
    """A table's number, its spec as first declared, and as it is now that hyperparameters may have changed."""

    __slots__ = ("declared", "number", "spec")

    def __init__(self, number: int, spec: TableSpec) -> None:
        self.number = number
        self.declared = self.spec = spec


class Scheduler(Handler):
    """The soft state of one cluster.

    Arguments: how many servers and workers are expected (iterations begin when so many workers have joined; more may
    join later), the `consistency` and `stale` policy, and after how long a silent member counts as dead.
    """

    def __init__(
        self,
        *,
        num_servers: int,
        num_workers: int,
        consistency: Consistency,
        stale: StalePolicy,
        heartbeat_timeout_s: float = 10.0,
    ) -> None:
        self._membership = Membership(num_servers, heartbeat_timeout_s)
        self._heartbeat_s = heartbeat_timeout_s / 10.0
        self._num_workers = num_workers
        if isinstance(consistency, Sequential) and not isinstance(stale, Accept):
            raise UsageError(
                f"stale-gradient policy {stale} has nothing to do under sequential consistency, where no gradient is "
                "stale: leave it out, or choose bounded or eventual"
            )
        self._settings = messages.Settings(
            consistency=str(consistency), stale=str(stale), num_servers=num_servers, num_workers=num_workers
        )
        self._peers: dict[str, Peer] = {}  # node → connection
        self._nodes: dict[Peer, tuple[str, int]] = {}  # connection → node, incarnation
        self._endpoints: dict[str, Endpoint | None] = {}
        self._known_tables: dict[str, _KnownTable] = {}
        self._complete = False  # whether all expected servers have joined once
        self._job: JobBoard | None = None
        self._job_poster: Peer | None = None
        self._job_seekers: dict[Peer, tuple[Header, int]] = {}
        self._timer: asyncio.TimerHandle | None = None
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
            messages.EndCluster: self._end_cluster,
            messages.Heartbeat: self._heartbeat,
            messages.Leave: self._leave,
        }

    @property
    def num_members(self) -> int:
        """How many processes belong to the cluster, observers included."""
        return len(self._membership.members)

    def connected(self, peer: Peer) -> None:
        """See :meth:`Handler.connected`."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._heartbeat_s, self._look_at_clock)

    def frame_received(self, peer: Peer, header: Header, meta: memoryview, body: memoryview) -> None:
        """See :meth:`Handler.frame_received`."""
        if header.kind not in (CALL, NOTICE):
            raise ProtocolError(f"the scheduler knows no frame of kind {header.kind}; is the peer of this version?")
        try:
            request = messages.decode_to_scheduler(meta)
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"the scheduler got a control message that it cannot read: {error}") from None
        answer = self._calls[type(request)](peer, header, request, body)
        if header.kind == CALL and answer is not _UNANSWERED:
            data, parts = answer if isinstance(answer, tuple) else (answer, ())
            peer.send_frame(RESULT, request=header.request, meta=messages.encode(data), body=parts)

    def disconnected(self, peer: Peer, reason: Exception | None) -> None:
        """See :meth:`Handler.disconnected`. A broken connection is a death: a process keeps one as long as it lives."""
        self._job_seekers.pop(peer, None)
        self._abandon_job_of(peer)
        node = self._nodes.pop(peer, None)
        if node is not None:
            if self._peers.get(node[0]) is peer:
                del self._peers[node[0]]
                self._endpoints.pop(node[0], None)
            self._obey(self._membership.handle(membership.Disconnected(*node, time.monotonic())))

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()

    # Membership.

    def _look_at_clock(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._heartbeat_s, self._look_at_clock)
        self._obey(self._membership.handle(membership.Clock(time.monotonic())))

    def _get_map(self, peer: Peer, header: Header, request: messages.GetMap, body: memoryview) -> Any:
        return self._map()

    def _get_settings(self, peer: Peer, header: Header, request: messages.GetSettings, body: memoryview) -> Any:
        return self._settings

    def _register(self, peer: Peer, header: Header, request: messages.Register, body: memoryview) -> Any:
        role = _ROLES.get(request.role)
        if role is None:
            raise UsageError(f"role {request.role!r}: expected one of {', '.join(_ROLES)}")
        if peer in self._nodes:
            raise ProtocolError(f"node {self._nodes[peer][0]!r} asked twice to join on one connection")
        if role is Role.SERVER and self._complete:
            raise UsageError(
                f"this cluster has had its {self._settings.num_servers} server(s), and its tables are placed on them: "
                "no other can join; to use more, start a new cluster with 'paceline scheduler --servers N'"
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
        self._complete |= self._membership.ready
        self._endpoints[request.node] = request.endpoint
        self._peers[request.node] = peer
        self._obey([each for each in instructions if not isinstance(each, membership.Dead)])
        return messages.Welcome(
            rank=welcome.rank,
            incarnation=welcome.incarnation,
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
                notice = messages.encode(self._map())
                for node in self._peers.values():
                    node.send_frame(NOTICE, meta=notice)
            elif isinstance(instruction, membership.Dead):
                self._declared_dead(instruction)

    def _declared_dead(self, dead: membership.Dead) -> None:
        if dead.role is Role.WORKER and self._job is not None:
            self._job.worker_lost(dead.rank, dead.incarnation)
        peer = self._peers.get(dead.node)
        if peer is not None:
            _expel(peer, dead.reason)

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
        return messages.ClusterMap(epoch=self._membership.epoch, members=members, ready=self._membership.ready)

    # Tables.

    def _declare_table(self, peer: Peer, header: Header, request: messages.DeclareTable, body: memoryview) -> int:
        spec = request.spec
        known = self._known_tables.get(spec.name)
        if known is None:
            if len(self._known_tables) >= _MAX_TABLES:
                raise UsageError(f"a cluster has at most {_MAX_TABLES} tables")
            known = self._known_tables[spec.name] = _KnownTable(len(self._known_tables) + 1, spec)
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
        number = 1
        if self._job is not None:
            number = self._job.number + 1
            self._job.end()
        ranks = [m.rank for m in self._membership.members if m.role is Role.WORKER]
        # Strided work is dealt by rank: whoever is expected has a place in it, here or not.
        self._job = JobBoard(number, request, max(self._num_workers, max(ranks, default=-1) + 1), ranks)
        self._job_poster = peer
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
        """Return a job; None if another one was posted since: what workers still say of it concerns nobody."""
        return None if self._job is not None and number < self._job.number else self._current(number)

    def _take_lease(self, peer: Peer, header: Header, request: messages.TakeLease, body: memoryview) -> Any:
        job = self._unless_over(request.job)
        if job is None:
            return messages.Lease(lease=ALL_DONE)
        job.take_lease(peer, header, self._rank(peer), request.wait)
        return _UNANSWERED

    def _lease_done(self, peer: Peer, header: Header, request: messages.LeaseDone, body: memoryview) -> None:
        job = self._unless_over(request.job)
        if job is not None:
            job.lease_done(self._rank(peer), request)
            job.note_progress(self._nodes[peer][1], request.progress)

    def _file_ended(self, peer: Peer, header: Header, request: messages.FileEnded, body: memoryview) -> None:
        job = self._unless_over(request.job)
        if job is not None:
            job.file_ended(request.file, request.num_shards)

    def _report(self, peer: Peer, header: Header, request: messages.Report, body: memoryview) -> None:
        job = self._unless_over(request.job)
        if job is not None:
            job.add_report(self._rank(peer), request.fields, bytes(body))

    def _job_failed(self, peer: Peer, header: Header, request: messages.JobFailed, body: memoryview) -> None:
        job = self._unless_over(request.job)
        if job is not None:
            job.fail(request.error, request.message)

    def _job_status(self, peer: Peer, header: Header, request: messages.JobStatus, body: memoryview) -> Any:
        workers = sum(member.role is Role.WORKER for member in self._membership.members)
        return self._current(request.job).state(workers)

    def _take_reports(self, peer: Peer, header: Header, request: messages.TakeReports, body: memoryview) -> Any:
        report = self._current(request.job).take_report()
        return None if report is None else (report[0], (report[1],))

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


def _expel(peer: Peer, reason: str) -> None:
    peer.send_frame(NOTICE, meta=messages.encode(messages.Expelled(reason=reason)))
