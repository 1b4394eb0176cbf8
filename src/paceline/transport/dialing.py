"""Sockets connected from inside an event loop; `client` has the blocking version."""

from __future__ import annotations

import asyncio
import socket
import ssl
from typing import Any

from paceline.errors import AddressError
from paceline.transport.addresses import Address
from paceline.transport.client import cannot_reach
from paceline.transport.opening import OpenedConnection
from paceline.transport.tls.channel import no_tls
from paceline.transport.unix_sockets import check_user

_FULL_S = 0.005


async def dial(address: Address, timeout_s: float) -> socket.socket:
    """Return a connected socket in non-blocking mode. Raises AddressError or DeadlineError."""
    try:
        result = await asyncio.wait_for(_try(address, timeout_s), timeout_s)
    except asyncio.TimeoutError:  # from Python 3.11 on, the system's TimeoutError is also one
        raise cannot_reach(address, TimeoutError(), timeout_s) from None
    if isinstance(result, OSError):
        raise cannot_reach(address, result, timeout_s) from None
    return result


async def _try(address: Address, timeout_s: float) -> socket.socket | OSError:
    """Return the system's error instead of raising it: after a cancelled wait, asyncio would log it as unhandled."""
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
    """Run the connection on the socket, with TLS if there is a context. Raises as `wrap_tls`."""
    loop = asyncio.get_running_loop()
    secure: dict[str, Any] = {}
    if context is not None:
        secure = {"ssl": context, "server_hostname": address.host, "ssl_handshake_timeout": timeout_s}
    end = loop.time() + timeout_s
    try:
        await loop.create_connection(lambda: connection, sock=connected, **secure)
    except OSError as error:
        # asyncio ends a late handshake with ConnectionAbortedError.
        late = isinstance(error, ConnectionAbortedError) and loop.time() >= end
        raise no_tls(address, TimeoutError() if late else error, timeout_s) from None


async def _dial(address: Address, timeout_s: float) -> socket.socket:
    """Try every address of the host with an equal share of the remaining time."""
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
    raise failure or AddressError(f"cannot reach {address}: the host has no address")


async def _resolve(address: Address) -> list[Any]:
    try:  # a numeric host needs no thread to resolve
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
                # The listener's queue is full. sock_connect would consider the socket connected.
                await asyncio.sleep(_FULL_S)
            else:
                check_user(connected, address)
                return connected
    except BaseException:
        connected.close()
        raise
