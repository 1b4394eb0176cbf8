"""The base class of connections in an event loop.

A connection reports received frames and its end to the handler. It runs on any asyncio transport: a socket, TLS, or a
replacement in tests. The subclasses in the modules `listening` and `opening` differ in the handshake and in the
handling of failures.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from abc import abstractmethod
from collections.abc import Callable

from paceline.errors import ConnectionLostError
from paceline.transport.base import Handler
from paceline.transport.frames import FrameKind, Limits, frame_parts, join
from paceline.transport.receiving import BufferPool, FrameReceiver
from paceline.transport.security.authentication import Hello
from paceline.transport.sending import TransportPeer

_logger = logging.getLogger("paceline.transport")
_SOCKET_BUFFER_BYTES = 1 << 22


class Connection(FrameReceiver):
    """The asyncio protocol of one connection. This class is abstract; its subclasses do the handshake."""

    def __init__(self, handler: Handler, limits: Limits, pool: BufferPool) -> None:
        super().__init__(limits, pool)
        self._handler = handler
        self._limits = limits
        self._peer: TransportPeer | None = None
        self._failure: Exception | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.transport: asyncio.Transport

    @abstractmethod
    def _begin(self) -> None:
        """Begin the handshake. ``transport`` is connected."""

    def close(self) -> None:
        if self._peer is not None:
            self._peer.close()
        else:
            self.stop_receiving()
            self.transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        enlarge_socket_buffers(transport.get_extra_info("socket"))
        if transport.get_extra_info("ssl_object") is None:  # for TLS, asyncio sets the limits
            transport.set_write_buffer_limits(high=0)
        self._begin()

    def pause_writing(self) -> None:
        if self._peer is not None:
            self._peer.pause()

    def resume_writing(self) -> None:
        if self._peer is not None:
            self._peer.resume()

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport.close()  # the TLS of Python 3.10 requires this call, although the transport is closed
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
        self._peer_lost(peer, reason)

    def _peer_lost(self, peer: TransportPeer, reason: Exception | None) -> None:
        try:
            self._handler.disconnected(peer, reason)
        except Exception:
            _logger.exception("the handler failed on the loss of %s", peer.address)

    def _start_timer(self, timeout_s: float, call: Callable[[], None]) -> None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return  # in tests, a transport may have no event loop
        self._timer = loop.call_later(timeout_s, call)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _send_meta(self, kind: FrameKind, meta: bytes) -> None:
        self.transport.write(join(frame_parts(kind, meta=meta)))


def describe(hello: Hello) -> str:
    return f"{hello.role} {hello.rank}" + (f" ({hello.name})" if hello.name else "")


def enlarge_socket_buffers(connected: socket.socket | None) -> None:
    """Request larger system buffers for a connection, within the system's limits."""
    if connected is None:
        return
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        try:
            connected.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BUFFER_BYTES)
        except OSError:
            pass
