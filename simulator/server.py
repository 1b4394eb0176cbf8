"""A server of a simulated cluster: the core of a server around a toy table."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from paceline.protocol import replication
from paceline.protocol.buckets import buckets_in
from paceline.protocol.membership import Role
from paceline.protocol.reachability import Silence
from paceline.protocol.replication import AGGREGATE
from paceline.protocol.scheduler import View
from paceline.protocol.server import Timing, events
from paceline.protocol.server.waiting import KEPT
from simulator.messages import (
    AnswerFrame,
    Check,
    ClocksFrame,
    FilledFrame,
    FinishGate,
    ForwardOk,
    ForwardPush,
    Going,
    JoinedGate,
    JoinGate,
    Part,
    Ping,
    Pong,
    PullPart,
    PushPart,
    ReadyFrame,
    StaleFrame,
    State,
    StateOk,
    SyncedFrame,
    Thrown,
    TickClock,
)
from simulator.network import SimulatedConnection
from simulator.node import SimulatedNode
from simulator.oracle import Data, Violation
from simulator.toy_table import ToyTable

if TYPE_CHECKING:
    from simulator.cluster import Cluster


class _Request:
    """A token: what came, from where; and of a push what it consists of."""

    __slots__ = ("connection", "frame", "incarnation", "parts", "sequence")

    def __init__(
        self,
        connection: SimulatedConnection | None,
        frame: Any,
        incarnation: int = 0,
        sequence: int = 0,
        parts: tuple[Part, ...] = (),
    ) -> None:
        self.connection = connection
        self.frame = frame
        self.incarnation = incarnation
        self.sequence = sequence
        self.parts = parts

    def answer(self, sender: SimulatedNode, frame: Any) -> None:
        """Send a frame to where it came from."""
        if self.connection is not None:
            self.connection.send(sender, frame)


class SimulatedServer(SimulatedNode):
    """The core, its links, and a table of sums."""

    def __init__(self, host: str, name: str, cluster: Cluster, *, is_extra: bool) -> None:
        super().__init__(host, name, cluster, role=Role.SERVER, is_extra=is_extra)
        self.core = cluster.make_server_core()
        self.table = ToyTable(name)
        self._silence = Silence()
        self._reports: dict[int, FilledFrame] = {}
        self.handlers[Going] = lambda _, __: cluster.ended(self)  # drained

    # Connections.

    @override
    def accept(self, connection: SimulatedConnection, hello: Any) -> bool:
        _, source, target = hello
        connection.owner = source
        return bool(target == self.incarnation)

    @override
    def closed(self, connection: SimulatedConnection) -> None:
        if connection.ends[0] is self:
            super().closed(connection)
        else:
            self.core.disconnected(lambda token: token.connection is connection)  # type: ignore[attr-defined]

    @override
    def link_changed(self, server: int, *, is_up: bool) -> None:
        self._handle(replication.LinkUp(server) if is_up else replication.LinkDown(server))

    @override
    def receive(self, connection: SimulatedConnection, frame: Any) -> None:
        if type(frame) in self.handlers:
            super().receive(connection, frame)
            return
        if frame.kind is not None:
            timing = self.core.time(frame.kind, connection.owner, frame.version)
            if timing in KEPT:
                self.core.early.keep(timing, connection.owner, _Request(connection, frame))
            elif timing is Timing.STALE:
                connection.send(self, self._stale(frame))
            if timing is not Timing.NOW:
                return
        self._take(connection, frame)

    def _take(self, connection: SimulatedConnection, frame: Any) -> None:
        """Take a frame of a worker or a server, whose time it is."""
        match frame:
            case Ping():
                connection.send(self, Pong())
            case Pong():
                self._silence.heard(connection.hello[2])
            case Check():
                self._compare(connection.owner, frame)
            case TickClock() | FinishGate():
                self._handle(_event_of(connection, frame))
                connection.send(self, AnswerFrame(frame.number, self.core.durable))
            case _:
                self._handle(_event_of(connection, frame))

    # Membership.

    @override
    def welcomed(self) -> None:
        self._obey(self.core.joined(self.incarnation))

    @override
    def attached(self) -> None:
        for report in self._reports.values():
            self.tell(report)

    def leave(self) -> None:
        """Ask to be drained."""
        self.is_leaving = True
        self.tell(Going(self.incarnation))

    @override
    def mapped(self, former: View | None, new: View) -> None:
        if new.version > self.core.replication.version:
            self._reports = {}
        workers = (member.incarnation for member in new.members if member.role is Role.WORKER)
        members = (member.incarnation for member in new.members)
        self._handle(
            events.ViewChanged(
                new.epoch, new.version, new.groups, frozenset(members), frozenset(workers), new.last_incarnation
            )
        )
        self.links.connect()  # the address may have come after the view that names it

    # Instructions.

    def _handle(self, event: events.Event) -> None:
        self._obey(self.core.handle(event))
        self._fill_all()

    def _obey(self, instructions: Iterable[events.Instruction]) -> None:
        again: list[_Request] = []  # what was early comes behind everything that is to be done first
        for instruction in instructions:
            match instruction:
                case replication.Apply(token, buckets):
                    self.table.apply(_request(token).parts, buckets)
                case replication.Forward(token, target, number, buckets):
                    self._forward(_request(token), target, number, buckets)
                case replication.Acknowledge(token):
                    self._acknowledge(_request(token))
                case replication.RefusePush(token) | events.Stale(token):
                    request = _request(token)
                    request.answer(self, self._stale(request.frame))
                case replication.Load(token, bucket):
                    request = _request(token)
                    self.table.data[bucket] = Data(request.frame.value, dict(request.frame.marks))
                    request.answer(self, StateOk(request.frame.number))
                case replication.Drop(buckets):
                    self.table.drop(buckets)
                case replication.Hold(buckets):
                    self.table.hold(buckets)
                case replication.Lead(buckets):
                    self.cluster.oracle.leads(self.core.replication.version, buckets, self.incarnation, self.name)
                    self.table.keep_only(buckets)
                case replication.Ready(target, version):
                    self.links.send(target, ReadyFrame(version))
                case replication.Links(targets):
                    self.links.want_only(targets)
                case replication.ReportFilled(version, target, buckets):
                    self._reports[target] = FilledFrame(version, target, buckets)
                    self.tell(self._reports[target])
                case events.SendClocks(target):
                    self.links.send(
                        target, ClocksFrame(self.core.replication.version, self.core.workers.known_clocks())
                    )
                case events.ResumeRequest(token):
                    again.append(_request(token))
                case events.TellJoined(token, clock):
                    request = _request(token)
                    request.answer(self, JoinedGate(clock, request.frame.number))
                case events.TellExpelled(token):
                    request = _request(token)
                    self.cluster.oracle.refused(request.frame.worker, self.name)
                    request.answer(self, Thrown())
                case events.Serve(token):
                    self._serve(_request(token))
                case events.Keep(token, buckets):
                    push = _request(token).frame
                    self.cluster.fired["duplicate"] += bool(push.buckets & ~buckets)
                    self.table.keep(push.worker, push.iteration, push.values, buckets)
                case events.DropKept(worker, iteration):
                    self.table.drop_kept(worker, iteration)
                case events.ForgetKept():
                    self.table.keep_only(0)
                case events.SumUp():
                    parts = self.table.take_sum(instruction.iteration, instruction.workers, instruction.buckets)
                    instruction.payload = _Request(None, None, AGGREGATE, instruction.iteration + 1, parts)
                case events.ApplySum(iteration, workers, buckets):
                    self.table.apply(self.table.take_sum(iteration, workers, buckets), buckets)
        for request in again:
            assert request.connection is not None
            self.receive(request.connection, request.frame)

    def _forward(self, push: _Request, target: int, number: int, buckets: int) -> None:
        parts = tuple((worker, tuple(v for v in values if buckets >> v[0] & 1)) for worker, values in push.parts)
        version = self.core.replication.version
        self.links.send(target, ForwardPush(number, push.incarnation, push.sequence, version, buckets, parts))

    def _acknowledge(self, push: _Request) -> None:
        is_client = isinstance(push.frame, PushPart)
        push.answer(
            self, AnswerFrame(push.frame.number, self.core.durable) if is_client else ForwardOk(push.frame.number)
        )

    def _stale(self, frame: PushPart | PullPart | TickClock) -> StaleFrame:
        assert self.map is not None
        return StaleFrame(frame.number, self.map)

    def _serve(self, read: _Request) -> None:
        frame: PullPart = read.frame
        version = self.core.replication.version
        for bucket in buckets_in(frame.buckets):
            data = self.table.data[bucket]
            self.cluster.oracle.read(bucket, data, frame.worker, frame.clock, version, self.incarnation, self.name)
        read.answer(self, AnswerFrame(frame.number, self.core.durable))

    def _fill_all(self) -> None:
        for target in self.core.replication.filling:
            found = self.core.replication.next_fill(target)
            if found is not None:
                number, bucket, state = found
                data, version = self.table.data[bucket], self.core.replication.version
                self.links.send(target, State(number, version, bucket, state, data.value, dict(data.marks)))

    # Other servers.

    @override
    def unreachable(self) -> tuple[int, ...]:
        found = self._silence.look(self.links)
        rules = self.core.replication
        for target, link in self.links.there():
            link.send(self, Ping())
            for bucket in buckets_in(rules.checkable(target)):  # for the server behind to compare
                data, applied = self.table.data[bucket], rules.applied_to(bucket)
                link.send(self, Check(rules.version, bucket, applied, data.value, dict(data.marks)))
        return found

    def _compare(self, source: int, frame: Check) -> None:
        """Compare a bucket with what the server before has of it."""
        rules = self.core.replication
        if not rules.is_comparable(source, frame.version, frame.bucket):
            return
        self.cluster.fired["compared"] += 1
        data = self.table.data[frame.bucket]
        if rules.applied_to(frame.bucket) != frame.applied:
            raise Violation(
                f"{self.name} counts {rules.applied_to(frame.bucket)} as applied to bucket {frame.bucket}, the server "
                f"before it {frame.applied} (replicas are equal)"
            )
        if (data.value, data.marks) != (frame.value, frame.marks):
            raise Violation(
                f"{self.name} has {data.marks} in bucket {frame.bucket}, the server before it {frame.marks} (replicas "
                "are equal)"
            )

    def validate(self) -> None:
        """Check what the core says of itself, and that the data are what the marks say."""
        if self.member is None:
            return
        self.core.validate()
        held = self.core.replication.held
        if set(self.table.data) != set(buckets_in(held)):
            raise Violation(f"{self.name}: holds {sorted(self.table.data)}, not {list(buckets_in(held))}")
        for bucket, data in self.table.data.items():
            self.cluster.oracle.check_value(bucket, data, self.name)


def _event_of(connection: SimulatedConnection, frame: Any) -> events.Event:
    """Return what a frame means to the core."""
    match frame:
        case PushPart():
            token = _Request(connection, frame, frame.worker, frame.sequence, ((frame.worker, frame.values),))
            return events.Push(token, frame.worker, frame.sequence, frame.iteration, frame.version, frame.buckets)
        case PullPart():
            return events.Read(_Request(connection, frame), frame.worker, frame.clock, buckets=frame.buckets)
        case TickClock():
            return events.WorkerTicked(frame.worker, frame.clock)
        case FinishGate():
            return events.WorkerRetired(frame.worker)
        case JoinGate():
            return events.WorkerJoining(_Request(connection, frame), frame.worker, 0, frame.clock)
        case SyncedFrame(worker, version, clock, has_joined, counts):
            return events.Synced(_Request(connection, frame), worker, 0, version, clock, has_joined, counts)
        case ForwardPush(_, incarnation, sequence, version, buckets, parts):
            token = _Request(connection, frame, incarnation, sequence, parts)
            return replication.Forwarded(token, connection.owner, incarnation, sequence, version, buckets)
        case ForwardOk(number):
            return replication.Acknowledged(connection.hello[2], number)
        case State():
            token = _Request(connection, frame)
            return replication.StateReceived(token, connection.owner, frame.version, frame.bucket, frame.filter)
        case StateOk(number):
            return replication.Confirmed(connection.hello[2], number)
        case ReadyFrame(version):
            return events.ReadyReceived(connection.owner, version)
        case ClocksFrame(_, known):
            return events.ClocksReceived(known)
    raise AssertionError(frame)


def _request(token: object) -> _Request:
    if isinstance(token, events.SumUp):
        token = token.payload
    assert isinstance(token, _Request)
    return token
