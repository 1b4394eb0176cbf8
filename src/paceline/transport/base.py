"""Interfaces of transports: for servers Handler, Peer, Listener, for clients Channel.

A server is one event loop: it calls a :class:`Handler` for every frame and never blocks. A client is a thread that
blocks on a :class:`Channel`, or an event loop that opens a :class:`Peer`. :class:`Transport` creates all of them.
Implementations are ``sockets``, ``memory`` and, around either, ``faulty``; `paceline.testing.check_transport` is their
conformance test.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

from paceline.transport.addresses import Address, Endpoint
from paceline.transport.frames import Buffer, FrameKind, Header, WritableBuffer
from paceline.transport.security.authentication import Hello


class Statistics(NamedTuple):
    """Counters of one connection, headers and padding included."""

    bytes_received: int
    bytes_sent: int
    frames_received: int
    frames_sent: int


class Frame(NamedTuple):
    """A frame that owns its memory."""

    header: Header
    meta: bytes
    body: memoryview
    """Writable, 8-aligned."""


class Peer(ABC):
    """The other end of a connection of an event loop: a connected client or an opened server.

    Not thread-safe: for the event loop's thread only.
    """

    hello: Hello
    """The Hello of the other end."""
    address: str
    """Its address, for messages."""

    @abstractmethod
    def send(self, *parts: Buffer) -> None:
        """Send one frame given as its parts (`frame_parts`) or as one bytes buffer; never blocks.

        Parts of a small frame are copied into one buffer. Unsent parts of a larger frame are kept *without a copy*: do
        not write to a mutable buffer before :attr:`write_backlog_bytes` is 0.
        """

    @abstractmethod
    def send_error(self, request: Header, error: Exception) -> None:
        """Answer ``request`` with an ERROR frame; the client raises the same class.

        Raises UsageError on an opened connection, because only servers answer with errors.
        """

    @property
    @abstractmethod
    def write_backlog_bytes(self) -> int:
        """Return the number of sent bytes that are still buffered here.

        Beyond ``Limits.max_backlog_bytes``, the requests of a client are not read. An opened connection is always read,
        because otherwise both ends could wait for each other; its caller must limit the backlog.
        """

    @abstractmethod
    def pause_receiving(self) -> None:
        """Stop reading from the peer until :meth:`resume_receiving` (backpressure). Idempotent.

        Partly received frames may still arrive. The peer's end is not detected meanwhile. No effect in memory.
        """

    @abstractmethod
    def resume_receiving(self) -> None:
        """Resume reading from the peer. Idempotent."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection after the backlog is sent; ``disconnected`` follows. Idempotent.

        No more frames are received, and later sends are dropped.
        """

    @abstractmethod
    def abort(self) -> None:
        """Close the connection immediately and drop the backlog; ``disconnected`` follows. Idempotent."""

    @abstractmethod
    def statistics(self) -> Statistics:
        """Return the connection's counters."""


class Handler(ABC):
    """Processes the frames of an event loop. All methods run in the loop's thread and must not block."""

    def connected(self, peer: Peer) -> None:  # noqa: B027  (to do nothing is a choice)
        """Handle a new client that has proved that it holds the token."""

    @abstractmethod
    def frame_received(self, peer: Peer, header: Header, meta: memoryview, body: memoryview) -> None:
        """Handle a frame. ``meta`` and ``body`` are valid only during the call: copy them to keep them.

        An exception is sent back as an ERROR frame for this request; one other than a PacelineError is logged too. On
        an opened connection, where the peer expects no reply, the exception is logged and closes the connection.
        """

    def disconnected(self, peer: Peer, reason: Exception | None) -> None:  # noqa: B027  (to do nothing is a choice)
        """Handle the loss of a peer. ``reason`` is None if either end closed between two frames."""


class Channel(ABC):
    """A client's connection: blocking, in order. One thread may send while another receives.

    ``timeout_s`` bounds the wait for the start of a frame, and then for each of its parts. A :class:`DeadlineError`
    before the start leaves the channel intact; within a frame it closes the channel. Every other failure of the
    connection is a :class:`ConnectionLostError` that names the peer.
    """

    address: Address
    """The address of the server."""
    peer: Hello
    """The server's Hello."""
    last_header: Header | None = None
    """The header of the last received frame; after a reported error, the header of its ERROR frame."""
    last_meta: bytes = b""
    """The meta of the last frame from :meth:`receive`."""

    def error_header(self) -> Header | None:
        """Return the last frame's header if it was an ERROR frame, which names the failed request; else None."""
        header = self.last_header
        return header if header is not None and header.kind == FrameKind.ERROR else None

    @abstractmethod
    def send(self, *parts: Buffer) -> None:
        """Send one or more frames given as parts (`frame_parts`), without a copy, until the kernel has all."""

    @abstractmethod
    def receive(self, into: WritableBuffer, timeout_s: float) -> Header:
        """Receive a frame with a body of at most ``into``, in place; an equal size is fastest (one system call).

        The frame's meta is then in :attr:`last_meta`. Raises the error of an ERROR frame, and ProtocolError (the
        connection is closed) if the body is longer.
        """

    @abstractmethod
    def receive_header(self, timeout_s: float) -> Header:
        """Receive the header of the next frame; skips unread parts of the last one. Raises as ``receive``."""

    @abstractmethod
    def receive_meta(self) -> bytes:
        """Receive the meta of the frame whose header was received."""

    @abstractmethod
    def receive_into(self, buffer: WritableBuffer) -> None:
        """Fill ``buffer`` with the next bytes of the body of the frame whose header was received."""

    @abstractmethod
    def receive_frame(self, timeout_s: float) -> Frame:
        """Receive a whole frame into fresh memory. Raises as ``receive``."""

    @abstractmethod
    def poll(self, timeout_s: float) -> bool:
        """Wait for data or the connection's end; return whether either has arrived."""

    @abstractmethod
    def has_ended(self) -> bool:
        """Return whether either end has closed the connection, without waiting, from any thread.

        Unread data from before the end may remain. On TLS, an orderly end counts only after its close message is read.
        """

    @abstractmethod
    def fileno(self) -> int:
        """Return the file descriptor for selectors. Call ``poll(0)`` first, as bytes may be buffered here."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection; a waiting thread gets ConnectionLostError. Idempotent."""

    @abstractmethod
    def statistics(self) -> Statistics:
        """Return the connection's counters."""


class Listener(ABC):
    """A running server."""

    endpoint: Endpoint

    @property
    @abstractmethod
    def num_connections(self) -> int:
        """Return the number of connections, unauthenticated ones included."""

    @abstractmethod
    def introduce(self, hello: Hello) -> None:
        """Set the Hello for future clients: the identity is available later than the address."""

    @abstractmethod
    async def close(self) -> None:
        """Stop listening, close every connection, remove the Unix socket. Idempotent."""


class Transport(ABC):
    """Creates channels, opened peers and listeners."""

    @abstractmethod
    def connect(self, target: Endpoint | Address | str, hello: Hello, *, timeout_s: float = 10.0) -> Channel:
        """Connect and authenticate.

        Raises AddressError (no listener), AuthenticationError, VersionError, DeadlineError, ConnectionLostError or
        ProtocolError.
        """

    @abstractmethod
    async def open(
        self, handler: Handler, target: Endpoint | Address | str, hello: Hello, *, timeout_s: float = 10.0
    ) -> Peer:
        """Connect and authenticate from inside an event loop, without blocking it.

        All of the server's frames go to ``handler.frame_received``: its replies, and also its ERROR frames, as frames
        of ``FrameKind.ERROR`` with the request's header (``error_of(meta)`` is the exception). The end of the
        connection, by either side, goes once to ``handler.disconnected``; ``handler.connected`` is not called. The
        handler gets no call before the direct caller of this coroutine has the peer; a connection that is lost earlier
        is only a failure of this call.

        ``timeout_s`` bounds reaching the server, and then its handshake. Raises as :meth:`connect`.
        """

    @abstractmethod
    async def serve(
        self, handler: Handler, hello: Hello, *, address: Address | str | None = None, unix: bool = True
    ) -> Listener:
        """Listen at ``address`` (default: a free loopback port) and, if ``unix``, on a Unix socket.

        ``hello`` is sent to clients. Raises AddressError.
        """
