"""The client of a protocol run: connects a ClientCore to virtual connections and to a worker. It adds no rules."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from operator import or_
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
from simulator.protocol.links import SCHEDULER, MessageEnd
from simulator.protocol.messages import EventFrame, Push
from simulator.protocol.node import SimulatedNode, Surroundings
from simulator.protocol.programs import Performer


@dataclass(slots=True)
class _Payload:
    """The values of a push, the buckets of a pull, or a call to join."""

    buckets: int = 0
    values: tuple[Value, ...] = ()
    join: RequestJoin | None = None


def _part(buckets: int, *pieces: tuple[Iterable[Value], int]) -> _Payload:
    """Return a payload with the values of each piece that are in the piece's buckets."""
    values = sorted(value for values, mask in pieces for value in values if mask >> value[0] & 1)
    return _Payload(buckets, tuple(values))


class SimulatedClient(SimulatedNode):
    """A node that sends requests to servers."""

    def __init__(self, name: str, around: Surroundings) -> None:
        super().__init__(name, around, Role.WORKER)
        self.core = ClientCore(is_worker=True, is_sequential=self.settings.is_sequential)
        self.work = Performer(self, self._are_done)
        self._has_joined = False

    @override
    def link_changed(self, target: int, *, is_up: bool) -> None:
        super().link_changed(target, is_up=is_up)
        if target != SCHEDULER and is_up:
            self._execute(self.core.connected(target))
        elif target != SCHEDULER:
            self.core.sessions[target].disconnected()

    @override
    def view_changed(self, view: View) -> None:
        self._execute(self.core.change(view.version, view.groups))

    def _execute(self, instructions: Iterable[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Transmit(request, pieces):
                    self.network.fired["resend"] += request.kind is not RequestKind.CALL
                    session = self.core.sessions[request.server]
                    if pieces:
                        parts: Any = [(piece.payload, buckets) for piece, buckets in pieces]
                        union = reduce(or_, (buckets for _, buckets in parts))
                        request.payload = _part(union, *((part.values, buckets) for part, buckets in parts))
                    if not pieces or session.start(request):
                        self._transmit(request)
                case Resync():
                    self._resync(instruction)
                case RequestJoin(server):
                    self._start(self.core.sessions[server], RequestKind.CALL, _Payload(join=instruction))
                case Connect(server):
                    self.want(server)
                case Disconnect(session):
                    self.drop(session.server)
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
        """Begin to join the iterations. A program waits until the core has joined, because of :meth:`_are_done`."""
        self._execute(self.core.join())
        return []

    def retire(self) -> list[Request]:
        self._execute(self.core.retire())
        return [self._start(session, RequestKind.CALL, _Payload()) for session in self.core.sessions.values()]

    def _start_cut(self, kind: RequestKind, buckets: int, values: tuple[Value, ...]) -> list[Request]:
        return [
            self._start(session, kind, _part(buckets & session.leads, (values, session.leads)))
            for session in self.core.sessions.values()
            if buckets & session.leads
        ]

    def _start(self, session: ServerSession, kind: RequestKind, payload: _Payload | None = None) -> Request:
        request = session.request(kind, self.core.clock, self.core.sequence, payload)
        if session.start(request):
            self._transmit(request)
        return request

    def _transmit(self, request: Request) -> None:
        me, clock = self.incarnation, request.clock
        payload: Any = request.payload
        parts: Any = ()
        fields: tuple[Any, ...]
        match request.kind:
            case RequestKind.PUSH:
                fields, parts = (Push, me, request.sequence, clock, payload.buckets), ((me, payload.values),)
            case RequestKind.PULL:
                fields = (events.Read, me, clock, math.inf, payload.buckets)
            case RequestKind.TICK:
                fields = (events.WorkerTicked, me, clock + 1)
            case _ if payload.join is not None:
                fields = (events.WorkerJoining, me, 0, payload.join.clock)
            case _:
                fields = (events.WorkerRetired, me)
        frame = EventFrame(*fields, number=request.number, version=self.core.version, payload=parts)
        self.send(request.server, frame)

    def _resync(self, resync: Resync) -> None:
        fields = (self.incarnation, 0, resync.version, resync.clock, self._has_joined, resync.takes_part)
        self.send(resync.server, EventFrame(events.Synced, *fields, version=resync.version))

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
        session = self.core.sessions.get(connection.target)
        if session is None:
            return
        request = session.in_flight.get(message.number)
        if isinstance(message.content, events.Stale):
            if request is not None:
                session.refused(request)
            return
        session.stabilize(message.number, message.durable)
        if request is None:
            session.orphan_answered(message.number)
            return
        session.answered(request)
        if isinstance(message.content, events.ConfirmJoin):
            join: Any = request.payload.join  # type: ignore[union-attr]
            self._has_joined = True
            self._execute(self.core.joined(connection.target, join.round, message.content.clock))
