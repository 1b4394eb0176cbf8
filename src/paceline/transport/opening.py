"""Connections that an event loop opens to a server. The module `client` has blocking connections."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from typing import Any

from paceline.errors import AddressError, ConnectionLostError, DeadlineError, PacelineError, ProtocolError, VersionError
from paceline.transport.addresses import Address
from paceline.transport.base import Frame, Handler
from paceline.transport.client import cannot_reach
from paceline.transport.client_handshake import ClientHandshake
from paceline.transport.connection import Connection, describe
from paceline.transport.decoding import error_of
from paceline.transport.frames import FIRST_APPLICATION_KIND, FrameKind, Header, Limits
from paceline.transport.receiving import BufferPool, allocate
from paceline.transport.security.sealing import transport_binding
from paceline.transport.sending import TransportPeer
from paceline.transport.tls.channel import no_tls
from paceline.transport.unix_sockets import check_user

_logger = logging.getLogger("paceline.transport")


class OpenedConnection(Connection):
    """The client's end of a connection, in an event loop.

    The handler is first called after :meth:`wait_authenticated` has returned the peer. Frames that arrive earlier are
    queued. If the connection is lost earlier, :meth:`wait_authenticated` raises the error.
    """

    def __init__(
        self,
        handler: Handler,
        limits: Limits,
        pool: BufferPool,
        handshake: ClientHandshake,
        call_soon: Callable[[Callable[[], None]], object],
        *,
        lost_early: PacelineError | None = None,
        always_sealed: bool = False,
    ) -> None:
        """``call_soon`` calls a function later in this thread. ``lost_early`` is the error to raise if the connection
        closes before its first frame. With ``always_sealed``, frames have authentication tags even if no intermediary
        between the ends is possible.
        """
        super().__init__(handler, limits, pool)
        self._handshake = handshake
        self._address = str(handshake.address)
        self._call_soon = call_soon
        self._lost_early = lost_early
        self._always_sealed = always_sealed
        self._authenticated: asyncio.Future[TransportPeer] = asyncio.get_running_loop().create_future()
        # If the caller is cancelled, it never retrieves the future's exception, and asyncio would log this. So a
        # callback retrieves the exception too.
        self._authenticated.add_done_callback(lambda future: None if future.cancelled() else future.exception())
        self._is_known = False  # whether wait_authenticated() has returned the peer
        self._early: list[Frame] = []

    async def wait_authenticated(self, timeout_s: float) -> TransportPeer:
        """Wait for the end of the handshake, and return the peer. If the handshake fails, close the connection."""

        def late() -> None:
            error = DeadlineError(f"no answer from the server at {self._address} within {timeout_s:g} s")
            self._fail(self._handshake.explain(error))
            self.transport.abort()

        if not self._authenticated.done():
            self._start_timer(timeout_s, late)
        try:
            peer = await self._authenticated
        except asyncio.CancelledError:
            self.stop_receiving()
            self.transport.abort()
            raise
        if self._peer is None:
            raise self._failure or ConnectionLostError(
                f"the connection to {describe(peer.hello)} at {self._address} was closed"
            )
        self._is_known = True
        if self._early:
            self._call_soon(self._deliver_early)
        else:
            self.deliver = self._received
        return peer

    def _begin(self) -> None:
        self.deliver = self._handshake_received

    def connection_lost(self, exc: Exception | None) -> None:
        self._deliver_early()
        if self._peer is None and not self._authenticated.done():
            self._fail(self._lost_in_handshake(exc))
        super().connection_lost(exc)

    def _peer_lost(self, peer: TransportPeer, reason: Exception | None) -> None:
        """Report the loss of the peer to the handler, or to :meth:`wait_authenticated` if it has not returned yet."""
        if self._is_known:
            super()._peer_lost(peer, reason)
        else:
            self._failure = reason

    def frame_failed(self, header: Header, error: Exception) -> None:
        """Close the connection, because the server expects no reply to which an error could be reported."""
        peer = self._peer
        if peer is None:
            self._fail(error)
            self.transport.close()
            return
        expected = isinstance(error, PacelineError)
        _logger.error(
            "the handler failed on a frame of kind %d from %s, so the connection is closed: %s",
            header.kind,
            self._address,
            error,
            exc_info=None if expected else error,
        )
        self._failure = error
        peer.close()

    def stream_failed(self, error: Exception) -> None:
        if self._peer is not None:
            _logger.warning("closing the connection to %s: %s", self._address, error)
            self._failure = error
            self._peer.abort()
            return
        server = f"the server at {self._address}"
        if isinstance(error, VersionError):
            if self._handshake.expected_kind is FrameKind.CHALLENGE:
                self._send_meta(FrameKind.HELLO, b"")  # the header contains this process's version
            self._fail(VersionError(f"{server} is incompatible: {error}"))
        else:
            self._fail(ProtocolError(f"{server} is not a Paceline server: {error}"))
        self.transport.close()

    def _handshake_received(self, header: Header, meta: memoryview, body: memoryview) -> None:
        handshake = self._handshake
        self._lost_early = None
        handshake.check(header)
        if header.kind != handshake.expected_kind:
            raise handshake.refusal_error(meta)
        if handshake.expected_kind is FrameKind.CHALLENGE:
            binding = b"" if self._always_sealed else transport_binding(self.transport, connecting=True)
            self._send_meta(FrameKind.HELLO, handshake.answer(meta, binding))
            return
        hello = handshake.finish(meta)
        self._cancel_timer()
        sending, receiving = handshake.seals or (None, None)
        self._peer = peer = TransportPeer(
            self.transport, self, hello, self._address, self._limits, is_opened=True, seal=sending
        )
        self.allow_application(self._limits, self._keep_early, first_kind=FrameKind.REFUSED, seal=receiving)
        if not self._authenticated.done():
            self._authenticated.set_result(peer)

    def _fail(self, error: Exception) -> None:
        self._cancel_timer()
        self.stop_receiving()
        if not self._authenticated.done():
            self._authenticated.set_exception(error)

    def _lost_in_handshake(self, exc: Exception | None) -> PacelineError:
        cause = f" ({exc})" if exc is not None else ""
        lost = ConnectionLostError(f"the connection to the server at {self._address} was closed{cause}")
        return self._lost_early or self._handshake.explain(lost)

    def _received(self, header: Header, meta: memoryview, body: memoryview) -> None:
        peer = self._peer
        assert peer is not None
        if header.kind >= FIRST_APPLICATION_KIND or header.kind == FrameKind.ERROR:
            self._handler.frame_received(peer, header, meta, body)
        elif header.kind == FrameKind.REFUSED:
            self.stream_failed(error_of(meta))
        else:
            self.stream_failed(self._not_allowed(header))

    def _keep_early(self, header: Header, meta: memoryview, body: memoryview) -> None:
        copied = allocate(len(body))
        if body:
            copied[:] = body
        self._early.append(Frame(header, bytes(meta), copied))

    def _deliver_early(self) -> None:
        if not self._is_known:
            return
        early, self._early = self._early, []
        for header, meta, body in early:
            if not self._stopped:
                try:
                    self._received(header, memoryview(meta), body)
                except Exception as error:
                    self.frame_failed(header, error)
        if not self._stopped:
            self.deliver = self._received


_FULL_S = 0.005


async def dial(address: Address, timeout_s: float) -> socket.socket:
    """Return a connected socket in non-blocking mode. Raises AddressError or DeadlineError."""
    try:
        result = await asyncio.wait_for(_try(address, timeout_s), timeout_s)
    except asyncio.TimeoutError:  # since Python 3.11 this class includes the system's TimeoutError
        raise cannot_reach(address, TimeoutError(), timeout_s) from None
    if isinstance(result, OSError):
        raise cannot_reach(address, result, timeout_s) from None
    return result


async def _try(address: Address, timeout_s: float) -> socket.socket | OSError:
    """Return a connected socket, or the system's error. asyncio would log a raised error after a cancelled wait."""
    try:
        return await _dial(address, timeout_s)
    except OSError as error:
        return error


async def run_on(
    connected: socket.socket,
    connection: OpenedConnection,
    address: Address,
    context: ssl.SSLContext | None,
    timeout_s: float,
) -> None:
    """Run the connection on a connected socket. With ``context``, use TLS. Raises a PacelineError if TLS fails."""
    loop = asyncio.get_running_loop()
    secure: dict[str, Any] = {}
    if context is not None:
        secure = {"ssl": context, "server_hostname": address.host, "ssl_handshake_timeout": timeout_s}
    end = loop.time() + timeout_s
    try:
        await loop.create_connection(lambda: connection, sock=connected, **secure)
    except OSError as error:
        # asyncio raises ConnectionAbortedError after the timeout of a TLS handshake and in other cases.
        late = isinstance(error, ConnectionAbortedError) and loop.time() >= end
        raise no_tls(address, TimeoutError() if late else error, timeout_s) from None


async def _dial(address: Address, timeout_s: float) -> socket.socket:
    """Try to connect to each address of the host. Each attempt gets an equal share of the remaining time."""
    if address.scheme == "unix":
        return await _dial_unix(address)
    loop = asyncio.get_running_loop()
    end = loop.time() + timeout_s
    failure: OSError | None = None
    sockaddrs = await _resolve(address)
    for number, (family, kind, protocol, _, sockaddr) in enumerate(sockaddrs):
        share_s = (end - loop.time()) / (len(sockaddrs) - number)
        connected = socket.socket(family, kind, protocol)
        try:
            connected.setblocking(False)
            await asyncio.wait_for(loop.sock_connect(connected, sockaddr), share_s)
        except (OSError, asyncio.TimeoutError) as error:
            connected.close()
            failure = error if isinstance(error, OSError) else TimeoutError()
        except BaseException:
            connected.close()
            raise
        else:
            return connected
    raise failure or AddressError(f"cannot reach {address}: the host name has no IP address")


async def _resolve(address: Address) -> list[Any]:
    try:  # a numeric host needs no lookup, and therefore no thread
        return socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        return await asyncio.get_running_loop().getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)


async def _dial_unix(address: Address) -> socket.socket:
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connected.setblocking(False)
        while True:
            try:
                connected.connect(address.unix_name)
            except BlockingIOError:
                # The queue of the listener is full. This loop retries, because asyncio's sock_connect would wrongly
                # report the socket as connected.
                await asyncio.sleep(_FULL_S)
            else:
                check_user(connected, address)
                return connected
    except BaseException:
        connected.close()
        raise
