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
from paceline.simulation.messages import (
    Answer,
    Check,
    ClocksFrame,
    Filled,
    FinishGate,
    ForwardOk,
    ForwardPush,
    Going,
    JoinedGate,
    JoinGate,
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
from paceline.simulation.node import Node
from paceline.simulation.oracle import Data, Violation
from paceline.simulation.toy_table import ToyTable

if TYPE_CHECKING:
    from paceline.simulation.cluster import Cluster


class _Request:
    """A token: what came, from where; and of a push what it consists of."""

    __slots__ = ("connection", "frame", "incarnation", "parts", "sequence")

    def __init__(
        self,
        connection: Connection | None,
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

    def answer(self, sender: Node, frame: Any) -> None:
        """Send a frame to where it came from."""
        if self.connection is not None:
            self.connection.send(sender, frame)


class Server(Node):
    """The core, its links, and a table of sums."""

    def __init__(self, host: str, name: str, cluster: Cluster, *, is_extra: bool) -> None:
        super().__init__(host, name, cluster, role=Role.SERVER, is_extra=is_extra)
        self.core = cluster.make_server_core()
        self.table = ToyTable(name)
        self._links: dict[int, Connection | None] = {}
        self._connecting: set[int] = set()
        self._silence = Silence()
        self._reports: dict[int, Filled] = {}
        self._handlers: dict[type, Any] = {
            Welcomed: self.on_welcomed,
            Thrown: self.on_thrown,
            Map: self.on_map,
            PrepareView: self.on_prepare,
            PromiseTerm: self.on_promise,
            Going: self._on_drained,
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
            ClocksFrame: self._on_clocks,
            Check: self._on_check,
            Ping: self._on_ping,
            Pong: self._on_pong,
        }

    # Connections.

    @override
    def accept(self, connection: Connection, hello: Any) -> bool:
        _, source, target = hello
        connection.owner = source
        return bool(target == self.incarnation)

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
        self._handle(replication.LinkUp(target))

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
            self.core.disconnected(lambda token: token.connection is connection)  # type: ignore[attr-defined]
            return
        target = connection.hello[2]
        if not connection.was_opened:
            self._connecting.discard(target)
        if target in self._links and self._links[target] in (connection, None):
            if self._links[target] is connection:
                self._links[target] = None
                self._handle(replication.LinkDown(target))
            self._connect_to(target)

    def _have_links(self, targets: frozenset[int]) -> None:
        for target in [target for target in self._links if target not in targets]:
            link = self._links.pop(target)
            if link is not None:
                self.network.close(link)
        for target in sorted(targets):
            if target not in self._links:
                self._links[target] = None
                self._connect_to(target)

    def _connect_to(self, target: int) -> None:
        address = self.address(target)
        if address is not None and target not in self._connecting:
            self._connecting.add(target)
            self.network.connect(self, address, ("server", self.incarnation, target))

    def _send(self, target: int, frame: Any) -> None:
        link = self._links.get(target)
        if link is not None:
            link.send(self, frame)

    @override
    def receive(self, connection: Connection, frame: Any) -> None:
        if not self.is_current(connection):
            return
        if frame.kind is not None:
            timing = self.core.time(frame.kind, connection.owner, frame.version)
            if timing in KEPT:
                self.core.early.keep(timing, connection.owner, _Request(connection, frame))
            elif timing is Timing.STALE:
                connection.send(self, self._stale(frame))
            if timing is not Timing.NOW:
                return
        self._handlers[type(frame)](connection, frame)

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

    def _on_drained(self, _: Connection, __: Going) -> None:
        self.cluster.ended(self)

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
        for target, link in self._links.items():  # the address may have come after the view that names it
            if link is None:
                self._connect_to(target)

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
                case replication.Refuse(token) | events.Stale(token):
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
                    self._send(target, ReadyFrame(version))
                case replication.Links(targets):
                    self._have_links(targets)
                case replication.Report(version, target, buckets):
                    self._reports[target] = Filled(version, target, buckets)
                    self.tell(self._reports[target])
                case events.SendClocks(target):
                    self._send(target, ClocksFrame(self.core.replication.version, self.core.known_clocks()))
                case events.Receive(token):
                    again.append(_request(token))
                case events.Joined(token, clock):
                    request = _request(token)
                    request.answer(self, JoinedGate(clock, request.frame.number))
                case events.Expelled(token):
                    request = _request(token)
                    self.cluster.oracle.refused(request.frame.worker, self.name)
                    request.answer(self, Thrown())
                case events.Serve(token):
                    self._serve(_request(token))
                case events.Keep(token, buckets):
                    self._keep(_request(token).frame, buckets)
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
        self._send(target, ForwardPush(number, push.incarnation, push.sequence, version, buckets, parts))

    def _acknowledge(self, push: _Request) -> None:
        is_client = isinstance(push.frame, PushPart)
        push.answer(self, Answer(push.frame.number, self._durable()) if is_client else ForwardOk(push.frame.number))

    def _durable(self) -> int:
        return 0 if self.core.progress.iterations is None else self.core.progress.iterations.durable

    def _stale(self, frame: PushPart | PullPart | TickClock) -> Stale:
        assert self.map is not None
        return Stale(frame.number, self.map)

    def _serve(self, read: _Request) -> None:
        frame: PullPart = read.frame
        version = self.core.replication.version
        for bucket in buckets_in(frame.buckets):
            data = self.table.data[bucket]
            self.cluster.oracle.read(bucket, data, frame.worker, frame.clock, version, self.incarnation, self.name)
        read.answer(self, Answer(frame.number, self._durable()))

    def _keep(self, frame: PushPart, buckets: int) -> None:
        if frame.buckets & ~buckets:
            self.cluster.fired["duplicate"] += 1
        self.table.keep(frame.worker, frame.iteration, frame.values, buckets)

    def _fill_all(self) -> None:
        for target in self.core.replication.filling:
            found = self.core.replication.next_fill(target)
            if found is not None:
                number, bucket, state = found
                data, version = self.table.data[bucket], self.core.replication.version
                self._send(target, State(number, version, bucket, state, data.value, dict(data.marks)))

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
        rules = self.core.replication
        for bucket in buckets_in(rules.checkable(target)):
            data, applied = self.table.data[bucket], rules.applied_to(bucket)
            link.send(self, Check(rules.version, bucket, applied, data.value, dict(data.marks)))

    def _on_check(self, connection: Connection, frame: Check) -> None:
        rules = self.core.replication
        if not rules.is_comparable(connection.owner, frame.version, frame.bucket):
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

    def _on_ping(self, connection: Connection, _: Ping) -> None:
        connection.send(self, Pong())

    def _on_pong(self, connection: Connection, _: Pong) -> None:
        self._silence.heard(connection.hello[2])

    def _on_forward(self, connection: Connection, frame: ForwardPush) -> None:
        token = _Request(connection, frame, frame.incarnation, frame.sequence, frame.parts)
        self._handle(
            replication.Forwarded(
                token, connection.owner, frame.incarnation, frame.sequence, frame.version, frame.buckets
            )
        )

    def _on_forward_ok(self, connection: Connection, frame: ForwardOk) -> None:
        self._handle(replication.Acknowledged(connection.hello[2], frame.number))

    def _on_state(self, connection: Connection, frame: State) -> None:
        token = _Request(connection, frame)
        self._handle(replication.StateReceived(token, connection.owner, frame.version, frame.bucket, frame.filter))

    def _on_state_ok(self, connection: Connection, frame: StateOk) -> None:
        self._handle(replication.Confirmed(connection.hello[2], frame.number))

    def _on_ready(self, connection: Connection, frame: ReadyFrame) -> None:
        self._handle(events.ReadyReceived(connection.owner, frame.version))

    def _on_clocks(self, _: Connection, frame: ClocksFrame) -> None:
        self._handle(events.ClocksReceived(frame.clocks))

    # Workers.

    def _on_push(self, connection: Connection, frame: PushPart) -> None:
        token = _Request(connection, frame, frame.worker, frame.sequence, ((frame.worker, frame.values),))
        self._handle(events.Push(token, frame.worker, frame.sequence, frame.iteration, frame.version, frame.buckets))

    def _on_pull(self, connection: Connection, frame: PullPart) -> None:
        self._handle(events.Read(_Request(connection, frame), frame.worker, frame.clock, buckets=frame.buckets))

    def _on_tick(self, connection: Connection, frame: TickClock) -> None:
        self._handle(events.Tick(frame.worker, frame.clock))
        connection.send(self, Answer(frame.number, self._durable()))

    def _on_finish(self, connection: Connection, frame: FinishGate) -> None:
        self._handle(events.Retire(frame.worker))
        connection.send(self, Answer(frame.number, self._durable()))

    def _on_join(self, connection: Connection, frame: JoinGate) -> None:
        self._handle(events.Join(_Request(connection, frame), frame.worker, 0, frame.clock))

    def _on_synced(self, connection: Connection, frame: Synced) -> None:
        self._handle(
            events.Synced(
                _Request(connection, frame),
                frame.worker,
                0,
                frame.version,
                frame.clock,
                frame.has_joined,
                frame.counted,
            )
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


def _request(token: object) -> _Request:
    if isinstance(token, events.SumUp):
        token = token.payload
    assert isinstance(token, _Request)
    return token
