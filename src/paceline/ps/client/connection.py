"""A client's connection to one server: writes requests, reads answers, and reconnects.

Requests are pipelined: the caller's thread writes them, and a later wait reads the answers. No background thread reads
the answers, because it would add 20 to 40 µs to each request, as much as the round trip of a small request.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from paceline.errors import AddressError, ConnectionLostError, PacelineError, PeerError, StaleEpochError, UsageError
from paceline.observe import recording
from paceline.observe.stuck.processes import flight_recorder
from paceline.observe.stuck.recorder import REQUEST, RecordedOperation
from paceline.protocol import Member
from paceline.protocol.client import ClientCore, Request, RequestKind, Resync, Transmit
from paceline.ps import messages
from paceline.ps.client.exchange import KINDS, Copies, DataRequest, Exchange, exchange_of, pack
from paceline.ps.client.routes import RouteWatch
from paceline.ps.messages import RANGE, SYNCED, TICK, TICKS, TableSpec
from paceline.transport import (
    HEADER,
    MAGIC,
    PADS,
    PROTOCOL_VERSION,
    Channel,
    Endpoint,
    Header,
    Hello,
    Transport,
    frame_parts,
    read_meta,
)
from paceline.transport.backoff import Backoff
from paceline.transport.client import closed_channel

_NOTHING = np.empty(0, np.uint8)
_MAX_IN_FLIGHT = 256
_LARGE_BYTES = 1 << 19
# A server that buffers more than Limits.max_backlog_bytes of answers for a client stops reading from the client, and
# then both ends could wait for each other. So the client receives answers before it requests more than
# MAX_ANSWER_BYTES. The server's limit is larger, to have room for _MAX_IN_FLIGHT small answers as well.
MAX_ANSWER_BYTES = 1 << 26
"""The maximum number of bytes of requested values, if several requests are in flight."""

CLOSED = "this client was closed before the server's answer came"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.1
_CONNECT_S = 1.0


class ServerConnection:
    """Frames to and from one server. Not thread-safe: the client holds its lock.

    `watch` receives new views; `core` decides which messages are resent after a reconnection.
    """

    def __init__(
        self,
        transport: Transport,
        hello: Hello,
        core: ClientCore,
        watch: RouteWatch,
        copies: Copies,
        server: Member,
        *,
        specs: Mapping[int, TableSpec],
        timeout_s: float,
        reconnect_s: float,
    ) -> None:
        assert isinstance(server.address, Endpoint)
        self.rank = server.rank
        self.session = core.sessions[server.incarnation]
        self.patience_s = timeout_s
        """The time to wait for an unreachable server that is in the view."""
        self.lost: PacelineError | None = None
        self.core = core
        self._transport = transport
        self._target = server.address
        self.hello = hello
        self._timeout_s = timeout_s
        self._reconnect_s = reconnect_s
        self._watch = watch
        self._copies = copies
        self._specs = specs
        self._operations: dict[tuple[int, int], bytes] = {}
        self._closed_bytes = (0, 0)
        self.channel: Channel = closed_channel(server.address.tcp)

    def connect(self, timeout_s: float) -> None:
        channel = self._transport.connect(self._target, self.hello, timeout_s=timeout_s)
        self._closed_bytes = self.byte_counts()
        self.channel = channel
        if self.lost is not None:  # another thread has abandoned the connection
            channel.close()
        for instruction in self.core.connected(self.session.server):
            if isinstance(instruction, Transmit):
                channel.send(*exchange_of(instruction.request).frame)
            elif isinstance(instruction, Resync):
                self.resync(instruction)

    def send(self, data: DataRequest) -> Request:
        self.make_room(data.out)
        request = self.request(data)
        frame = pack(data, request, self.core.version)
        request.payload = exchange = Exchange(frame, data.out, data.is_private)
        if recording.recorder is not None:
            exchange.began_s = time.monotonic()
        self.record(request, data)
        if self.session.start(request):
            self.transmit(frame, request)
        return request

    def request(self, data: DataRequest) -> Request:
        return self.session.request(KINDS[data.kind], data.clock, data.sequence, None, bool(data.flags & TICKS))

    def record(self, request: Request, data: DataRequest) -> None:
        """Record the start of a request in the flight recorder."""
        if data.kind == TICK:
            return
        operation = self._operations.get((data.kind, data.table))
        if operation is None:
            spec = self._specs.get(data.table)
            name = "" if spec is None else spec.name
            operation = RecordedOperation(REQUEST, request.kind.value, subject=name, peer=self.rank).encode()
            self._operations[data.kind, data.table] = operation
        keys: Any = data.parts[0] if data.parts else ()
        count = int(keys[1] - keys[0]) if data.flags & RANGE else len(keys)
        exchange_of(request).event = flight_recorder().begin(operation, request.number, count, data.clock)

    def make_room(self, out: Any) -> None:
        """Receive answers if too many requests, or too many bytes of answers (including `out`), are in flight."""
        session = self.session
        if len(session.in_flight) >= _MAX_IN_FLIGHT and not session.awaits_view:
            self.receive_one(next(iter(session.in_flight.values())))
        if out is not None and out.nbytes >= _LARGE_BYTES:
            make_room(self, out.nbytes)

    def start(self, request: Request) -> None:
        """Send a request that replaces other requests, without receiving answers.

        Without a connection the request waits for the next one. A request that cannot be sent fails.
        """
        if self.session.start(request) and self.session.is_connected:
            try:
                self.channel.send(*exchange_of(request).frame)
            except ConnectionLostError:
                self._cut()
            except PacelineError as error:
                self._fail(request, error)
            except BaseException:  # Ctrl-C, perhaps within a frame: the next request reconnects and resends all
                self._cut()
                raise

    def resync(self, instruction: Resync) -> None:
        if self.session.is_connected:
            try:
                self.channel.send(
                    *frame_parts(
                        SYNCED,
                        flags=int(instruction.takes_part),
                        epoch=instruction.version,
                        clock=instruction.clock,
                        sequence=self.hello.rank,
                    )
                )
            except ConnectionLostError:
                self._cut()

    def call(
        self, message: msgspec.Struct, result: Any = Any, body: Sequence[Any] = (), *, sequence: int = 0
    ) -> tuple[Any, memoryview]:
        """Send a control message and wait; return the answer, decoded as `result`, and its body.

        A message that changes state needs a `sequence`, so that the server applies a repeated message only once. Raises
        StaleEpochError if the server has left the view, PeerError for an answer of another kind.
        """
        meta = messages.encode(message)
        size = sum(part.nbytes for part in body)
        request = self.session.request(RequestKind.CALL, 0, sequence)
        request.is_reported = True
        header = HEADER.pack(
            MAGIC, PROTOCOL_VERSION, messages.CALL, 0, 0, request.number, 0, 0, sequence, len(meta), size
        )  # fmt: skip
        frame = header, meta + PADS[-len(meta) & 7], *body, PADS[-size & 7]
        exchange = request.payload = Exchange(frame, is_call=True)
        operation = RecordedOperation(REQUEST, type(message).__name__, peer=self.rank).encode()
        exchange.event = flight_recorder().begin(operation, request.number)
        self.session.start(request)
        if not self.session.awaits_view or self._watch.has(self.session.server):
            self.transmit(frame, request)
        while not request.is_done:
            if self.session.awaits_view and not self._watch.has(self.session.server):
                self.depart()
            else:
                self.receive_one(request)
        if request.error is not None:
            raise request.error
        return read_meta(exchange.meta, result, f"an answer of server {self.rank}"), exchange.body

    def byte_counts(self) -> tuple[int, int]:
        statistics = self.channel.statistics()
        return self._closed_bytes[0] + statistics.bytes_received, self._closed_bytes[1] + statistics.bytes_sent

    def interrupt(self, reason: PacelineError | None = None) -> None:
        """Close the connection from any thread; a thread that waits for an answer then checks the view.

        With a `reason` the connection is given up: current and later calls raise the reason.
        """
        self.lost = self.lost or reason
        self.channel.close()

    @property
    def is_cut(self) -> bool:
        """Whether the connection is closed and messages may be lost; may be called from any thread."""
        session = self.session
        if self.lost is not None or session.awaits_view or not (session.in_flight or session.sends_clock):
            return False
        return self._watch.has(session.server) and (not session.is_connected or self.channel.has_ended())

    def reconnect_once(self) -> None:
        if self.is_cut:
            self._cut()
        if not self.session.is_connected and self.lost is None and self._watch.has(self.session.server):
            try:
                self.connect(min(self._reconnect_s, _CONNECT_S))
            except (AddressError, PeerError):
                self._cut()

    def close(self) -> None:
        if self.lost is None:
            self._fail_all(UsageError(CLOSED))
        self.channel.close()

    def _fail_all(self, error: PacelineError) -> None:
        self.lost = error
        for request in list(self.session.in_flight.values()):
            request.is_reported = True  # the caller receives `lost` as the error
            self._fail(request, error)

    def _fail(self, request: Request, error: PacelineError) -> None:
        exchange_of(request).record_end(has_failed=True)
        self.session.failed(request, error)

    def _cut(self) -> None:
        self.channel.close()
        self.session.disconnected()

    def depart(self) -> None:
        """Wait for a view without this server, and fail the calls in flight."""
        self._watch.must_follow = True
        for request in self.session.departed():
            self._fail(request, StaleEpochError(f"server {self.rank} has left the cluster"))

    def _reconnect(self, cause: ConnectionLostError) -> None:
        """Reconnect and resend all unanswered requests in order; wait for a view if the server has left."""
        self._cut()
        began, backoff = time.monotonic(), Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        while True:
            if self.lost is not None:  # another thread has given up the connection
                self._fail_all(self.lost)
                raise self.lost
            if not self._watch.has(self.session.server):
                self.depart()
                return
            try:
                self.connect(min(self._reconnect_s, _CONNECT_S))
                return
            except (AddressError, PeerError):
                self._cut()
                # The scheduler may still declare the server dead, and another server may then take over its buckets.
                patience_s = self._reconnect_s if self._watch.has_failed else self.patience_s
                if time.monotonic() - began > max(patience_s, self._reconnect_s):
                    lost = ConnectionLostError(
                        f"server {self.rank} was lost with its part of the tables ({cause}): start again from the last "
                        "saved model"
                    )
                    self._fail_all(lost)
                    raise lost from None
                self._watch.pause(backoff.next_s())
            except BaseException:
                self._cut()
                raise

    def receive_one(self, expected: Request) -> None:
        """Receive one answer, most likely the answer to `expected`."""
        channel, session = self.channel, self.session
        channel.last_header = None
        out = expected.payload.into  # type: ignore[union-attr]
        try:
            if out is not None and session.num_bodies == 1:
                header = channel.receive(out, self._timeout_s + 5.0)
                request = session.in_flight.get(header.request)
                if request is not expected and header.body_bytes:
                    raise self._unexpected(header)
            elif not session.num_bodies:
                header = channel.receive(_NOTHING, self._timeout_s + 5.0)
                request = session.in_flight.get(header.request)
            else:
                header = channel.receive_header(self._timeout_s + 5.0)
                request = session.in_flight.get(header.request)
                if request is not None:
                    exchange = exchange_of(request)
                    if not exchange.receive(channel, header):
                        raise self._unexpected(header)
                    if exchange.unreadable is not None:
                        self._fail(request, exchange.unreadable)
                        return
        except ConnectionLostError as error:
            self._reconnect(error)
            return
        except PacelineError as error:
            failed = channel.error_header()
            if failed is None:
                raise
            self._failed(failed, error)
            return
        except BaseException:
            self._cut()
            raise
        if request is None:
            session.orphan_answered(header.request)  # the answer to an abandoned request, or a duplicate answer
        else:
            self._answered(request, header)

    def _answered(self, request: Request, header: Header) -> None:
        exchange: Any = request.payload
        if not exchange.accepts(header):
            raise self._unexpected(header)
        if exchange.scatter is not None:
            exchange.put_values()
        request.flags = header.flags
        exchange.record_end()
        if exchange.began_s is not None and recording.recorder is not None:
            seconds = time.monotonic() - exchange.began_s
            recording.recorder.observe("paceline_table_request_seconds", seconds, request.kind.value)
        session = self.session
        for released in session.stabilize(header.request, header.clock):
            exchange_of(released).release(self._copies)
        if session.answered(request):
            exchange.retain(self._copies)
        else:
            exchange.frame = ()

    def _failed(self, header: Header, error: PacelineError) -> None:
        request = self.session.in_flight.get(header.request)
        if request is None:
            if not self.session.orphan_answered(header.request):
                raise error
        elif isinstance(error, StaleEpochError) and request.kind is not RequestKind.CALL:
            self.session.refused(request)
            self._watch.must_follow = True
        else:
            self._fail(request, error)

    def _unexpected(self, header: Header) -> PeerError:
        self._cut()
        return PeerError(
            f"server {self.rank} answered request {header.request} with a frame of kind {header.kind} and "
            f"{header.body_bytes} bytes, which does not match the request; the connection is closed"
        )

    def transmit(self, frame: tuple[Any, ...], request: Request) -> None:
        """Send the frame of a request in flight; if the connection is lost, reconnect and resend all frames."""
        try:
            self.channel.send(*frame)
        except ConnectionLostError as error:
            self._reconnect(error)
        except PacelineError:
            exchange_of(request).record_end(has_failed=True)
            self.session.withdraw(request)
            raise
        except BaseException:  # Ctrl-C, perhaps within a frame: the next request reconnects and resends all
            self._cut()
            raise


def make_room(connection: ServerConnection, more_bytes: int) -> None:
    session = connection.session
    while session.num_bodies and session.in_flight and not session.awaits_view:
        num_bytes = sum(exchange_of(request).num_answer_bytes for request in session.in_flight.values())
        if num_bytes + more_bytes <= MAX_ANSWER_BYTES:
            return
        connection.receive_one(next(iter(session.in_flight.values())))


class CutWatch:
    """Watches the connections of one client for breaks while the client waits for another server.

    A client notices a broken connection only at its next write. Without this watch a deadlock is possible: the client
    waits for a server, this server waits for a worker, and the worker needs a message that was lost on the broken
    connection.
    """

    def __init__(self) -> None:
        self.waiting_on: ServerConnection | None = None
        """The connection on which the client waits for an answer."""
        self.has_cuts = False
        """Whether :meth:`reconnect` must run.

        To avoid a race, :meth:`check` sets `has_cuts` before it reads `waiting_on`, and the client sets `waiting_on`
        before it reads `has_cuts`.
        """

    def check(self, connections: Sequence[ServerConnection]) -> bool:
        """Return whether a connection broke and lost messages. Call this from any thread, without the client's lock.

        If the client waits for another server, its wait is interrupted, and it reconnects to both servers.
        """
        cut = [connection for connection in connections if connection.is_cut]
        if not cut:
            return False
        self.has_cuts = True
        waiting_on = self.waiting_on
        if waiting_on is not None and waiting_on not in cut:
            waiting_on.interrupt()
        return True

    def reconnect(self, connections: Sequence[ServerConnection]) -> None:
        """Try once to reconnect each cut connection; the caller holds the client's lock."""
        self.has_cuts = False
        for connection in connections:
            connection.reconnect_once()
