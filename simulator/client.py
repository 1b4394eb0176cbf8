"""A simulated client: a ClientCore between virtual connections and what a worker wants. It has no rule of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from paceline.errors import StaleEpochError
from paceline.protocol.buckets import bucket_set
from paceline.protocol.client import (
    AskToJoin,
    ClientCore,
    Connect,
    Disconnect,
    Instruction,
    Request,
    RequestKind,
    Resync,
    ServerSession,
    Transmit,
)
from paceline.protocol.membership import Role
from paceline.protocol.scheduler import View
from simulator.messages import (
    AnswerFrame,
    FinishGate,
    JoinedGate,
    JoinGate,
    PullPart,
    PushPart,
    StaleFrame,
    SyncedFrame,
    TickClock,
    Value,
)
from simulator.network import SimulatedConnection
from simulator.node import SimulatedNode

if TYPE_CHECKING:
    from simulator.cluster import Cluster


@dataclass(slots=True)
class _Payload:
    """The values of a push, the buckets of a pull, the round of a call to join."""

    buckets: int
    values: tuple[Value, ...] = ()
    join: AskToJoin | None = None


class SimulatedClient(SimulatedNode):
    """A node that makes requests to servers. Whoever makes them says what comes when they are done."""

    def __init__(self, host: str, name: str, cluster: Cluster) -> None:
        super().__init__(host, name, cluster, role=Role.WORKER)
        self.core = ClientCore(is_worker=True, is_sequential=cluster.is_sequential)
        self._has_joined = False
        self.handlers |= {AnswerFrame: self.on_answer, JoinedGate: self._on_joined, StaleFrame: self._on_stale}
        self._awaited: list[Request] = []
        self._then: Callable[[], None] | None = None

    # Connections.

    @override
    def link_changed(self, server: int, *, is_up: bool) -> None:
        if is_up:
            self.execute(self.core.connected(server))
        else:
            self.core.sessions[server].disconnected()

    @override
    def receive(self, connection: SimulatedConnection, frame: Any) -> None:
        super().receive(connection, frame)
        self._go_on()

    # Views.

    @override
    def mapped(self, former: View | None, new: View) -> None:
        self.execute(self.core.change(new.version, new.groups))
        self.links.connect()
        self._go_on()

    def execute(self, instructions: Iterable[Instruction]) -> None:
        """Do as the core bids."""
        for instruction in instructions:
            match instruction:
                case Transmit(request, pieces):
                    self.cluster.fired["resend"] += request.kind is not RequestKind.CALL
                    session = self.core.sessions[request.server]
                    if pieces:
                        request.payload = _put_together(pieces)
                    if not pieces or session.start(request):
                        self._transmit(request)
                case Resync(server, version, clock, takes_part):
                    self.links.send(server, SyncedFrame(self.incarnation, version, clock, self._has_joined, takes_part))
                case AskToJoin(server):
                    self._start(self.core.sessions[server], RequestKind.CALL, _Payload(0, join=instruction))
                case Connect(server):
                    self.links.want(server)
                case Disconnect(session):
                    self.links.drop(session.server)
                    for call in session.departed():
                        session.failed(call, StaleEpochError(f"{session.server} is in no chain"))

    # Requests.

    def pull(self, buckets: int) -> list[Request]:
        """Read buckets, in this iteration."""
        return self._start_cut(RequestKind.PULL, buckets, ())

    def push(self, values: tuple[Value, ...]) -> list[Request]:
        """Push values."""
        self.core.next_sequence()
        return self._start_cut(RequestKind.PUSH, bucket_set(value[0] for value in values), values)

    def tick(self) -> None:
        """End this iteration."""
        for session in self.core.sessions.values():
            self._start(session, RequestKind.TICK)
        self.core.tick()

    def join(self, then: Callable[[], None]) -> None:
        """Take part in iterations, and then do something."""
        self.execute(self.core.join())
        self.until([], then)

    def retire(self) -> list[Request]:
        """Take part in iterations no longer."""
        self.execute(self.core.retire())
        return [self._start(session, RequestKind.CALL, _Payload(0)) for session in self.core.sessions.values()]

    def until(self, requests: list[Request], then: Callable[[], None]) -> None:
        """Do something when these requests are done."""
        self._awaited, self._then = requests, then
        self._go_on()

    @property
    def is_busy(self) -> bool:
        """Whether something is to be done when requests are."""
        return self._then is not None

    def _go_on(self) -> None:
        then = self._then
        if then is not None and not self.core.is_joining and all(request.is_done for request in self._awaited):
            self._then = None
            then()

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
        number, me, version, clock = request.number, self.incarnation, self.core.version, request.clock
        payload: Any = request.payload
        match request.kind:
            case RequestKind.PUSH:
                frame: Any = PushPart(number, me, request.sequence, clock, version, payload.buckets, payload.values)
            case RequestKind.PULL:
                frame = PullPart(number, me, clock, version, payload.buckets)
            case RequestKind.TICK:
                frame = TickClock(number, me, clock + 1, version)
            case _ if payload.join is not None:
                frame = JoinGate(me, payload.join.clock, version, number)
            case _:
                frame = FinishGate(number, me, version)
        self.links.send(request.server, frame)

    # Answers.

    def on_answer(self, connection: SimulatedConnection, frame: AnswerFrame) -> None:
        """Take the answer to a push, a pull, a tick or a call to retire."""
        session = self.core.sessions.get(connection.hello[2])
        if session is None:
            return
        if session.retains:
            session.stabilize(frame.durable)
        request = session.in_flight.get(frame.number)
        if request is None:
            session.orphan_answered(frame.number)
        else:
            session.answered(request)

    def _on_joined(self, connection: SimulatedConnection, frame: JoinedGate) -> None:
        server = connection.hello[2]
        session = self.core.sessions.get(server)
        request = None if session is None else session.in_flight.get(frame.number)
        if session is None or request is None:
            return
        session.answered(request)
        join: Any = request.payload.join  # type: ignore[union-attr]
        was_joining, self._has_joined = self.core.is_joining, True
        self.execute(self.core.joined(server, join.round, frame.clock))
        if was_joining and not self.core.is_joining:
            self._go_on()

    def _on_stale(self, connection: SimulatedConnection, frame: StaleFrame) -> None:
        session = self.core.sessions.get(connection.hello[2])
        request = None if session is None else session.in_flight.get(frame.number)
        if session is not None and request is not None:
            session.refused(request)
        self.take(frame.view)


def _restrict(values: Iterable[Value], buckets: int) -> _Payload:
    return _Payload(buckets, tuple(value for value in values if buckets >> value[0] & 1))


def _put_together(pieces: Iterable[tuple[Request, int]]) -> _Payload:
    union, values = 0, list[Value]()
    for request, buckets in pieces:
        payload: Any = request.payload
        union |= buckets
        values += _restrict(payload.values, buckets).values
    return _Payload(union, tuple(sorted(values)))
