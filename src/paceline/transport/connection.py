"""One connection at the server: handshake first, then every frame to the handler.

Runs on any asyncio transport: a socket's, TLS, or the one that `memory` makes up.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import secrets
import socket
from dataclasses import dataclass, field

import msgspec

from paceline.errors import ConnectionLostError, DeadlineError, PacelineError, ProtocolError
from paceline.transport.authentication import (
    NONCE_BYTES,
    Challenge,
    Hello,
    Proof,
    decode,
    encode_hello,
    prove,
    verify,
)
from paceline.transport.base import Handler
from paceline.transport.failures import error_meta
from paceline.transport.frames import Header, Kind, Limits, frame_parts, join
from paceline.transport.receiving import BufferPool, FrameReceiver
from paceline.transport.sending import TransportPeer

_logger = logging.getLogger("paceline.transport")
_SOCKET_BUFFER_BYTES = 1 << 22


@dataclass(eq=False, slots=True)
class Service:
    """What all connections of a listener share."""

    handler: Handler
    token: str
    hello: Hello
    limits: Limits
    handshake_timeout_s: float
    connections: set[Connection] = field(default_factory=set)
    pool: BufferPool = field(default_factory=BufferPool)


class Connection(FrameReceiver):
    """The asyncio protocol of one connection."""

    def __init__(self, service: Service) -> None:
        super().__init__(service.limits, service.pool)
        self._service = service
        self._peer: TransportPeer | None = None
        self._failure: Exception | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self.transport: asyncio.Transport

    def close(self) -> None:
        """Close the connection after what was sent has gone out."""
        if self._peer is not None:
            self._peer.close()
        else:
            self.stop_receiving()
            self.transport.close()

    # asyncio's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Challenge the client."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._address = _address_of(transport)
        enlarge_socket_buffers(transport.get_extra_info("socket"))
        if transport.get_extra_info("ssl_object") is None:  # TLS has its own idea of high and low water
            transport.set_write_buffer_limits(high=0)
        self._service.connections.add(self)
        self.deliver = self._greeted
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            pass  # `memory` without a loop: nobody is slow there
        else:
            self._timer = loop.call_later(self._service.handshake_timeout_s, self._greeting_missed)
        self._send_meta(Kind.CHALLENGE, msgspec.msgpack.encode(Challenge(self._nonce)))

    def pause_writing(self) -> None:
        """The socket is full."""
        if self._peer is not None:
            self._peer.pause()

    def resume_writing(self) -> None:
        """The socket has taken all."""
        if self._peer is not None:
            self._peer.resume()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the handler."""
        self._service.connections.discard(self)
        self.transport.close()  # it is closed, but with TLS Python 3.10 wants to be told
        self._cancel_timer()
        within_frame = self.is_within_frame and not self._stopped
        self.stop_receiving()
        peer = self._peer
        if peer is None:
            return
        self._peer = None
        peer.abandon()
        reason = self._failure
        if reason is None and (exc is not None or within_frame):
            where = " in the middle of a frame" if within_frame else ""
            cause = f" ({exc})" if exc is not None else ""
            reason = ConnectionLostError(
                f"the connection to {describe(peer.hello)} at {peer.address} broke{where}{cause}"
            )
            reason.__cause__ = exc
        try:
            self._service.handler.disconnected(peer, reason)
        except Exception:
            _logger.exception("the handler failed on the loss of %s", peer.address)

    # the receiver's calls

    def frame_failed(self, header: Header, error: Exception) -> None:
        """Answer with an ERROR frame; before the handshake is done, with the end."""
        if self._peer is None:
            self.stream_failed(error)
            return
        if not isinstance(error, PacelineError):
            _logger.error(
                "the handler failed on a frame of kind %d from %s", header.kind, self._address, exc_info=error
            )
        self._peer.send_error(header, error)

    def stream_failed(self, error: Exception) -> None:
        """Say why, and close."""
        _logger.warning("closing the connection to %s: %s", self._address, error)
        self._failure = error
        self.stop_receiving()
        if self._peer is not None:
            self._peer.send(join(frame_parts(Kind.REFUSED, meta=error_meta(error))))
            self._peer.close()
        else:
            self._send_meta(Kind.REFUSED, error_meta(error))
            self.transport.close()

    # the handshake

    def _greeted(self, header: Header, meta: memoryview, body: memoryview) -> None:
        if header.kind != Kind.HELLO:
            raise ProtocolError(f"got a frame of kind {header.kind} before the handshake; the connection is closed")
        service = self._service
        given = decode(meta, Proof)
        hello = verify(service.token, "client", given.nonce, self._nonce, given)
        self._cancel_timer()
        self._peer = peer = TransportPeer(self.transport, self, hello, self._address, service.limits)
        mine = encode_hello(service.hello)
        proof = prove(service.token, "server", given.nonce, self._nonce, mine)
        peer.send_frame(Kind.WELCOME, meta=msgspec.msgpack.encode(Proof(mine, self._nonce, proof)))
        self.allow_application(service.limits, functools.partial(service.handler.frame_received, peer))
        service.handler.connected(peer)

    def _greeting_missed(self) -> None:
        waited = self._service.handshake_timeout_s
        self.stream_failed(DeadlineError(f"{self._address} did not finish the handshake within {waited:g} s"))
        self.transport.abort()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _send_meta(self, kind: Kind, meta: bytes) -> None:
        self.transport.write(join(frame_parts(kind, meta=meta)))


def describe(hello: Hello) -> str:
    """Return who said the Hello, in words."""
    return f"{hello.role} {hello.rank}" + (f" ({hello.name})" if hello.name else "")


def enlarge_socket_buffers(connected: socket.socket | None) -> None:
    """Let the system hold more of a connection, as far as it is willing."""
    if connected is None:
        return
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        try:
            connected.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BUFFER_BYTES)
        except OSError:
            pass


def _address_of(transport: asyncio.Transport) -> str:
    name = transport.get_extra_info("peername")
    if isinstance(name, tuple):
        return f"{name[0]}:{name[1]}"
    return str(name) if name else "a process of this host"
