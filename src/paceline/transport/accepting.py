"""Accepted connections: authenticate the client, then pass every frame to the handler."""

from __future__ import annotations

import asyncio
import functools
import logging
import socket
import time
from dataclasses import dataclass, field

from paceline.errors import DeadlineError, PacelineError, ProtocolError
from paceline.transport.base import Handler
from paceline.transport.connection import Connection
from paceline.transport.failures import error_meta
from paceline.transport.frames import FrameKind, Header, Limits, frame_parts, join
from paceline.transport.receiving import BufferPool
from paceline.transport.security.authentication import Hello
from paceline.transport.security.binding import transport_binding
from paceline.transport.security.server_handshake import ServerHandshake
from paceline.transport.security.unauthenticated import LogRateLimit, UnauthenticatedConnections, max_unauthenticated
from paceline.transport.sending import TransportPeer

_logger = logging.getLogger("paceline.transport")


@dataclass(eq=False, slots=True)
class Service:
    """State that all connections of a listener share."""

    handler: Handler
    token: str
    hello: Hello
    limits: Limits
    handshake_timeout_s: float
    pool: BufferPool
    listener: str
    """The listener's id."""
    certificate: bytes = b""
    """The server's TLS certificate (DER); empty without TLS."""
    connections: set[AcceptedConnection] = field(default_factory=set)
    unauthenticated: UnauthenticatedConnections[socket.socket] = field(
        default_factory=lambda: UnauthenticatedConnections(max_unauthenticated())
    )
    log_limit: LogRateLimit = field(default_factory=LogRateLimit)


class AcceptedConnection(Connection):
    """The server's end. Exceptions of the handler are sent back as ERROR frames."""

    def __init__(self, service: Service, accepted: socket.socket | None = None) -> None:
        """``accepted``: the socket, if it is in the service's unauthenticated connections."""
        super().__init__(service.handler, service.limits, service.pool)
        self._service = service
        self._socket = accepted
        self._handshake = ServerHandshake(service.token, service.hello, service.listener)

    def _begin(self) -> None:
        self._address = _peer_address(self.transport)
        self._service.connections.add(self)
        self.deliver = self._hello_received
        self._start_timer(self._service.handshake_timeout_s, self._handshake_timed_out)
        self._send_meta(FrameKind.CHALLENGE, self._handshake.challenge())

    def connection_lost(self, exc: Exception | None) -> None:
        """Notify the listener and the handler."""
        self._service.connections.discard(self)
        self._leave_unauthenticated()
        super().connection_lost(exc)

    # calls of the receiver

    def frame_failed(self, header: Header, error: Exception) -> None:
        """Reply with an ERROR frame. Before the end of the handshake, close the connection."""
        if self._peer is None:
            self.stream_failed(error)
            return
        if not isinstance(error, PacelineError):
            _logger.error(
                "the handler failed on a frame of kind %d from %s", header.kind, self._address, exc_info=error
            )
        self._peer.send_error(header, error)

    def stream_failed(self, error: Exception) -> None:
        """Send the reason and close."""
        self._complain(error)
        self._failure = error
        self.stop_receiving()
        if self._peer is not None:
            self._peer.send(join(frame_parts(FrameKind.REFUSED, meta=error_meta(error))))
            self._peer.close()
        else:
            self._send_meta(FrameKind.REFUSED, error_meta(error))
            self.transport.close()

    def _complain(self, error: Exception) -> None:
        num_skipped = 0 if self._peer is not None else self._service.log_limit.record(time.monotonic())
        if num_skipped is not None:
            more = f" (and {num_skipped} earlier ones of unauthenticated peers, not logged)" if num_skipped else ""
            _logger.warning("closing the connection to %s: %s%s", self._address, error, more)

    # the handshake

    def _hello_received(self, header: Header, meta: memoryview, body: memoryview) -> None:
        if header.kind != FrameKind.HELLO:
            raise ProtocolError(f"got a frame of kind {header.kind} before the handshake; the connection is closed")
        service, handshake = self._service, self._handshake
        handshake.receive_hello(meta)
        self._cancel_timer()
        self._leave_unauthenticated()
        binding = transport_binding(self.transport, connecting=False, certificate=service.certificate)
        self._send_meta(FrameKind.WELCOME, handshake.welcome(binding))
        try:
            hello = handshake.identify()
        except PacelineError as error:  # WELCOME lets the client find the reason
            self._complain(error)
            self.close()
            return
        sending, receiving = handshake.seals or (None, None)
        self._peer = peer = TransportPeer(self.transport, self, hello, self._address, service.limits, seal=sending)
        deliver = functools.partial(service.handler.frame_received, peer)
        self.allow_application(service.limits, deliver, seal=receiving)
        service.handler.connected(peer)

    def _leave_unauthenticated(self) -> None:
        if self._socket is not None:
            self._service.unauthenticated.remove(self._socket)

    def _handshake_timed_out(self) -> None:
        waited = self._service.handshake_timeout_s
        self.stream_failed(DeadlineError(f"{self._address} did not finish the handshake within {waited:g} s"))
        self.transport.abort()


def _peer_address(transport: asyncio.Transport) -> str:
    name = transport.get_extra_info("peername")
    if isinstance(name, tuple):
        return f"{name[0]}:{name[1]}"
    return str(name) if name else "a process of this host"
