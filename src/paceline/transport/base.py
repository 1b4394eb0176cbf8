"""The interfaces of transports: Handler, Peer and Listener for servers, and Channel for clients.

A server is one event loop, which calls a :class:`Handler` for every frame and never blocks. A client is a thread that
blocks on a :class:`Channel`, or an event loop that opens a :class:`Peer`. A :class:`Transport` creates channels, peers
and listeners. The module `sockets` implements the interfaces, and `paceline.testing.check_transport` tests an
implementation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

from paceline.transport.addresses import Address, Endpoint
from paceline.transport.frames import Buffer, FrameKind, Header, WritableBuffer
from paceline.transport.security.authentication import Hello


class Statistics(NamedTuple):
    """The numbers of frames and bytes that one connection sent and received. Bytes include headers and padding."""

    bytes_received: int
    bytes_sent: int
    frames_received: int
    frames_sent: int


class Frame(NamedTuple):
    """A frame that owns its memory."""

    header: Header
    meta: bytes
    body: memoryview
    """The body in writable memory. Its address is a multiple of 8."""


class Peer(ABC):
    """The other end of a connection in an event loop: a client that connected, or a server to which this end connected.

    A peer is not thread-safe. Only the event loop's thread may use it.
    """

    hello: Hello
    """The Hello (identity) that the other end sent in the handshake."""
    address: str
    """The address of the other end, for messages."""

    @abstractmethod
    def send(self, *parts: Buffer) -> None:
        """Send one frame, given as its parts (see `frame_parts`) or as one bytes object. The method never blocks.

        The parts of a small frame are copied. The unsent parts of a larger frame are queued *without a copy*, so the
        caller must not change their memory before :attr:`write_backlog_bytes` is 0.
        """

    @abstractmethod
    def send_error(self, request: Header, error: Exception) -> None:
        """Reply to ``request`` with an ERROR frame. The client raises an error of the class of ``error``.

        Raises UsageError on a connection that this process opened, because only servers reply with errors.
        """

    @property
    @abstractmethod
    def write_backlog_bytes(self) -> int:
        """Return the number of bytes passed to :meth:`send` that this process still buffers.

        If a client's backlog exceeds ``Limits.max_backlog_bytes``, the listener stops reading the client's requests. A
        connection that this process opened never stops reading, because both ends could then wait for each other. Its
        user must limit the backlog.
        """

    @abstractmethod
    def pause_receiving(self) -> None:
        """Stop reading from the peer until :meth:`resume_receiving` (backpressure). Idempotent.

        Frames that this process has already read may still be delivered. During the pause a lost connection is not
        detected.
        """

    @abstractmethod
    def resume_receiving(self) -> None:
        """Resume reading from the peer. Idempotent."""

    @abstractmethod
    def close(self) -> None:
        """Send the backlog, and then close the connection. The handler's ``disconnected`` is called. Idempotent.

        Frames that either end sends later are dropped.
        """

    @abstractmethod
    def abort(self) -> None:
        """Close the connection now and drop the backlog. The handler's ``disconnected`` is called. Idempotent."""

    @abstractmethod
    def statistics(self) -> Statistics:
        """Return the connection's counters."""


class Handler(ABC):
    """Processes the frames that an event loop receives. All methods run in the loop's thread and must not block."""

    def connected(self, peer: Peer) -> None:  # noqa: B027  (subclasses may do nothing)
        """Handle a new, authenticated client."""

    @abstractmethod
    def frame_received(self, peer: Peer, header: Header, meta: memoryview, body: memoryview) -> None:
        """Handle a frame. ``meta`` and ``body`` are valid only during the call. Copy them to keep them.

        If the method raises an exception, the client receives an ERROR frame for this request. Exceptions other than
        PacelineError are also logged. On a connection that this process opened, the server expects no reply. So an
        exception is logged, and the connection is closed.
        """

    def disconnected(self, peer: Peer, reason: Exception | None) -> None:  # noqa: B027  (subclasses may do nothing)
        """Handle the end of a connection. ``reason`` is None if one end closed the connection between two frames."""


class Channel(ABC):
    """A client's blocking connection. One thread may send while another receives.

    ``timeout_s`` limits the wait for the start of a frame, and then for each part of the frame. A timeout raises
    :class:`DeadlineError`. After a timeout at the start of a frame, the channel is still usable. A timeout within a
    frame closes the channel. Every other failure of the connection raises a :class:`ConnectionLostError` that names the
    peer.
    """

    address: Address
    """The address of the server."""
    peer: Hello
    """The Hello (identity) that the server sent in the handshake."""
    last_header: Header | None = None
    """The header of the last received frame, including ERROR frames."""
    last_meta: bytes = b""
    """The meta (control part) of the last frame that :meth:`receive` received."""

    def error_header(self) -> Header | None:
        """Return the last frame's header if the frame reported an error; otherwise None.

        The header contains the number of the failed request.
        """
        header = self.last_header
        return header if header is not None and header.kind == FrameKind.ERROR else None

    @abstractmethod
    def send(self, *parts: Buffer) -> None:
        """Send one or more frames, given as their parts (see `frame_parts`), without a copy.

        The method returns when all bytes are in the system's send buffer.
        """

    @abstractmethod
    def receive(self, into: WritableBuffer, timeout_s: float) -> Header:
        """Receive the next frame's body into ``into``, and its meta into :attr:`last_meta`.

        If ``into`` has the size of the body, one system call is enough. If the frame is an ERROR frame, the method
        raises the reported error. If the body is longer than ``into``, the method closes the connection and raises
        ProtocolError.
        """

    @abstractmethod
    def receive_header(self, timeout_s: float) -> Header:
        """Receive the next frame's header, and skip unread parts of the previous frame.

        Raises the errors of :meth:`receive`.
        """

    @abstractmethod
    def receive_meta(self) -> bytes:
        """Receive the meta of the frame whose header :meth:`receive_header` has returned."""

    @abstractmethod
    def receive_into(self, buffer: WritableBuffer) -> None:
        """Fill ``buffer`` with the next bytes of the current frame's body."""

    @abstractmethod
    def receive_frame(self, timeout_s: float) -> Frame:
        """Receive a frame into new memory. Raises the errors of ``receive``."""

    @abstractmethod
    def poll(self, timeout_s: float) -> bool:
        """Wait until data arrives or the connection is closed; return False after the timeout."""

    @abstractmethod
    def has_ended(self) -> bool:
        """Return whether either end has closed the connection, without waiting. Thread-safe.

        Data that arrived before the end may still be unread. With TLS, the method detects a normal close only after the
        peer's close message has been read.
        """

    @abstractmethod
    def fileno(self) -> int:
        """Return the file descriptor for a selector. Call ``poll(0)`` before the selector: bytes may be buffered."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection. Threads that wait on the channel then raise ConnectionLostError. Idempotent."""

    @abstractmethod
    def statistics(self) -> Statistics:
        """Return the connection's counters."""


class Listener(ABC):
    """A running server."""

    endpoint: Endpoint

    @property
    @abstractmethod
    def num_connections(self) -> int:
        """Return the number of connections, including unauthenticated ones."""

    @abstractmethod
    def set_hello(self, hello: Hello) -> None:
        """Set the Hello (identity) that later clients receive. A server gets its identity only after it listens."""

    @abstractmethod
    async def close(self) -> None:
        """Stop listening, close every connection, and remove the Unix socket. Idempotent."""


class Transport(ABC):
    """Creates channels, peers and listeners."""

    @abstractmethod
    def connect(self, target: Endpoint | Address | str, hello: Hello, *, timeout_s: float = 10.0) -> Channel:
        """Connect to a server and authenticate both ends.

        Raises AddressError (no server listens there), AuthenticationError, VersionError, DeadlineError,
        ConnectionLostError or ProtocolError.
        """

    @abstractmethod
    async def open(
        self, handler: Handler, target: Endpoint | Address | str, hello: Hello, *, timeout_s: float = 10.0
    ) -> Peer:
        """Connect to a server and authenticate both ends, without blocking the event loop.

        ``handler.frame_received`` receives all frames from the server: replies, and ERROR frames with the request's
        header (``error_of(meta)`` returns the exception). ``handler.disconnected`` is called once, when either end
        closes the connection. ``handler.connected`` is not called. The handler is first called after this coroutine has
        returned the peer. If the connection is lost earlier, this coroutine raises the error, and the handler is not
        called.

        ``timeout_s`` limits the time to connect, and then the handshake. Raises the errors of :meth:`connect`.
        """

    @abstractmethod
    async def serve(
        self, handler: Handler, hello: Hello, *, address: Address | str | None = None, unix: bool = True
    ) -> Listener:
        """Listen at ``address`` (default: a free loopback port) and, with ``unix``, on a Unix socket.

        ``hello`` is the identity that clients receive. Raises AddressError if the address cannot be used.
        """
