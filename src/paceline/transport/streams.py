"""Authenticate sockets on which the caller then sends data of its own format instead of frames.

At each end, a blocking thread does the handshake of the module `authentication`. It reads no bytes after the handshake,
because these bytes belong to the caller.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable

from paceline.errors import AuthenticationError, PacelineError, ProtocolError
from paceline.transport.addresses import Address
from paceline.transport.channel import StreamChannel
from paceline.transport.client import PlainChannel, open_socket
from paceline.transport.client_handshake import authenticate
from paceline.transport.decoding import error_meta
from paceline.transport.frames import FrameKind, Limits, frame_parts
from paceline.transport.security.authentication import Hello
from paceline.transport.security.sealing import certificate_binding, socket_binding
from paceline.transport.security.server_handshake import ServerHandshake
from paceline.transport.tls.channel import TLSChannel, wrap_tls
from paceline.transport.tls.stream import plain_end
from paceline.transport.unix_sockets import check_user

_HANDSHAKE_BYTES = Limits().max_handshake_bytes
_LIMITS = Limits(max_frame_bytes=_HANDSHAKE_BYTES, max_meta_bytes=_HANDSHAKE_BYTES)


def connect_stream(
    address: Address,
    token: str,
    hello: Hello,
    timeout_s: float,
    *,
    listener: str = "",
    context: ssl.SSLContext | None = None,
) -> tuple[socket.socket, Hello]:
    """Connect and authenticate. Return the socket in blocking mode, and the Hello (identity) of the other end.

    ``listener`` is the id of the expected listener, if known. ``context`` enables TLS. Unix sockets get large buffers,
    and TCP sockets keep the system's sizes. Raises the errors of :meth:`Transport.connect`.
    """
    connected = open_socket(address, timeout_s, enlarge=address.scheme == "unix")
    check_user(connected, address)
    if context is None:
        channel = PlainChannel(connected, address, _LIMITS, timeout_s)
        authenticate(channel, token, hello, timeout_s, listener=listener)
        return connected, channel.peer
    wrapped = wrap_tls(connected, context, address, timeout_s)
    encrypted = TLSChannel(wrapped, address, _LIMITS, timeout_s)
    authenticate(encrypted, token, hello, timeout_s, listener=listener)
    return plain_end(wrapped), encrypted.peer


def welcome_stream(
    connected: socket.socket,
    token: str,
    hello: Hello,
    timeout_s: float,
    expect: Callable[[Hello], None] | None = None,
    *,
    listener: str = "",
    context: ssl.SSLContext | None = None,
    certificate: bytes = b"",
) -> tuple[socket.socket, Hello]:
    """Do the server's half of the handshake on an accepted socket. Return the socket and the client's Hello (identity).

    ``context`` and its ``certificate`` (DER) enable TLS. With TLS, the returned socket differs from ``connected``.

    ``expect`` is called with the client's Hello before the client is accepted. It raises a PacelineError to reject the
    client. If the handshake fails, the client receives the reason, the socket is closed and the error is raised.
    ``timeout_s`` limits each wait.
    """
    name = connected.getpeername() if connected.family != getattr(socket, "AF_UNIX", None) else ()
    address = Address("tcp", name[0], name[1]) if name else Address("unix", path="/")
    channel: StreamChannel = PlainChannel(connected, address, _LIMITS, timeout_s)
    wrapped: ssl.SSLSocket | None = None
    try:
        binding = b""
        if context is None:
            binding = socket_binding(connected, connecting=False)
        else:
            wrapped = _accept_tls(connected, context, address, timeout_s)
            channel = TLSChannel(wrapped, address, _LIMITS, timeout_s)
            binding = certificate_binding(certificate)
        client_hello = _welcome(channel, ServerHandshake(token, hello, listener), binding, timeout_s, expect)
        return connected if wrapped is None else plain_end(wrapped), client_hello
    except BaseException as error:
        if isinstance(error, PacelineError):
            _refuse(channel, error)
        channel.close()
        raise


def _accept_tls(connected: socket.socket, context: ssl.SSLContext, address: Address, timeout_s: float) -> ssl.SSLSocket:
    """Return the server's end of a TLS connection.

    It has a duplicate descriptor, so the caller can close `connected`.
    """
    own = connected.dup()
    own.settimeout(timeout_s)
    try:
        return context.wrap_socket(own, server_side=True)
    except OSError as error:
        own.close()
        raise AuthenticationError(f"no TLS connection with a client at {address}: {error}") from None


def _welcome(
    channel: StreamChannel,
    handshake: ServerHandshake,
    binding: bytes,
    timeout_s: float,
    expect: Callable[[Hello], None] | None,
) -> Hello:
    channel.send(*frame_parts(FrameKind.CHALLENGE, meta=handshake.challenge()))
    header = channel.next_header(timeout_s)
    if header.kind != FrameKind.HELLO:
        raise ProtocolError(f"got a frame of kind {header.kind} before the handshake. The connection is closed")
    handshake.receive_hello(channel.receive_meta())
    welcome = handshake.welcome(binding)
    if handshake.is_relayed:
        raise AuthenticationError(
            f"the connection from {channel.address} goes through a relay: the connection that the client opened is not "
            "the one that arrived here. Connect directly to this process"
        )
    try:
        client_hello = handshake.identify()
    except PacelineError:
        channel.send(*frame_parts(FrameKind.WELCOME, meta=welcome))  # proves that a refusal comes from this server
        raise
    if expect is not None:
        expect(client_hello)
    channel.send(*frame_parts(FrameKind.WELCOME, meta=welcome))
    return client_hello


def _refuse(channel: StreamChannel, error: PacelineError) -> None:
    try:
        channel.send(*frame_parts(FrameKind.REFUSED, meta=error_meta(error)))
    except PacelineError:
        pass  # the connection is already closed
