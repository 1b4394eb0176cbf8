"""Channels (clients' blocking connections) with TLS. They cannot use ``recvmsg_into`` or the kernel's timeouts."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from paceline.errors import AuthenticationError, ConnectionLostError, DeadlineError, PeerError
from paceline.transport.addresses import Address
from paceline.transport.channel import StreamChannel, too_long
from paceline.transport.client import is_hung_up, shut, wait_readable
from paceline.transport.frames import Limits, join, size_of, view_of
from paceline.transport.security.sealing import certificate_binding

_JOINED_BYTES = 1 << 14  # the size of a TLS record; buffers up to this total size are joined and written at once


class TLSChannel(StreamChannel):
    """A channel (a client's blocking connection) with TLS."""

    def __init__(self, connected: ssl.SSLSocket, address: Address, limits: Limits, send_timeout_s: float) -> None:
        super().__init__(address, limits)
        self._socket = connected
        self._send_timeout_s = send_timeout_s

    @override
    def binding(self) -> bytes:
        return certificate_binding(self._socket.getpeercert(binary_form=True) or b"")

    def _write(self, buffers: Sequence[Any]) -> int:
        size = sum(map(size_of, buffers))
        if size > self._limits.max_frame_bytes:
            raise too_long(size, self._limits)
        parts = (join(buffers),) if size <= _JOINED_BYTES else buffers
        try:
            for part in parts:
                if size_of(part):
                    self._socket.sendall(view_of(part))
        except TimeoutError:
            self.close()
            raise DeadlineError(
                f"{self._peer_name()} read no messages for {self._timeout_s:g} s. The connection is closed"
            ) from None
        except OSError as error:
            raise self._lost(error) from None
        return size

    def _read_scattered(self, buffers: Sequence[Any]) -> int:
        return self._read(memoryview(buffers[0]))

    def _read_first(self, size: int) -> int:
        return self._read(memoryview(self._first)[:size])

    def _read(self, view: memoryview) -> int:
        try:
            got = self._socket.recv_into(view)
        except TimeoutError:
            raise self._late() from None
        except OSError as error:  # ssl.SSLError is a subclass
            raise self._ended(error) from None
        if not got:
            raise self._ended(None)
        return got

    def _ended(self, error: OSError | None) -> PeerError:
        lost = self._lost(error)
        if self._frames_received:
            return lost
        return client_not_trusted(self.address)

    def _set_timeout(self, timeout_s: float) -> None:
        try:
            self._socket.settimeout(timeout_s)
        except OSError as error:
            raise self._lost(error) from None

    @override
    def poll(self, timeout_s: float) -> bool:
        return bool(self._returned) or self._socket.pending() > 0 or wait_readable(self._socket, timeout_s)

    @override
    def has_ended(self) -> bool:
        return is_hung_up(self._socket)

    @override
    def fileno(self) -> int:
        return self._socket.fileno()

    @override
    def close(self) -> None:
        shut(self._socket)


def wrap_tls(connected: socket.socket, context: ssl.SSLContext, address: Address, timeout_s: float) -> ssl.SSLSocket:
    """Do the TLS handshake and return the TLS socket. Raises AuthenticationError if the certificate is not trusted."""
    connected.settimeout(timeout_s)
    try:
        return context.wrap_socket(connected, server_hostname=address.host)
    except OSError as error:
        raise no_tls(address, error, timeout_s) from None
    finally:
        connected.close()  # has no effect if wrap_socket has taken the descriptor from this object


def client_not_trusted(address: Address) -> AuthenticationError:
    """Return the error for a TLS connection that ends before the server's first frame.

    In TLS 1.3 the client's handshake ends before the server checks the client's certificate. A server that rejects the
    certificate closes the connection after the client's handshake. With asyncio, the server sends no reason.
    """
    return AuthenticationError(
        f"the server at {address} closed the TLS connection before its first frame. It probably "
        "does not trust this process's certificate. Use a certificate from the cluster's authority (--tls-cert)"
    )


def no_tls(address: Address, error: OSError, timeout_s: float) -> PeerError | DeadlineError:
    if isinstance(error, TimeoutError):
        return DeadlineError(f"the server at {address} did not finish the TLS handshake in {timeout_s:g} s")
    if not isinstance(error, ssl.SSLError):
        return ConnectionLostError(f"the server at {address} closed the connection during the TLS handshake ({error})")
    detail = getattr(error, "verify_message", "") or error.reason or str(error)
    return AuthenticationError(
        f"no TLS connection to the server at {address}: {detail}. Check that both ends have a certificate "
        "from the same authority (--tls-ca) and that the server's certificate names this host"
    )
