"""The client of a protocol run: a ClientCore between virtual connections and a worker. It has no rule of its own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from paceline.errors import StaleEpochError
from paceline.protocol.buckets import bucket_set
from paceline.protocol.client import (
    ClientCore,
    Connect,
    Disconnect,
    Instruction,
    Request,
    RequestJoin,
    RequestKind,
    Resync,
    ServerSession,
    Transmit,
)
from paceline.protocol.membership import Role
from paceline.protocol.scheduler.messages import Expelled
from paceline.protocol.scheduler.views import View
from paceline.protocol.server import events
from simulator.oracle import Value
from simulator.protocol.connections import MessageEnd
from simulator.protocol.messages import Push, Reply
from simulator.protocol.node import SimulatedNode, Surroundings
from simulator.protocol.programs import Performer


@dataclass(slots=True)
class _Payload:
    """The values of a push, the buckets of a pull, the round of a call to join."""

    buckets: int
    values: tuple[Value, ...] = ()
    join: RequestJoin | None = None


class SimulatedClient(SimulatedNode):
    """A node that sends requests to servers."""

    def __init__(self, name: str, around: Surroundings) -> None:
        super().__init__(name, around, Role.WORKER)
        self.core = ClientCore(is_worker=True, is_sequential=self.settings.is_sequential)
        self.work = Performer(self, self._are_done)
        self._has_joined = False

    @override
    def link_changed(self, server: int, *, is_up: bool) -> None:
        if is_up:
            self._execute(self.core.connected(server))
        else:
            self.core.sessions[server].disconnected()

    @override
    def view_changed(self, view: View) -> None:
        self._execute(self.core.change(view.version, view.groups))
        self.links.connect()

    def _execute(self, instructions: Iterable[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Transmit(request, pieces):
                    self.network.fired["resend"] += request.kind is not RequestKind.CALL
                    session = self.core.sessions[request.server]
                    if pieces:
                        request.payload = _joined(pieces)
                    if not pieces or session.start(request):
                        self._transmit(request)
                case Resync():
                    self._resync(instruction)
                case RequestJoin(server):
                    self._start(self.core.sessions[server], RequestKind.CALL, _Payload(0, join=instruction))
                case Connect(server):
                    self.links.want(server)
                case Disconnect(session):
                    self.links.drop(session.server)
                    for call in session.departed():
                        session.failed(call, StaleEpochError(f"{session.server} is in no chain"))

    # Requests.

    def pull(self, buckets: int) -> list[Request]:
        return self._start_cut(RequestKind.PULL, buckets, ())

    def push(self, values: tuple[Value, ...]) -> list[Request]:
        self.core.next_sequence()
        return self._start_cut(RequestKind.PUSH, bucket_set(value[0] for value in values), values)

    def tick(self) -> None:
        for session in self.core.sessions.values():
            self._start(session, RequestKind.TICK)
        self.core.tick()

    def join(self) -> list[Request]:
        """Begin to take part in iterations: the core is joining until then."""
        self._execute(self.core.join())
        return []

    def retire(self) -> list[Request]:
        self._execute(self.core.retire())
        return [self._start(session, RequestKind.CALL, _Payload(0)) for session in self.core.sessions.values()]

    def _start_cut(self, kind: RequestKind, buckets: int, values: tuple[Value, ...]) -> list[Request]:
        return [
            self._start(session, kind, _restrict(values, buckets & session.leads))
            for session in self.core.sessions.values()
            if buckets & session.leads
        ]

    def _start(self, session: ServerSession, kind: RequestKind, payload: _Payload | None = None) -> Request:
        request = session.request(kind, self.core.clock, self.core.sequence, payload)
        if session.start(request):
            self._transmit(request)
        return request

    def _transmit(self, request: Request) -> None:
        me, version, clock = self.incarnation, self.core.version, request.clock
        payload: Any = request.payload

        def event(frame: object) -> events.Event | Push:
            match request.kind:
                case RequestKind.PUSH:
                    return Push(me, request.sequence, clock, payload.buckets)
                case RequestKind.PULL:
                    return events.Read(frame, me, clock, buckets=payload.buckets)
                case RequestKind.TICK:
                    return events.WorkerTicked(me, clock + 1)
                case _ if payload.join is not None:
                    return events.WorkerJoining(frame, me, 0, payload.join.clock)
                case _:
                    return events.WorkerRetired(me)

        parts = ((me, payload.values),) if request.kind is RequestKind.PUSH else ()
        self.links.send(request.server, event, number=request.number, version=version, payload=parts)

    def _resync(self, resync: Resync) -> None:
        me, has_joined, version = self.incarnation, self._has_joined, resync.version
        self.links.send(
            resync.server,
            lambda frame: events.Synced(frame, me, 0, version, resync.clock, has_joined, resync.takes_part),
            version=version,
        )

    def _are_done(self, requests: list[Request]) -> bool:
        return not self.core.is_joining and all(request.is_done for request in requests)

    # Answers.

    @override
    def receive(self, connection: MessageEnd, message: Any) -> None:
        super().receive(connection, message)
        self.work.resume()

    @override
    def receive_from_peer(self, connection: MessageEnd, message: Any) -> None:
        if isinstance(message, Expelled):
            self.kill()
            return
        server = connection.hello[2]
        session = self.core.sessions.get(server)
        request = None if session is None else session.in_flight.get(message.number)
        match message.content:
            case events.Stale():
                if session is not None and request is not None:
                    session.refused(request)
            case events.ConfirmJoin(_, clock):
                if session is not None and request is not None:
                    session.answered(request)
                    join: Any = request.payload.join  # type: ignore[union-attr]
                    self._has_joined = True
                    self._execute(self.core.joined(server, join.round, clock))
            case _ if session is not None:
                self.take_answer(session, request, message)

    def take_answer(self, session: ServerSession, request: Request | None, answer: Reply) -> None:
        session.stabilize(answer.number, answer.durable)
        if request is None:
            session.orphan_answered(answer.number)
        else:
            session.answered(request)


def _restrict(values: Iterable[Value], buckets: int) -> _Payload:
    return _Payload(buckets, tuple(value for value in values if buckets >> value[0] & 1))


def _joined(pieces: Iterable[tuple[Request, int]]) -> _Payload:
    union, values = 0, list[Value]()
    for request, buckets in pieces:
        payload: Any = request.payload
        union |= buckets
        values += _restrict(payload.values, buckets).values
    return _Payload(union, tuple(sorted(values)))
