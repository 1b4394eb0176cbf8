"""The scheduler of a simulated cluster: a thin runtime of the scheduler's core, and of shards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from typing_extensions import override

from paceline.protocol.jobs import shards
from paceline.protocol.jobs.shards import Granted, Shards
from paceline.protocol.membership import Role
from paceline.protocol.scheduler import Phase, Returned, SchedulerCore, View, events
from paceline.simulation.messages import (
    Beat,
    Filled,
    Going,
    Key,
    KnowDone,
    KnownDone,
    LeaseAnswer,
    LeaseRequest,
    Map,
    PreparedView,
    PrepareView,
    PromiseTerm,
    RegisterNode,
    Rejoin,
    ShardDone,
    ShardDoneOk,
    Thrown,
    Welcomed,
)
from paceline.simulation.network import Connection, Process
from paceline.simulation.node import HEARTBEAT_S, SCHEDULER, TIMEOUT_S

if TYPE_CHECKING:
    from paceline.simulation.cluster import Cluster

_FLUSH_S = 0.005


class Scheduler(Process):
    """One scheduler process, at the address at which they all listen."""

    def __init__(self, name: str, cluster: Cluster, *, replaces: bool, accepts_minority: bool) -> None:
        super().__init__(name, cluster.network)
        cluster.network.listen(SCHEDULER, self)
        self.cluster = cluster
        settings = cluster.settings
        self.core = SchedulerCore(
            num_servers=settings.num_servers,
            replicas=settings.replicas,
            heartbeat_timeout_s=TIMEOUT_S,
            cluster=name,
            salt=cluster.random.getrandbits(16),
            replaces=replaces,
            accepts_minority=accepts_minority,
            num_buckets=settings.num_buckets,
        )
        self.shards = Shards([settings.num_shards], settings.epochs)
        self._waiting: list[tuple[Connection, Any]] = []
        self._answers: dict[int, LeaseAnswer] = {}
        self._requests: dict[int, int] = {}
        self._uncommitted: dict[Key, tuple[int, int, set[int]]] = {}  # shard → worker, lease, who has to know yet
        self._known_done: set[Key] = set()
        self._nodes: dict[int, Connection] = {}  # the members that were welcomed, by incarnation
        self._flushes = False
        self.later(HEARTBEAT_S, self._tick)
        self._handlers: dict[type, Any] = {
            LeaseRequest: self._on_lease_request,
            ShardDone: self._on_shard_done,
            KnownDone: self._on_known_done,
        }

    @property
    def is_established(self) -> bool:
        """Whether it leads a cluster."""
        return self.core.is_established and self.core.phase is Phase.LEADING

    # Connections.

    @override
    def accept(self, connection: Connection, hello: Any) -> bool:
        return True

    @override
    def receive(self, connection: Connection, frame: Any) -> None:
        event = self._event_of(connection, frame)
        if event is not None:
            self._feed(event)
            if isinstance(event, events.Rejoin):
                self._look_for_ended()
            elif isinstance(event, events.Leave):
                connection.send(self, Thrown())
        elif not self.core.is_established:
            self._waiting.append((connection, frame))
        else:
            self._handlers[type(frame)](connection, frame)

    def _event_of(self, connection: Connection, frame: Any) -> events.Event | None:
        match frame:
            case RegisterNode(is_server, is_extra):
                node = connection.ends[0]
                role = Role.SERVER if is_server else Role.WORKER
                return events.Register(connection, node.name, role, address=node.name, is_extra=is_extra)
            case Rejoin(member, cluster, view, promised, has_committed, former, is_leaving):
                returned = Returned(
                    connection,
                    member,
                    cluster,
                    view,
                    promised,
                    has_committed,
                    is_leaving,
                    former=former,
                    knowledge=frame,
                )
                return events.Rejoin(returned)
            case Beat(_, unreachable):
                return events.Heartbeat(connection, unreachable)
            case Filled(version, target, buckets):
                return events.Filled(version, target, buckets)
            case PreparedView(term, epoch):
                return events.Prepared(connection, term, epoch)
            case PromiseTerm(term):
                return events.Promised(connection, term)
            case Going():
                is_server = connection.ends[0].is_server  # type: ignore[attr-defined]
                return events.Drain(connection) if is_server else events.Leave(connection)
        return None

    @override
    def closed(self, connection: Connection) -> None:
        incarnation = self.core.incarnation_of(connection)
        self._waiting = [each for each in self._waiting if each[0] is not connection]
        if incarnation is not None and self._nodes.get(incarnation) is connection:
            del self._nodes[incarnation]
        self._feed(events.Disconnected(connection))
        if incarnation is not None:
            self.later(2 * self.network.latency_s, self._probe, connection.ends[0].name, incarnation)

    def _tick(self) -> None:
        self._feed(events.Clock())
        self._look_for_ended()
        if self.core.needed:
            self.cluster.waits_for(self, [member.node for member in self.core.needed])
        self.later(HEARTBEAT_S, self._tick)

    # What is known of processes: by the kernel, if all are on one host, or by what nobody listens at any more.

    def process_ended(self, name: str) -> None:
        """Take the kernel's word that a process has ended."""
        member = self.core.membership.named(name)
        if member is not None:
            self._feed(events.Ended(member.incarnation))

    def _look_for_ended(self) -> None:
        """While members of a former scheduler are awaited, look which of them have ended."""
        for member in self.core.awaited:
            if self.cluster.is_one_host:
                if not self._lives(member.node):
                    self._feed(events.Ended(member.incarnation))
            else:
                self._probe(member.node, member.incarnation)

    def _probe(self, name: str, incarnation: int) -> None:
        if not self.cluster.is_one_host and not self._lives(name) and self.core.membership.find(incarnation):
            self._feed(events.Doubted(incarnation))

    def _lives(self, name: str) -> bool:
        return name in self.network.processes

    # The core.

    def _feed(self, event: events.Event) -> None:
        for instruction in self.core.handle(event, self.own_now_s):
            self._execute(instruction)
        if self.core.is_established:
            waiting, self._waiting = self._waiting, []
            for connection, frame in waiting:
                self.receive(connection, frame)

    def _execute(self, instruction: events.Instruction) -> None:
        match instruction:
            case events.Welcome(peer, member):
                assert isinstance(peer, Connection)
                self._nodes[member.incarnation] = peer
                view = self._view_for(peer, self.core.committed)
                peer.send(self, Welcomed(member, self.core.cluster, view))
                if member.role is Role.SERVER:
                    peer.send(self, KnowDone(tuple(sorted(self._known_done))))
                if member.incarnation in self._answers:  # it may have asked before this
                    peer.send(self, self._answers[member.incarnation])
            case events.Expel(peer):
                assert isinstance(peer, Connection)
                peer.send(self, Thrown())
            case events.Foreign(peer):
                assert isinstance(peer, Connection)
                self.network.close(peer)  # it comes again
            case events.Removed(member, reason):
                self._removed(member, reason)
            case events.TakenOver():
                self._take_over(instruction)
            case events.Promise(peers, term):
                for each in peers:
                    assert isinstance(each, Connection)
                    each.send(self, PromiseTerm(term))
            case events.Prepare(peers, view):
                for each in peers:
                    assert isinstance(each, Connection)
                    each.send(self, PrepareView(view))
            case events.Publish(view):
                self._publish(view)
            case events.FlushSoon():
                if not self._flushes:
                    self._flushes = True
                    self.later(_FLUSH_S, self._flush)
            case events.Release(peer):
                assert isinstance(peer, Connection)
                peer.send(self, Going(0))
            case events.Lost(buckets):
                if self.core.term >= self.cluster.oracle.view.term:  # else nobody listens to it any more
                    self.cluster.lost(buckets)
            case events.Note(text):
                self.cluster.note(text)
            case events.Superseded():
                self.cluster.fired["superseded"] += 1
                self.cluster.crash(self)
            case events.Refuse(_, reason):
                raise AssertionError(reason)

    def _flush(self) -> None:
        self._flushes = False
        self._feed(events.Flush())

    def _removed(self, member: Any, reason: str | None) -> None:
        if reason is not None:
            self.cluster.fired["dead"] += 1
            self.cluster.note(f"{member.node} ({member.incarnation}) is removed: {reason}")
            if "could not reach" in reason:
                self.cluster.fired["expel"] += 1
        self._nodes.pop(member.incarnation, None)
        if member.role is Role.WORKER:
            self._work(shards.Lost(member.incarnation))
        self._commit()

    def _publish(self, view: View) -> None:
        self.cluster.oracle.published(view)
        for connection in list(self._nodes.values()):
            connection.send(self, Map(self._view_for(connection, view)))
        self._commit()

    def _view_for(self, connection: Connection, view: View) -> View:
        """What a node is told of a view."""
        return view if connection.ends[0].is_server else view.without_workers()  # type: ignore[attr-defined]

    def _take_over(self, taken: events.TakenOver) -> None:
        frames = [each.knowledge for each in taken.returned if isinstance(each.knowledge, Rejoin)]
        living = {frame.member.incarnation for frame in frames}
        self._known_done = {key for frame in frames for key in frame.done}
        held = [grant for frame in frames for grant in frame.held if frame.member.incarnation in living]
        settings = self.cluster.settings
        self.shards = Shards.restore([settings.num_shards], settings.epochs, done=self._known_done, held=held)
        self.cluster.oracle.done |= self._known_done

    # Shards.

    def _work(self, event: shards.Event) -> None:
        for instruction in self.shards.handle(event):
            match instruction:
                case Granted(worker):
                    self._lease(worker, instruction)
                case shards.Exhausted(worker):
                    self._lease(worker, None)
                case shards.Wait():
                    pass

    def _lease(self, worker: int, granted: Granted | None) -> None:
        self._answers[worker] = LeaseAnswer(self._requests[worker], granted, False)
        if worker in self._nodes:
            self._nodes[worker].send(self, self._answers[worker])

    def _is_member(self, incarnation: int) -> bool:
        return self.core.membership.find(incarnation) is not None

    def _on_lease_request(self, connection: Connection, frame: LeaseRequest) -> None:
        if not self._is_member(frame.worker):
            connection.send(self, Thrown())
            return
        answer = self._answers.get(frame.worker)
        if answer is not None and answer.number == frame.number:
            connection.send(self, answer)
            return
        self._requests[frame.worker] = frame.number
        if frame.worker not in self.shards.waiting:
            self._work(shards.Lease(frame.worker))
        answer = self._answers.get(frame.worker)
        if answer is None or answer.number != frame.number:
            connection.send(self, LeaseAnswer(frame.number, None, True))

    def _servers(self) -> set[int]:
        return {member.incarnation for member in self.core.membership.of(Role.SERVER)}

    def _on_shard_done(self, connection: Connection, frame: ShardDone) -> None:
        if not self._is_member(frame.worker):
            return
        key = self.shards.shard_of(frame.lease)
        if key is None:
            if all(lease != frame.lease for _, lease, _ in self._uncommitted.values()):
                connection.send(self, ShardDoneOk(frame.lease))
            return
        self._work(shards.Done(frame.worker, frame.lease))
        self._known_done.add(key)
        servers = self._servers()
        self._uncommitted[key] = frame.worker, frame.lease, servers
        for server in sorted(servers):
            if server in self._nodes:
                self._nodes[server].send(self, KnowDone((key,)))
        self._commit()

    def _on_known_done(self, _: Connection, frame: KnownDone) -> None:
        for key in frame.keys:
            if key in self._uncommitted:
                self._uncommitted[key][2].discard(frame.incarnation)
        self._commit()

    def _commit(self) -> None:
        """Confirm those shards that all servers know to be done."""
        servers = self._servers()
        for key, (worker, lease, ignorant) in list(self._uncommitted.items()):
            if not ignorant & servers:
                del self._uncommitted[key]
                self.cluster.oracle.shard_done(key)
                if worker in self._nodes:
                    self._nodes[worker].send(self, ShardDoneOk(lease))
