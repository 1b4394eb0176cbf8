"""The transport on TCP and Unix sockets, with optional TLS."""

from __future__ import annotations

import asyncio
import secrets
import ssl

from typing_extensions import override

from paceline.errors import AddressError
from paceline.transport.addresses import Address, Endpoint, announced_host, bind_tcp, host_identity
from paceline.transport.base import Channel, Handler, Listener, Peer, Transport
from paceline.transport.channel import StreamChannel
from paceline.transport.client import PlainChannel, open_socket
from paceline.transport.client_handshake import ClientHandshake, authenticate
from paceline.transport.frames import Limits
from paceline.transport.listening import Service, SocketListener
from paceline.transport.opening import OpenedConnection, dial, run_on
from paceline.transport.receiving import BufferPool
from paceline.transport.security.authentication import Hello, check_token
from paceline.transport.tls.channel import TLSChannel, client_not_trusted, wrap_tls
from paceline.transport.tls.contexts import TLS
from paceline.transport.unix_sockets import bind_unix, check_user, has_unix_sockets, remove_unix


class SocketTransport(Transport):
    """Creates channels, peers and listeners on TCP and Unix sockets."""

    def __init__(
        self,
        token: str,
        *,
        tls: TLS | None = None,
        limits: Limits | None = None,
        handshake_timeout_s: float = 10.0,
        send_timeout_s: float = 60.0,
        always_sealed: bool = False,
    ) -> None:
        """``send_timeout_s`` is the time after which a client fails if the server does not read its frames.

        With ``always_sealed``, the frames of connections that this process opens have authentication tags even if no
        intermediary is possible. The constructor and :meth:`serve` read the files of ``tls``. New connections do not
        read them again. Raises UsageError if a file is unusable.
        """
        self._token = check_token(token)
        self._tls = tls
        self._client_context = tls.client_context() if tls is not None else None
        self._limits = limits or Limits()
        self._handshake_timeout_s = handshake_timeout_s
        self._send_timeout_s = send_timeout_s
        self._always_sealed = always_sealed

    @override
    def connect(self, target: Endpoint | Address | str, hello: Hello, *, timeout_s: float = 10.0) -> Channel:
        """Connect to a server. If the server is on this host, its Unix socket is preferred."""
        first, *fallbacks = self._addresses(target)
        try:
            return self._connect(first, _listener_id(target), hello, timeout_s)
        except AddressError:
            if not fallbacks:
                raise
        return self._connect(fallbacks[0], _listener_id(target), hello, timeout_s)

    def _addresses(self, target: Endpoint | Address | str) -> list[Address]:
        if isinstance(target, Endpoint):
            best = target.tcp if self._tls is not None else target.best()
            return [best] if best == target.tcp else [best, target.tcp]
        return [Address.parse(target) if isinstance(target, str) else target]

    def _context(self, address: Address) -> ssl.SSLContext | None:
        return self._client_context if address.scheme == "tcp" else None

    def _connect(self, address: Address, listener: str, hello: Hello, timeout_s: float) -> Channel:
        context = self._context(address)
        connected = open_socket(address, timeout_s)
        check_user(connected, address)
        channel: StreamChannel
        if context is not None:
            wrapped = wrap_tls(connected, context, address, timeout_s)
            channel = TLSChannel(wrapped, address, self._limits, self._send_timeout_s)
        else:
            channel = PlainChannel(connected, address, self._limits, self._send_timeout_s)
        authenticate(channel, self._token, hello, timeout_s, listener=listener, always_sealed=self._always_sealed)
        return channel

    @override
    async def open(
        self, handler: Handler, target: Endpoint | Address | str, hello: Hello, *, timeout_s: float = 10.0
    ) -> Peer:
        """Connect to a server in an event loop. If the server is on this host, its Unix socket is preferred."""
        first, *fallbacks = self._addresses(target)
        try:
            return await self._open(handler, first, _listener_id(target), hello, timeout_s)
        except AddressError:
            if not fallbacks:
                raise
        return await self._open(handler, fallbacks[0], _listener_id(target), hello, timeout_s)

    async def _open(self, handler: Handler, address: Address, listener: str, hello: Hello, timeout_s: float) -> Peer:
        context = self._context(address)
        loop = asyncio.get_running_loop()
        connection = OpenedConnection(
            handler,
            self._limits,
            BufferPool.of_running_loop(),
            ClientHandshake(address, self._token, hello, listener=listener),
            loop.call_soon,
            lost_early=client_not_trusted(address) if context is not None else None,
            always_sealed=self._always_sealed,
        )
        await run_on(await dial(address, timeout_s), connection, address, context, timeout_s)
        return await connection.wait_authenticated(timeout_s)

    @override
    async def serve(
        self, handler: Handler, hello: Hello, *, address: Address | str | None = None, unix: bool = True
    ) -> Listener:
        """Listen on TCP and, without TLS, on a Unix socket."""
        requested = Address.parse(address or "127.0.0.1:0") if not isinstance(address, Address) else address
        context = self._tls.server_context() if self._tls is not None else None
        pool = BufferPool.of_running_loop()
        service = Service(
            handler,
            self._token,
            hello,
            self._limits,
            self._handshake_timeout_s,
            pool,
            secrets.token_hex(8),
            self._tls.certificate() if self._tls is not None else b"",
        )
        bound = bind_tcp(requested)
        port = bound[0].getsockname()[1]
        unix_address: Address | None = None
        try:
            if unix and context is None and has_unix_sockets():
                unix_socket, unix_address = bind_unix()
                bound.append(unix_socket)
            tcp = Address("tcp", host=announced_host(requested.host), port=port)
            endpoint = Endpoint(tcp, unix_address, host_identity(), service.listener)
            return SocketListener.start(endpoint, service, bound, context)
        except BaseException:
            for listening in bound:
                listening.close()
            if unix_address is not None:
                remove_unix(unix_address)
            raise


def _listener_id(target: Endpoint | Address | str) -> str:
    return target.listener if isinstance(target, Endpoint) else ""
