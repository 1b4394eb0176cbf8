"""A listener in an event loop, and its connections. They authenticate clients and pass frames to the handler."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from typing_extensions import override

from paceline.errors import DeadlineError, PacelineError, ProtocolError
from paceline.transport.addresses import Endpoint
from paceline.transport.base import Handler, Listener
from paceline.transport.connection import Connection
from paceline.transport.decoding import error_meta
from paceline.transport.frames import FrameKind, Header, Limits, frame_parts, join
from paceline.transport.receiving import BufferPool
from paceline.transport.security.authentication import Hello
from paceline.transport.security.sealing import transport_binding
from paceline.transport.security.server_handshake import ServerHandshake
from paceline.transport.security.unauthenticated import LogRateLimit, UnauthenticatedConnections, max_unauthenticated
from paceline.transport.sending import TransportPeer
from paceline.transport.unix_sockets import is_other_user, remove_unix

_logger = logging.getLogger("paceline.transport")


@dataclass(eq=False, slots=True)
class Service:
    """The state that all connections of a listener share."""

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
    """The server's end of a connection. Exceptions of the handler are sent back as ERROR frames."""

    def __init__(self, service: Service, accepted: socket.socket | None = None) -> None:
        """``accepted`` is the accepted socket if the service counts it as an unauthenticated connection."""
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
        self._service.connections.discard(self)
        self._leave_unauthenticated()
        super().connection_lost(exc)

    def frame_failed(self, header: Header, error: Exception) -> None:
        """Reply to the frame with an ERROR frame. If the handshake has not finished, close the connection instead."""
        if self._peer is None:
            self.stream_failed(error)
            return
        if not isinstance(error, PacelineError):
            _logger.error(
                "the handler failed on a frame of kind %d from %s", header.kind, self._address, exc_info=error
            )
        self._peer.send_error(header, error)

    def stream_failed(self, error: Exception) -> None:
        """Send ``error`` to the client as the reason, and close the connection."""
        self._log_error(error)
        self._failure = error
        self.stop_receiving()
        if self._peer is not None:
            self._peer.send(join(frame_parts(FrameKind.REFUSED, meta=error_meta(error))))
            self._peer.close()
        else:
            self._send_meta(FrameKind.REFUSED, error_meta(error))
            self.transport.close()

    def _log_error(self, error: Exception) -> None:
        num_skipped = 0 if self._peer is not None else self._service.log_limit.record(time.monotonic())
        if num_skipped is not None:
            more = f" (and {num_skipped} earlier ones of unauthenticated peers, not logged)" if num_skipped else ""
            _logger.warning("closing the connection to %s: %s%s", self._address, error, more)

    def _hello_received(self, header: Header, meta: memoryview, body: memoryview) -> None:
        if header.kind != FrameKind.HELLO:
            raise ProtocolError(f"got a frame of kind {header.kind} before the handshake. The connection is closed")
        service, handshake = self._service, self._handshake
        handshake.receive_hello(meta)
        self._cancel_timer()
        self._leave_unauthenticated()
        binding = transport_binding(self.transport, connecting=False, certificate=service.certificate)
        self._send_meta(FrameKind.WELCOME, handshake.welcome(binding))
        try:
            hello = handshake.identify()
        except PacelineError as error:  # the WELCOME proved the server's identity, so the client trusts this reason
            self._log_error(error)
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


_LINGER_S = 1.0
_MAX_ACCEPTS = 64
"""The number of connections that are accepted before other tasks of the event loop run."""
_RETRY_S = 0.05


class SocketListener(Listener):
    """A listener on sockets. It accepts connections from :meth:`start` to :meth:`close`."""

    def __init__(
        self, endpoint: Endpoint, service: Service, listening: Sequence[socket.socket], context: ssl.SSLContext | None
    ) -> None:
        self.endpoint = endpoint
        self._service = service
        self._listening = listening
        self._context = context
        self._tasks: set[asyncio.Task[None]] = set()
        self._starting: set[socket.socket] = set()
        """The accepted sockets for which asyncio has not created a transport yet."""

    @classmethod
    def start(
        cls, endpoint: Endpoint, service: Service, listening: Sequence[socket.socket], context: ssl.SSLContext | None
    ) -> SocketListener:
        listener = cls(endpoint, service, listening, context)
        for bound in listening:
            listener._run(listener._accept_all(bound))
        return listener

    @property
    @override
    def num_connections(self) -> int:
        return len(self._service.connections)

    @override
    def set_hello(self, hello: Hello) -> None:
        self._service.hello = hello

    @override
    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for opened in (*self._listening, *self._starting):
            opened.close()
        connections = self._service.connections
        for connection in list(connections):
            connection.close()
        deadline = asyncio.get_running_loop().time() + _LINGER_S
        while connections and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.001)  # during this pause the event loop sends the queued frames
        for connection in list(connections):
            connection.transport.abort()
        while connections:
            await asyncio.sleep(0)
        if self.endpoint.unix is not None:
            remove_unix(self.endpoint.unix)

    def _run(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept_all(self, listening: socket.socket) -> None:
        is_full = False
        while True:
            for _ in range(_MAX_ACCEPTS):
                try:
                    connected, peer_address = listening.accept()
                except BlockingIOError:
                    await _wait_readable(listening)
                except ConnectionError:
                    continue  # the client has already closed the connection
                except OSError as error:
                    if not is_full:
                        _logger.warning("cannot accept a connection at %s: %s", self.endpoint, error)
                    is_full = True
                    await asyncio.sleep(_RETRY_S)  # probably all file descriptors are in use; wait until some are free
                else:
                    is_full = False
                    if self._start_connection(connected, peer_address):
                        # The event loop must run now, to close the file descriptor of the dropped connection.
                        break
            await asyncio.sleep(0)

    def _start_connection(self, connected: socket.socket, peer_address: Any) -> bool:
        """Start a connection on an accepted socket. Return whether an older connection was dropped for it."""
        if is_other_user(connected):
            _logger.debug("a connection of another user to the Unix socket is closed")
            connected.close()
            return False
        host = peer_address[0] if isinstance(peer_address, tuple) else ""
        dropped = self._service.unauthenticated.add(connected, host)
        if dropped is not None:
            _logger.debug("too many unauthenticated connections, so the oldest is dropped")
            with contextlib.suppress(OSError):
                dropped.shutdown(socket.SHUT_RDWR)  # asyncio's transport detects this and closes the socket
        connected.setblocking(False)
        self._starting.add(connected)
        self._run(self._start_asyncio(connected))
        return dropped is not None

    async def _start_asyncio(self, connected: socket.socket) -> None:
        timeout_s = self._service.handshake_timeout_s if self._context is not None else None
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                functools.partial(AcceptedConnection, self._service, connected),
                connected,
                ssl=self._context,
                ssl_handshake_timeout=timeout_s,
            )
        except BaseException as error:
            self._service.unauthenticated.remove(connected)
            connected.close()
            if not isinstance(error, OSError):
                raise
            _logger.debug("a connection without usable TLS is closed: %s", error)
        self._starting.discard(connected)


async def _wait_readable(listening: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.add_reader(listening, lambda: None if ready.done() else ready.set_result(None))
    try:
        await ready
    finally:
        loop.remove_reader(listening)
