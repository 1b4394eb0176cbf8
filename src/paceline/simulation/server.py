"""A server of a simulated cluster: a thin runtime of the protocol's machines around a toy table."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from paceline.protocol import clocks
from paceline.protocol.buckets import buckets_in
from paceline.protocol.clocks import Gate
from paceline.protocol.iterations import Iterations, Sum, Takeover
from paceline.protocol.membership import Role
from paceline.protocol.reachability import Silence
from paceline.protocol.replication import (
    AGGREGATE,
    Acknowledge,
    Acknowledged,
    Apply,
    Change,
    Confirmed,
    Drop,
    Event,
    Forget,
    Forward,
    Forwarded,
    Hold,
    Lead,
    LinkDown,
    Links,
    LinkUp,
    Load,
    Push,
    Ready,
    Refuse,
    Replication,
    Report,
    Retry,
    StateReceived,
)
from paceline.protocol.scheduler import View
from paceline.protocol.shards import Granted
from paceline.simulation.messages import (
    Answer,
    Check,
    Clocks,
    Filled,
    FinishGate,
    ForwardOk,
    ForwardPush,
    Going,
    JoinedGate,
    JoinGate,
    Key,
    KnowDone,
    KnownDone,
    Map,
    Part,
    Ping,
    Pong,
    PrepareView,
    PromiseTerm,
    PullPart,
    PushPart,
    ReadyFrame,
    Stale,
    State,
    StateOk,
    Synced,
    Thrown,
    TickClock,
    Welcomed,
)
from paceline.simulation.network import Connection
from paceline.simulation.node import Node, servers_of
from paceline.simulation.oracle import Data, Violation

if TYPE_CHECKING:
    from paceline.simulation.cluster import Cluster

_STATES_UNDER_WAY = 2


class _Job:
    """A token of Replication: what came, from where, and the event to feed."""

    __slots__ = ("connection", "event", "frame", "parts")

    def __init__(self, connection: Connection | None, frame: Any, parts: tuple[Part, ...]) -> None:
        self.connection = connection
        self.frame = frame
        self.parts = parts
        self.event: Event | None = None


class Server(Node):
    """Replication, a gate, iterations if sequential, and a table of sums."""

    def __init__(self, host: str, name: str, cluster: Cluster, *, is_extra: bool) -> None:
        super().__init__(host, name, cluster, is_server=True, is_extra=is_extra)
        self.data: dict[int, Data] = {}
        self.gate: Gate | None = None
        self.done: set[Key] = set()
        self._counted: set[int] = set()
        self._named: set[int] = set()  # workers that some view has named, and none has excluded since
        self.replication: Replication
        self.iterations: Iterations | None = None
        self.takeover = Takeover()  # where there are no iterations
        self._links: dict[int, Connection | None] = {}
        self._connecting: set[int] = set()
        self._silence = Silence()
        self._states_under_way: dict[int, int] = {}
        self._reports: dict[int, Filled] = {}
        self._held_reports: dict[int, Filled] = {}
        self._early: list[tuple[Connection, Any]] = []
        self._before_gate: list[tuple[Connection, Any]] = []
        self._reads: dict[int, tuple[Connection, PullPart, bool]] = {}  # ticket → …, whether the gate is open
        self._ticket = 0
        # Sequential: bucket → iteration → worker → values
        self._parts: dict[int, dict[int, dict[int, list[tuple[int, int, int]]]]] = {}
        self._handlers: dict[type, Any] = {
            Welcomed: self.on_welcomed,
            Thrown: self.on_thrown,
            Map: self.on_map,
            PrepareView: self.on_prepare,
            PromiseTerm: self.on_promise,
            Going: self._on_drained,
            KnowDone: self._on_know_done,
            JoinGate: self._on_join,
            FinishGate: self._on_finish,
            PushPart: self._on_push,
            TickClock: self._on_tick,
            PullPart: self._on_pull,
            Synced: self._on_synced,
            ForwardPush: self._on_forward,
            ForwardOk: self._on_forward_ok,
            State: self._on_state,
            StateOk: self._on_state_ok,
            ReadyFrame: self._on_ready,
            Clocks: self._on_clocks,
            Check: self._on_check,
            Ping: self._on_ping,
            Pong: self._on_pong,
        }

    # Connections.

    @override
    def accept(self, connection: Connection, hello: Any) -> bool:
        _, source, target = hello
        if target != self.incarnation or self.is_gone(source):
            return False
        connection.owner = source
        return True

    @override
    def opened(self, connection: Connection) -> None:
        kind, _, target = connection.hello
        if kind == "node":
            self.scheduler_opened(connection)
            return
        self._connecting.discard(target)
        if target not in self._links or self._links[target] is not None:
            self.network.close(connection)
            return
        self._links[target] = connection
        self._states_under_way[target] = 0
        self._send_clocks(target)
        self._handle(LinkUp(target))
        self._fill(target)

    def _send_clocks(self, target: int) -> None:
        connection = self._links.get(target)
        if connection is not None and self.gate is not None:
            table = tuple((worker, clock, worker in self._counted) for worker, clock in self.gate.clocks.items())
            connection.send(self, Clocks(self.gate.minimum, table))

    @override
    def refused(self, name: str, hello: Any) -> None:
        kind, _, target = hello
        if kind == "node":
            self._connect()
            return
        self._connecting.discard(target)
        if target in self._links and self._links[target] is None:
            self._connect_to(target)

    @override
    def closed(self, connection: Connection) -> None:
        if connection.hello[0] == "node":
            self.scheduler_closed()
            return
        if connection.ends[0] is not self:
            self._reads = {ticket: read for ticket, read in self._reads.items() if read[0] is not connection}
            return
        target = connection.hello[2]
        if not connection.was_opened:
            self._connecting.discard(target)
        if target in self._links and self._links[target] in (connection, None):
            if self._links[target] is connection:
                self._links[target] = None
                self._handle(LinkDown(target))
            self._connect_to(target)

    def _connect_again(self) -> None:
        """Connect to those whose address came after the map that names them."""
        for target, link in self._links.items():
            if link is None:
                self._connect_to(target)

    def _connect_to(self, target: int) -> None:
        address = self.address(target)
        if address is not None and target not in self._connecting:
            self._connecting.add(target)
            self.network.connect(self, address, ("server", self.incarnation, target))

    @override
    def receive(self, connection: Connection, frame: Any) -> None:
        if self.is_current(connection):
            self._handlers[type(frame)](connection, frame)

    # Membership.

    @override
    def welcomed(self) -> None:
        self.replication = self.cluster.make_replication(self.incarnation)

    def _begin(self, expected_workers: int, first_clock: int) -> None:
        self.gate = self.cluster.make_gate(expected_workers, first_clock)
        if self.cluster.is_sequential:
            self.iterations = self.cluster.make_iterations(self.replication, first_clock)

    @override
    def attached(self) -> None:
        for report in self._reports.values():
            self.tell(report)

    @override
    def held(self) -> tuple[tuple[Granted, ...], frozenset[Key]]:
        return (), frozenset(self.done)

    def leave(self) -> None:
        """Ask to be drained."""
        self.is_leaving = True
        self.tell(Going(self.incarnation))

    def _on_drained(self, _: Connection, __: Going) -> None:
        self.cluster.ended(self)

    def _on_know_done(self, connection: Connection, frame: KnowDone) -> None:
        self.done.update(frame.keys)
        connection.send(self, KnownDone(self.incarnation, frame.keys))

    @override
    def mapped(self, former: View | None, new: View) -> None:
        if self.gate is not None and (former is None or new.epoch > former.epoch):
            for worker in [worker for worker in self.gate.clocks if self.is_gone(worker)]:
                self._gate(clocks.Leave(worker))
                self._left(worker)
            for worker in self._named:  # also one that was never seen at the gate
                if self.is_gone(worker):
                    self._left(worker)
        self._named = {worker for worker in self._named if not self.is_gone(worker)}
        self._named |= {member.incarnation for member in new.members if member.role is Role.WORKER}
        if new.version > self.replication.version:
            self._change(new)
        else:
            self._connect_again()
        self._serve()

    def _change(self, new: View) -> None:
        reads, self._reads = self._reads, {}
        for connection, frame, _ in reads.values():
            connection.send(self, Stale(frame.number, new))
        self._reports, self._held_reports = {}, {}
        self._states_under_way = dict.fromkeys(self._states_under_way, 0)
        self._handle(Change(new.version, new.groups))
        for target in self.replication.filling:  # it may have been in no chain by a view that this server has missed
            self._send_clocks(target)
        if self.incarnation not in servers_of(new.groups):
            # Workers that come now do not come here: what the gate knows is of no use when it has buckets again.
            self.gate, self.iterations, self.takeover = None, None, Takeover()
            self._counted, self._parts, self._before_gate = set(), {}, []
        self._fill_all()
        if self.gate is not None:
            self._catch_up()
        early, self._early = self._early, []
        for connection, frame in early:
            self.receive(connection, frame)

    # Instructions.

    def _handle(self, event: Event) -> None:
        for instruction in self.replication.handle(event):
            match instruction:
                case Apply(token, buckets):
                    self._apply(token, buckets)  # type: ignore[arg-type]
                case Forward(token, target, number, buckets):
                    self._forward(token, target, number, buckets)  # type: ignore[arg-type]
                case Acknowledge(token):
                    self._acknowledge(token)  # type: ignore[arg-type]
                case Refuse(token):
                    self._refuse(token)  # type: ignore[arg-type]
                case Forget():
                    pass
                case Retry(token):
                    self._handle(token.event)  # type: ignore[attr-defined]
                case Load(token, bucket):
                    state = token.frame  # type: ignore[attr-defined]
                    self.data[bucket] = Data(state.value, dict(state.marks))
                    token.connection.send(self, StateOk(state.number))  # type: ignore[attr-defined]
                case Drop(buckets):
                    for bucket in buckets_in(buckets):
                        del self.data[bucket]
                case Hold(buckets):
                    for bucket in buckets_in(buckets):
                        self.data[bucket] = Data()
                    if self.gate is None:
                        self._begin(1, 0)
                case Lead(buckets, _, behind):
                    self._lead(buckets, behind)
                case Ready(target, version):
                    link = self._links.get(target)
                    if link is not None:
                        link.send(self, ReadyFrame(version))
                case Links(targets):
                    self._have_links(targets)
                case Report(version, target, buckets):
                    self._held_reports[target] = Filled(version, target, buckets)
                    self._report()

    def _report(self) -> None:
        """Tell the scheduler who is filled, as far as may be."""
        for target, report in list(self._held_reports.items()):
            if self.iterations is None or self.iterations.may_report(report.buckets):
                self._reports[target] = self._held_reports.pop(target)
                self.tell(report)

    def _apply(self, job: _Job, buckets: int) -> None:
        for worker, values in job.parts:
            for bucket, index, value in values:
                if buckets >> bucket & 1:
                    self.data[bucket].apply(worker, index, value, self.name)

    def _forward(self, job: _Job, target: int, number: int, buckets: int) -> None:
        link = self._links.get(target)
        if link is None:
            return
        parts = tuple((worker, tuple(v for v in values if buckets >> v[0] & 1)) for worker, values in job.parts)
        event = job.event
        assert isinstance(event, Push | Forwarded)
        version = self.replication.version
        link.send(self, ForwardPush(number, event.incarnation, event.sequence, version, buckets, parts))

    def _acknowledge(self, job: _Job) -> None:
        if job.connection is None:
            assert self.iterations is not None
            self.iterations.acknowledged(job.frame)
        elif isinstance(job.frame, PushPart):
            job.connection.send(self, Answer(job.frame.number, 0))
        else:
            job.connection.send(self, ForwardOk(job.frame.number))

    def _refuse(self, job: _Job) -> None:
        assert job.connection is not None
        assert self.map is not None
        job.connection.send(self, Stale(job.frame.number, self.map))

    def _lead(self, buckets: int, behind: frozenset[int]) -> None:
        self.cluster.oracle.leads(self.replication.version, buckets, self.incarnation, self.name)
        assert self.map is not None
        workers = self._counted | self._named
        if self.iterations is None:
            self.takeover.lead(self.replication.version, buckets, workers)
            return
        for bucket in [bucket for bucket in self._parts if not buckets >> bucket & 1]:
            del self._parts[bucket]
        self._sum(self.iterations.lead(self.replication.version, buckets, workers, behind))

    def _have_links(self, targets: frozenset[int]) -> None:
        for target in [target for target in self._links if target not in targets]:
            link = self._links.pop(target)
            self._states_under_way.pop(target, None)
            if link is not None:
                self.network.close(link)
                self._handle(LinkDown(target))
        for target in sorted(targets):
            if target not in self._links:
                self._links[target] = None
                self._connect_to(target)

    def _fill_all(self) -> None:
        for target in self.replication.filling:
            self._fill(target)

    def _fill(self, target: int) -> None:
        link = self._links.get(target)
        while link is not None and self._states_under_way[target] < _STATES_UNDER_WAY:
            found = self.replication.next_fill(target)
            if found is None:
                return
            number, bucket, state = found
            self._states_under_way[target] += 1
            data = self.data[bucket]
            frame = State(number, self.replication.version, bucket, state, data.value, dict(data.marks))
            link.send(self, frame)

    # Other servers.

    @override
    def unreachable(self) -> tuple[int, ...]:
        found = self._silence.look(self._links)
        for target, link in self._links.items():
            if link is not None:
                link.send(self, Ping())
                self._check(target, link)
        return found

    def _check(self, target: int, link: Connection) -> None:
        """Have the server behind compare the buckets."""
        for bucket in buckets_in(self.replication.checkable(target)):
            data, applied = self.data[bucket], self.replication.applied_to(bucket)
            link.send(self, Check(self.replication.version, bucket, applied, data.value, dict(data.marks)))

    def _on_check(self, connection: Connection, frame: Check) -> None:
        # One of a newer map is let go: the pushes before it wait in the replication, and would come behind it.
        if not self.replication.is_comparable(connection.owner, frame.version, frame.bucket):
            return
        self.cluster.fired["compared"] += 1
        data = self.data[frame.bucket]
        if self.replication.applied_to(frame.bucket) != frame.applied:
            raise Violation(
                f"{self.name} counts {self.replication.applied_to(frame.bucket)} as applied to bucket {frame.bucket}, "
                f"the server before it {frame.applied} (replicas are equal)"
            )
        if (data.value, data.marks) != (frame.value, frame.marks):
            raise Violation(
                f"{self.name} has {data.marks} in bucket {frame.bucket}, the server before it {frame.marks} (replicas "
                "are equal)"
            )

    def _on_ping(self, connection: Connection, _: Ping) -> None:
        connection.send(self, Pong())

    def _on_pong(self, connection: Connection, _: Pong) -> None:
        self._silence.heard(connection.hello[2])

    def _feed(self, job: _Job, event: Event) -> None:
        job.event = event
        self._handle(event)
        self._serve()

    def _on_forward(self, connection: Connection, frame: ForwardPush) -> None:
        job = _Job(connection, frame, frame.parts)
        self._feed(
            job,
            Forwarded(job, connection.owner, frame.incarnation, frame.sequence, frame.version, frame.buckets),
        )

    def _on_forward_ok(self, connection: Connection, frame: ForwardOk) -> None:
        self._handle(Acknowledged(connection.hello[2], frame.number))
        self._fill_all()
        self._serve()

    def _on_state(self, connection: Connection, frame: State) -> None:
        job = _Job(connection, frame, ())
        self._feed(job, StateReceived(job, connection.owner, frame.version, frame.bucket, frame.filter))

    def _on_state_ok(self, connection: Connection, frame: StateOk) -> None:
        target = connection.hello[2]
        self._handle(Confirmed(target, frame.number))
        self._states_under_way[target] = max(0, self._states_under_way.get(target, 0) - 1)
        self._fill(target)

    def _on_ready(self, connection: Connection, frame: ReadyFrame) -> None:
        if frame.version > self.replication.version:
            self._early.append((connection, frame))
        elif self.iterations is not None:
            self._sum(self.iterations.synced(connection.owner, frame.version))
            self._serve()

    def _on_clocks(self, _: Connection, frame: Clocks) -> None:
        if self.replication.primary:
            return
        if self.gate is None:
            self._begin(0, frame.minimum)
        assert self.gate is not None
        # Those who count first, the lowest first: the first who joins an empty gate says where it stands.
        for worker, clock, counted in sorted(frame.clocks, key=lambda each: (not each[2], each[1])):
            if worker not in self.gate.clocks and not self.is_gone(worker):
                self._gate(clocks.Join(worker, clock))
                if not counted:
                    self._gate(clocks.Finish(worker))
        self._catch_up()
        self._serve()

    def _catch_up(self) -> None:
        before, self._before_gate = self._before_gate, []
        for connection, frame in before:
            self.receive(connection, frame)

    # Workers.

    def _is_early(self, connection: Connection, frame: Any) -> bool:
        """Whether a worker's frame has to wait for the map, or is of one who is gone."""
        if self.is_gone(frame.worker):
            self.cluster.oracle.refused(frame.worker, self.name)
            connection.send(self, Thrown())
            return True
        if frame.version > self.replication.version:
            self._early.append((connection, frame))
            return True
        return False

    def _on_push(self, connection: Connection, frame: PushPart) -> None:
        if self._is_early(connection, frame):
            return
        job = _Job(connection, frame, ((frame.worker, frame.values),))
        if self.iterations is None:
            self._feed(job, Push(job, frame.worker, frame.sequence, frame.version, frame.buckets))
            return
        if frame.version < self.replication.version or frame.buckets & ~self.replication.primary:
            self._refuse(job)
            return
        # Where there is one copy servers do not look for the buckets of the keys: it counts as a push to all of theirs.
        whole = frame.buckets if self.cluster.settings.replicas else self.replication.primary
        new = self.iterations.admit(frame.worker, frame.sequence, frame.iteration, whole)
        if frame.buckets & ~new:
            self.cluster.fired["duplicate"] += 1
        for value in frame.values:
            if new >> value[0] & 1:
                by_worker = self._parts.setdefault(value[0], {}).setdefault(frame.iteration, {})
                by_worker.setdefault(frame.worker, []).append(value)
        connection.send(self, Answer(frame.number, self.iterations.durable))

    def _on_pull(self, connection: Connection, frame: PullPart) -> None:
        if self._is_early(connection, frame):
            return
        if frame.version < self.replication.version or frame.buckets & ~self.replication.primary:
            self._refuse(_Job(connection, frame, ()))
            return
        assert self.gate is not None
        self._ticket += 1
        self._reads[self._ticket] = connection, frame, False
        self._gate(clocks.Ask(frame.worker, frame.clock, self._ticket))
        self._serve()

    def _on_tick(self, connection: Connection, frame: TickClock) -> None:
        if self._is_early(connection, frame) or frame.version < self.replication.version:
            return  # a Synced follows
        if self._waits_for_gate(connection, frame):
            return
        self._gate(clocks.Tick(frame.worker, frame.clock))
        self._serve()

    def _on_finish(self, connection: Connection, frame: FinishGate) -> None:
        if self._is_early(connection, frame) or frame.version < self.replication.version:
            return
        if self._waits_for_gate(connection, frame):
            return
        self._gate(clocks.Finish(frame.worker))
        self._serve()

    def _on_join(self, connection: Connection, frame: JoinGate) -> None:
        if self._is_early(connection, frame) or self._waits_for_gate(connection, frame):
            return
        assert self.gate is not None
        first_clock = 0 if self.iterations is None else self.iterations.first_clock
        self._gate(clocks.Resume(frame.worker))
        self._gate(clocks.Join(frame.worker, max(frame.clock, first_clock)))
        connection.send(self, JoinedGate(self.gate.clocks[frame.worker], frame.number))
        self._serve()

    def _on_synced(self, connection: Connection, frame: Synced) -> None:
        if self._is_early(connection, frame) or self._waits_for_gate(connection, frame):
            return
        assert self.gate is not None
        if frame.version < self.replication.version:
            return
        if frame.has_joined:
            if frame.worker not in self.gate.clocks:
                self._gate(clocks.Join(frame.worker, frame.clock))
            elif frame.counted:
                self._gate(clocks.Resume(frame.worker))
            self._gate(clocks.Tick(frame.worker, frame.clock))
            if not frame.counted:
                self._gate(clocks.Finish(frame.worker))
        if self.iterations is not None:
            self._sum(self.iterations.synced(frame.worker, frame.version))
        else:
            self.takeover.synced(frame.worker, frame.version, self.replication.version)
        self._serve()

    def _left(self, worker: int) -> None:
        if self.iterations is not None:
            self._sum(self.iterations.left(worker))
        else:
            self.takeover.left(worker)

    def _waits_for_gate(self, connection: Connection, frame: Any) -> bool:
        if self.gate is None:
            self._before_gate.append((connection, frame))
            return True
        return False

    # The gate.

    def _gate(self, event: clocks.Event) -> None:
        assert self.gate is not None
        match event:
            case clocks.Finish(worker) | clocks.Leave(worker):
                self._counted.discard(worker)
                if self.iterations is not None and worker in self.gate.clocks:
                    self.iterations.forget(worker, self.gate.clocks[worker])
            case clocks.Resume(worker) if worker in self.gate.clocks:
                self._counted.add(worker)
            case clocks.Join(worker) if worker not in self.gate.clocks:
                self._counted.add(worker)
        for instruction in self.gate.handle(event):
            match instruction:
                case clocks.Complete(iteration, workers):
                    if self.iterations is not None:
                        self._sum(self.iterations.complete(iteration, workers))
                case clocks.Release(ticket):
                    read = self._reads.get(ticket)  # type: ignore[call-overload]
                    if read is not None:
                        self._reads[ticket] = (read[0], read[1], True)  # type: ignore[index]

    def _sum(self, sums: Iterable[Sum]) -> None:
        for each in sums:
            parts: dict[int, list[tuple[int, int, int]]] = {}
            for bucket in buckets_in(each.buckets):
                by_worker = self._parts.get(bucket, {}).pop(each.iteration, {})
                for worker in each.workers:
                    parts.setdefault(worker, []).extend(by_worker.get(worker, ()))
            job = _Job(None, each.iteration, tuple((worker, tuple(values)) for worker, values in parts.items()))
            version = self.replication.version
            job.event = Push(job, AGGREGATE, each.iteration + 1, version, each.buckets)
            self._handle(job.event)

    def _serve(self) -> None:
        """Answer the reads that may be answered, and report what may be."""
        self._report()
        oracle = self.cluster.oracle
        for ticket, (connection, frame, is_open) in list(self._reads.items()):
            if not is_open or not self._may_read(frame.clock):
                continue
            del self._reads[ticket]
            for bucket in buckets_in(frame.buckets):
                data = self.data[bucket]
                version = self.replication.version
                oracle.read(bucket, data, frame.worker, frame.clock, version, self.incarnation, self.name)
            connection.send(self, Answer(frame.number, 0 if self.iterations is None else self.iterations.durable))

    def _may_read(self, clock: int) -> bool:
        if self.iterations is not None:
            return self.iterations.may_read(clock)
        return self.takeover.is_over or self.cluster.settings.consistency.tau is None

    def validate(self) -> None:
        """Check what the machines say of themselves, and that the data are what the marks say."""
        if self.member is None:
            return
        self.replication.validate()
        if self.gate is not None:
            self.gate.validate()
        if set(self.data) != set(buckets_in(self.replication.held)):
            raise Violation(f"{self.name}: holds {sorted(self.data)}, not {list(buckets_in(self.replication.held))}")
        for bucket, data in self.data.items():
            self.cluster.oracle.check_value(bucket, data, self.name)
