"""Channel bindings (RFC 5056) detect whether both ends have the same connection.

A relay has two connections, one with each end. Each end therefore includes in its proof a value that only the two ends
of one connection share: the host for a Unix socket, the host and both ports for a loopback connection, the server's
certificate for TLS. Equal values exclude an intermediary that could alter frames. On other connections, and with an
intermediary (address translation, tunnel, proxy), frames are sealed.
"""

from __future__ import annotations

import hashlib
import ipaddress
import socket
from typing import Any

from paceline.transport.addresses import host_identity

IN_MEMORY = b"memory"


def socket_binding(connected: socket.socket | Any, *, connecting: bool) -> bytes:
    """Return the binding of a connected socket without TLS; empty if an intermediary is possible.

    ``connecting``: this end opened the connection. ``connected`` may be asyncio's view of a socket.
    """
    try:
        if connected.family == getattr(socket, "AF_UNIX", None):
            return _digest("unix", host_identity())
        local, remote = _loopback_address(connected.getsockname()), _loopback_address(connected.getpeername())
    except OSError:
        return b""  # already closed
    if not (local and remote):
        return b""
    return _digest("loopback", host_identity(), *((local, remote) if connecting else (remote, local)))


def certificate_binding(certificate: bytes) -> bytes:
    """Return the binding of a TLS connection to a server with this certificate (DER); empty without one."""
    return _digest("tls", hashlib.sha256(certificate).hexdigest()) if certificate else b""


def transport_binding(transport: Any, *, connecting: bool, certificate: bytes = b"") -> bytes:
    """Return the binding of an asyncio transport; ``certificate`` is this end's, if it is the server."""
    secured = transport.get_extra_info("ssl_object")
    if secured is not None:
        return certificate_binding(secured.getpeercert(binary_form=True) or b"" if connecting else certificate)
    connected = transport.get_extra_info("socket")
    return IN_MEMORY if connected is None else socket_binding(connected, connecting=connecting)


def _loopback_address(name: Any) -> str:
    """Return a loopback address and port as text; empty for another address."""
    host: ipaddress.IPv4Address | ipaddress.IPv6Address = ipaddress.ip_address(name[0].partition("%")[0])
    if isinstance(host, ipaddress.IPv6Address) and host.ipv4_mapped is not None:
        host = host.ipv4_mapped
    return f"{host} {name[1]}" if host.is_loopback else ""


def _digest(*parts: str) -> bytes:
    return hashlib.sha256("\0".join(parts).encode()).digest()
