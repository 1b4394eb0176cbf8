"""A server of a protocol run: the core of a server around a toy table. It has no rule of its own."""

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
from simulator.protocol.connections import MessageEnd
from simulator.protocol.messages import TIMING, Check, EventFrame, Part, Ping, Pong, Push, Reply
from simulator.protocol.node import SimulatedNode, Surroundings
from simulator.protocol.table import ToyTable


class SimulatedServer(SimulatedNode):
    """The core, its links, and a table of sums."""

    def __init__(self, name: str, around: Surroundings, *, is_extra: bool) -> None:
        super().__init__(name, around, Role.SERVER, is_extra=is_extra)
        settings = self.settings
        self.core = ServerCore(settings.consistency, replicas=settings.replicas, min_replicas=settings.min_replicas)
        self.table = ToyTable(name)
        self._silence = Silence()

    # Connections.

    @override
    def accept(self, connection: MessageEnd, hello: Any) -> bool:
        return bool(hello[2] == self.incarnation)

    @override
    def closed(self, connection: MessageEnd) -> None:
        if connection.is_opener:
            super().closed(connection)
        else:
            self.core.disconnected(lambda token: token.connection is connection)  # type: ignore[attr-defined]

    @override
    def link_changed(self, server: int, *, is_up: bool) -> None:
        self._handle(replication.LinkUp(server) if is_up else replication.LinkDown(server))

    @override
    def receive_from_peer(self, connection: MessageEnd, message: Any) -> None:
        match message:
            case EventFrame():
                self._receive(message)
            case Ping():
                connection.send(Pong())
            case Pong():
                self._silence.received(connection.hello[2])
            case _:
                self._handle(message)

    def _receive(self, frame: EventFrame) -> None:
        sender = frame.connection.hello[1]
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
        match verdict.route:
            case Route.STALE:
                self._obey([events.Stale(frame)])
                return
            case Route.EXPELLED:
                self._obey([events.RejectExpelled(frame)])
                return
            case Route.BUFFER:
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
        workers = frozenset(member.incarnation for member in view.members if member.role is Role.WORKER)
        self._handle(
            events.ViewChanged(view.epoch, view.version, view.groups, view.incarnations, workers, view.last_incarnation)
        )
        self.links.connect()  # the address may have come after the view that names it

    # Instructions.

    def _handle(self, event: events.Event) -> None:
        self._obey(self.core.handle(event))
        for target in self.core.filling:
            found = self.core.next_fill(target)
            if found is not None:
                self._send_bucket(target, *found)

    def _obey(self, instructions: Iterable[events.Instruction]) -> None:
        resumed: list[EventFrame] = []  # handled after all other instructions
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
                case replication.Hold(buckets):
                    self.table.hold(buckets)
                case replication.Lead(buckets):
                    self.oracle.leads(self.core.version, buckets, self.incarnation, self.name)
                    self.table.keep_only(buckets)
                case replication.Ready(target, version):
                    ready = events.ReadyReceived(self.incarnation, version)
                    self.links.send(target, lambda _: ready, version=version)  # noqa: B023
                case replication.Links(targets):
                    self.links.want_only(targets)
                case replication.Filled():
                    self.notify(instruction)
                case events.SendClocks(target):
                    clocks = events.ClocksReceived(self.core.known_clocks())
                    self.links.send(target, lambda _: clocks, version=self.core.version)  # noqa: B023
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

    def _forward(self, forward: replication.Forward) -> None:
        me, (incarnation, sequence), buckets = self.incarnation, _origin(forward.token), forward.buckets
        version = self.core.version
        parts = tuple(
            (worker, tuple(value for value in values if buckets >> value[0] & 1))
            for worker, values in _parts(forward.token)
        )
        self.links.send(
            forward.target,
            lambda frame: replication.Forwarded(frame, me, incarnation, sequence, version, buckets),
            number=forward.number,
            version=version,
            payload=parts,
        )

    def _send_bucket(self, target: int, number: int, bucket: int, state: replication.FilterState) -> None:
        me, version = self.incarnation, self.core.version
        self.links.send(
            target,
            lambda frame: replication.StateReceived(frame, me, version, bucket, state),
            number=number,
            version=version,
            payload=self.table.copy_of(bucket),
        )

    def _serve(self, frame: EventFrame) -> None:
        read, version = frame.event, self.core.version
        for bucket in buckets_in(read.buckets):
            data = self.table.data[bucket]
            self.oracle.read(bucket, data, read.worker, read.clock, version, self.incarnation, self.name)
        self._answer(frame)

    # Comparison of replicas.

    @override
    def unreachable(self) -> tuple[int, ...]:
        found = self._silence.poll(self.links)
        core = self.core
        for target, link in self.links.connected():
            link.send(Ping())
            for bucket in buckets_in(core.checkable(target)):
                check, copy = Check(bucket, core.applied_to(bucket)), self.table.copy_of(bucket)
                link.send(EventFrame(link.other, lambda _: check, version=core.version, payload=copy))  # noqa: B023
        return found

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
            raise Violation(f"{self.name}: holds {sorted(self.table.data)}, not {list(buckets_in(held))}")
        for bucket, data in self.table.data.items():
            self.oracle.check_value(bucket, data, self.name)


def _parts(token: Any) -> tuple[Part, ...]:
    parts: tuple[Part, ...] = token.payload
    return parts


def _origin(token: Any) -> tuple[int, int]:
    """Return the incarnation and number by which all servers of a chain count a push."""
    match token:
        case events.SumUp(iteration):
            return AGGREGATE, iteration + 1
        case EventFrame(event=Push(worker=worker, sequence=sequence)):
            return worker, sequence
        case _:
            return token.event.incarnation, token.event.sequence
