"""A server of a protocol run: connects the core to virtual connections and to a toy table. It adds no rules."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from typing_extensions import override

from paceline.protocol import replication
from paceline.protocol.buckets import buckets_in
from paceline.protocol.membership import Role
from paceline.protocol.reachability import Silence
from paceline.protocol.replication import AGGREGATE
from paceline.protocol.scheduler.messages import Drain, Expelled
from paceline.protocol.scheduler.views import View
from paceline.protocol.server import Route, ServerCore, Timing, events
from paceline.protocol.server.progress import POSTPONED
from simulator.oracle import Data, Violation
from simulator.protocol.links import SCHEDULER, MessageEnd
from simulator.protocol.messages import TIMING, Check, EventFrame, Part, Ping, Pong, Push, Reply
from simulator.protocol.node import SimulatedNode, Surroundings
from simulator.protocol.table import ToyTable


class SimulatedServer(SimulatedNode):
    """A server: the core, the links to other servers, and a table of sums."""

    def __init__(self, name: str, around: Surroundings, *, is_extra: bool) -> None:
        super().__init__(name, around, Role.SERVER, is_extra=is_extra)
        settings = self.settings
        self.core = ServerCore(settings.consistency, replicas=settings.replicas, min_replicas=settings.min_replicas)
        self.table = ToyTable(name)
        self._silence = Silence()

    # Connections.

    @override
    def accepts(self, connection: MessageEnd) -> bool:
        return connection.target == self.incarnation != 0

    @override
    def peer_lost(self, connection: MessageEnd) -> None:
        self.core.disconnected(lambda token: token.connection is connection)  # type: ignore[attr-defined]

    @override
    def link_changed(self, target: int, *, is_up: bool) -> None:
        super().link_changed(target, is_up=is_up)
        if target != SCHEDULER:
            self._handle(replication.LinkUp(target) if is_up else replication.LinkDown(target))

    @override
    def receive_from_peer(self, connection: MessageEnd, message: Any) -> None:
        match message:
            case EventFrame():
                message.connection = connection
                self._receive(message)
            case Ping():
                connection.send(Pong())
            case Pong():
                self._silence.received(connection.target)
            case _:
                self._handle(message)

    def _receive(self, frame: EventFrame) -> None:
        sender = frame.connection.source
        timing = self.core.time(TIMING[type(frame.event)], sender, frame.version)
        if timing in POSTPONED:
            self.core.postpone(timing, sender, frame)
        elif timing is Timing.STALE:
            self._answer(frame, events.Stale(frame))
        elif timing is Timing.IMMEDIATE and isinstance(frame.event, Check):
            self._compare(sender, frame)
        elif timing is Timing.IMMEDIATE and isinstance(frame.event, Push):
            self._push(frame)
        elif timing is Timing.IMMEDIATE:
            self._handle(frame.event)
            if isinstance(frame.event, events.WorkerTicked | events.WorkerRetired):
                self._answer(frame)

    def _push(self, frame: EventFrame) -> None:
        push = frame.event
        buckets = push.buckets if self.core.has_copies else None
        verdict = self.core.push(push.worker, push.sequence, push.iteration, buckets)
        if verdict.route is Route.STALE:
            self._answer(frame, events.Stale(frame))
        elif verdict.route is Route.EXPELLED:
            self._obey([events.RejectExpelled(frame)])
        else:
            if verdict.route is Route.BUFFER:
                ((worker, values),) = frame.payload
                self.network.fired["duplicate"] += bool(push.buckets & ~verdict.fresh)
                self.table.keep(worker, push.iteration, values, verdict.fresh)
            self._obey(self.core.admit(verdict, frame))

    def _answer(self, frame: EventFrame, content: Any = None) -> None:
        frame.connection.send(Reply(frame.number, content, durable=self.core.durable))

    # Membership.

    @override
    def welcomed(self) -> None:
        self._obey(self.core.joined(self.incarnation))

    def leave(self) -> None:
        self.is_leaving = self.state.is_leaving = True
        self.notify(Drain())

    @override
    def view_changed(self, view: View) -> None:
        self._handle(view)

    # Instructions.

    def _handle(self, event: events.Event) -> None:
        self._obey(self.core.handle(event))
        for target in self.core.filling:
            found = self.core.next_fill(target)
            if found is not None:
                self._send_bucket(target, *found)

    def _obey(self, instructions: Iterable[events.Instruction]) -> None:
        resumed: list[EventFrame] = []  # these are handled after all other instructions
        for instruction in instructions:
            match instruction:
                case replication.Apply(token, buckets):
                    self.table.apply(_parts(token), buckets)
                case replication.Forward():
                    self._forward(instruction)
                case replication.Acknowledge(EventFrame(event=Push()) as frame):
                    self._answer(frame)
                case replication.Acknowledge(EventFrame() as frame):
                    frame.connection.send(replication.Acknowledged(self.incarnation, frame.number))
                case replication.RefusePush(EventFrame() as frame) | events.Stale(EventFrame() as frame):
                    self._answer(frame, events.Stale(frame))
                case replication.Load(EventFrame(payload=(value, marks)) as frame, bucket):
                    self.table.data[bucket] = Data(value, dict(marks))
                    frame.connection.send(replication.Confirmed(self.incarnation, frame.number))
                case replication.Drop(buckets):
                    self.table.drop(buckets)
                case replication.CreateBuckets(buckets):
                    self.table.hold(buckets)
                case replication.Lead(buckets):
                    self.oracle.leads(self.core.version, buckets, self.incarnation, self.name)
                    self.table.keep_only(buckets)
                case replication.Ready(target, version):
                    self._send_event(target, events.ReadyReceived, self.incarnation, version)
                case replication.Links(targets):
                    for target in self.links.keys() - targets - {SCHEDULER}:
                        self.drop(target)
                    for target in sorted(targets):
                        self.want(target)
                case replication.Filled():
                    self.notify(instruction)
                case events.SendClocks(target):
                    self._send_event(target, events.ClocksReceived, self.core.known_clocks())
                case events.ResumeRequest(EventFrame() as frame):
                    resumed.append(frame)
                case events.ConfirmJoin(EventFrame() as frame):
                    self._answer(frame, instruction)
                case events.RejectExpelled(EventFrame() as frame):
                    self.oracle.refused(frame.event.worker, self.name)
                    frame.connection.send(Expelled(reason="it is not a member"))
                case events.Serve(EventFrame() as frame):
                    self._serve(frame)
                case events.DropBuffered(worker, iteration):
                    self.table.drop_buffered(worker, iteration)
                case events.DropAllBuffered():
                    self.table.keep_only(0)
                case events.SumUp(iteration, workers, buckets):
                    instruction.payload = self.table.take_sum(iteration, workers, buckets)
                case events.ApplySum(iteration, workers, buckets):
                    self.table.apply(self.table.take_sum(iteration, workers, buckets), buckets)
        for frame in resumed:
            self._receive(frame)

    def _send_event(self, target: int, kind: type[Any], *fields: Any, number: int = 0, payload: Any = ()) -> None:
        self.send(target, EventFrame(kind, *fields, number=number, version=self.core.version, payload=payload))

    def _forward(self, forward: replication.Forward) -> None:
        buckets = forward.buckets
        parts = tuple(
            (worker, tuple(value for value in values if buckets >> value[0] & 1))
            for worker, values in _parts(forward.token)
        )
        fields = self.incarnation, *_origin(forward.token), self.core.version, buckets
        self._send_event(forward.target, replication.Forwarded, *fields, number=forward.number, payload=parts)

    def _send_bucket(self, target: int, number: int, bucket: int, state: replication.FilterState) -> None:
        fields = self.incarnation, self.core.version, bucket, state
        copy = self.table.copy_of(bucket)
        self._send_event(target, replication.StateReceived, *fields, number=number, payload=copy)

    def _serve(self, frame: EventFrame) -> None:
        read, version = frame.event, self.core.version
        for bucket in buckets_in(read.buckets):
            data = self.table.data[bucket]
            self.oracle.read(bucket, data, read.worker, read.clock, version, self.incarnation, self.name)
        self._answer(frame)

    # Comparison of replicas.

    @override
    def unreachable(self) -> tuple[int, ...]:
        targets = [target for target in self.links if target != SCHEDULER]
        for target in targets:
            self.send(target, Ping())
            for bucket in buckets_in(self.core.checkable(target)):
                applied, copy = self.core.applied_to(bucket), self.table.copy_of(bucket)
                self._send_event(target, Check, bucket, applied, payload=copy)
        return self._silence.poll(targets)

    def _compare(self, source: int, frame: EventFrame) -> None:
        core, check = self.core, frame.event
        if not core.is_comparable(source, frame.version, check.bucket):
            return
        self.oracle.num_compared += 1
        found = core.applied_to(check.bucket), self.table.copy_of(check.bucket)
        if found != (check.applied, frame.payload):
            raise Violation(
                f"{self.name} has {found} in bucket {check.bucket}, the server before it "
                f"{(check.applied, frame.payload)} (replicas are equal)"
            )

    def validate(self) -> None:
        """Check the core's invariants, and that each bucket is the sum of its pushes."""
        if not self.is_member:
            return
        self.core.validate()
        held = self.core.held
        if set(self.table.data) != set(buckets_in(held)):
            raise Violation(f"{self.name}: has buckets {sorted(self.table.data)}, expected {list(buckets_in(held))}")
        for bucket, data in self.table.data.items():
            self.oracle.check_value(bucket, data, self.name)


def _parts(token: Any) -> tuple[Part, ...]:
    parts: tuple[Part, ...] = token.payload
    return parts


def _origin(token: Any) -> tuple[int, int]:
    """Return the incarnation and number with which the servers of a chain identify a push."""
    match token:
        case events.SumUp(iteration):
            return AGGREGATE, iteration + 1
        case EventFrame(event=Push(worker=worker, sequence=sequence)):
            return worker, sequence
        case _:
            return token.event.incarnation, token.event.sequence
