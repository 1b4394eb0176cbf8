"""A listener on sockets in an event loop, with a limited number of unauthenticated connections."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
import ssl
from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from paceline.transport.accepting import AcceptedConnection, Service
from paceline.transport.addresses import Endpoint
from paceline.transport.base import Listener
from paceline.transport.security.authentication import Hello
from paceline.transport.unix_sockets import is_other_user, remove_unix

_logger = logging.getLogger("paceline.transport")
_LINGER_S = 1.0
_MAX_ACCEPTS = 64
"""Connections accepted before other tasks of the loop run."""
_RETRY_S = 0.05


class SocketListener(Listener):
    """Accepts connections from :meth:`start` to :meth:`close`."""

    def __init__(
        self, endpoint: Endpoint, service: Service, listening: Sequence[socket.socket], context: ssl.SSLContext | None
    ) -> None:
        self.endpoint = endpoint
        self._service = service
        self._listening = listening
        self._context = context
        self._tasks: set[asyncio.Task[None]] = set()
        self._starting: set[socket.socket] = set()
        """Accepted sockets that have no transport yet."""

    @classmethod
    def start(
        cls, endpoint: Endpoint, service: Service, listening: Sequence[socket.socket], context: ssl.SSLContext | None
    ) -> SocketListener:
        """Accept connections on these sockets in the running loop; a context enables TLS."""
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
            await asyncio.sleep(0.001)  # lets the loop send the backlog
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
                    continue  # already closed
                except OSError as error:
                    if not is_full:
                        _logger.warning("cannot accept a connection at %s: %s", self.endpoint, error)
                    is_full = True
                    await asyncio.sleep(_RETRY_S)  # probably no descriptors are left; some may be closed soon
                else:
                    is_full = False
                    if self._start_connection(connected, peer_address):
                        break  # the dropped connection holds a descriptor until the loop runs
            await asyncio.sleep(0)

    def _start_connection(self, connected: socket.socket, peer_address: Any) -> bool:
        """Start a connection; return whether another one was dropped to make room."""
        if is_other_user(connected):
            _logger.debug("a connection of another user to the Unix socket is closed")
            connected.close()
            return False
        host = peer_address[0] if isinstance(peer_address, tuple) else ""
        dropped = self._service.unauthenticated.add(connected, host)
        if dropped is not None:
            _logger.debug("too many unauthenticated connections; the oldest is dropped")
            with contextlib.suppress(OSError):
                dropped.shutdown(socket.SHUT_RDWR)  # its transport detects the end and closes it
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
