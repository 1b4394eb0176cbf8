"""What every transport offers: the server's view (Handler, Peer, Listener) and the client's (Channel).

A server is one event loop: it calls a :class:`Handler` for every frame and never blocks. A client is a thread
that blocks on a :class:`Channel`, or itself an event loop: then it opens a :class:`Peer`. :class:`Transport` makes
all of them. Implementations: ``sockets``, ``memory``
and, around either, ``faulty``; `paceline.testing.check_transport` says what each must do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

from paceline.transport.addresses import Address, Endpoint
from paceline.transport.frames import Buffer, FrameKind, Header, WritableBuffer
from paceline.transport.security.authentication import Hello


class Statistics(NamedTuple):
    """What went over one connection, headers and padding included."""

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
    """The other end of a connection of an event loop: a client that connected, or a server that was opened.

    Not thread-safe: for the event loop's thread only.
    """

    hello: Hello
    """What the other end said of itself."""
    address: str
    """Where it is, for messages."""

    @abstractmethod
    def send(self, *parts: Buffer) -> None:
        """Send one frame given as its parts (`frame_parts`), or as one buffer of bytes; never blocks.

        Parts of a small frame are copied into one buffer. What else the peer does not take at once is kept *without a
        copy*: a mutable buffer may be written again once :attr:`write_backlog_bytes` is 0.
        """

    @abstractmethod
    def send_error(self, request: Header, error: Exception) -> None:
        """Answer ``request`` with an ERROR frame; the client raises the same class.

        UsageError on an opened connection: it is for the server to answer.
        """

    @property
    @abstractmethod
    def write_backlog_bytes(self) -> int:
        """How much of what was sent is still held here.

        For a client beyond ``Limits.max_backlog_bytes`` its requests are no longer read. An opened connection is
        always read (or both ends could wait for each other), so there it is for the caller to send no more.
        """

    @abstractmethod
    def pause_receiving(self) -> None:
        """Take no more from the peer until :meth:`resume_receiving`: what it sends waits there. Idempotent.

        Frames of which a part is here may still come. The peer's end is not noticed either. In memory nothing waits.
        """

    @abstractmethod
    def resume_receiving(self) -> None:
        """Take on from the peer. Idempotent."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection after what was sent has gone out; ``disconnected`` follows. Idempotent.

        No more frames are received, and what is sent after it is lost.
        """

    @abstractmethod
    def abort(self) -> None:
        """Close the connection at once, what has not gone out is lost; ``disconnected`` follows. Idempotent."""

    @abstractmethod
    def statistics(self) -> Statistics:
        """Return the connection's counters."""


class Handler(ABC):
    """What an event loop does with frames. All its methods are called in the loop's thread and must not block."""

    def connected(self, peer: Peer) -> None:  # noqa: B027  (to do nothing is a choice)
        """Take note of a client that has proved that it holds the token."""

    @abstractmethod
    def frame_received(self, peer: Peer, header: Header, meta: memoryview, body: memoryview) -> None:
        """Handle a frame. ``meta`` and ``body`` are valid only during the call: copy what is to be kept.

        An exception is sent back as an ERROR frame for this request (one that is no PacelineError is logged
        too). On an opened connection, where nobody waits for that, it is logged and closes the connection.
        """

    def disconnected(self, peer: Peer, reason: Exception | None) -> None:  # noqa: B027  (to do nothing is a choice)
        """Forget a peer. ``reason`` is ``None`` if the connection was closed between two frames, by either end."""


class Channel(ABC):
    """A client's connection: blocking, in the order sent. One thread may send while another receives.

    ``timeout_s`` bounds the wait for a frame to begin, and then for each part of it to arrive. A
    :class:`DeadlineError` before a frame has begun leaves the channel as it was; in the middle of one it
    closes it. Every other failure of the connection is a :class:`ConnectionLostError` that names the peer.
    """

    address: Address
    """Where this channel leads."""
    peer: Hello
    """What the server said of itself."""
    last_header: Header | None = None
    """The header of the last frame received; of the ERROR frame, after an error that the server reported."""
    last_meta: bytes = b""
    """The meta of the last frame that :meth:`receive` returned."""

    def error_header(self) -> Header | None:
        """Return the header of the last frame if that was an ERROR: whose request has failed; else None."""
        header = self.last_header
        return header if header is not None and header.kind == FrameKind.ERROR else None

    @abstractmethod
    def send(self, *parts: Buffer) -> None:
        """Send one frame (or several) given as its parts (`frame_parts`), without copying them; returns when all is in
        the system's hands.
        """

    @abstractmethod
    def receive(self, into: WritableBuffer, timeout_s: float) -> Header:
        """Receive a frame whose body is at most ``into``, in place; fastest (one system call) if exactly that
        long.

        Its meta, if any, is then :attr:`last_meta`. Raises what the server reported in an ERROR frame, and
        ProtocolError (the connection is closed) if the body is longer.
        """

    @abstractmethod
    def receive_header(self, timeout_s: float) -> Header:
        """Receive the header of the next frame; what was not read of the one before is skipped. Raises as
        ``receive``.
        """

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
        """Wait until there is something to receive (its end is); return whether there is."""

    @abstractmethod
    def has_ended(self) -> bool:
        """Return whether either end has closed the connection, as far as is known here; from any thread, at once.

        What the other end sent before it closed may still lie here unread. A TLS connection that the other end closes
        in good order has not ended before its word for that is read.
        """

    @abstractmethod
    def fileno(self) -> int:
        """Return the file descriptor, for selectors (ask ``poll(0)`` first: bytes may lie here already)."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection; a thread that waits on it wakes with ConnectionLostError. Idempotent."""

    @abstractmethod
    def statistics(self) -> Statistics:
        """Return the connection's counters."""


class Listener(ABC):
    """A server that is being served."""

    endpoint: Endpoint

    @property
    @abstractmethod
    def num_connections(self) -> int:
        """How many connections there are, those that have not yet proved themselves included."""

    @abstractmethod
    def introduce(self, hello: Hello) -> None:
        """Tell this to those who connect from now on: who we are is known later than where we listen."""

    @abstractmethod
    async def close(self) -> None:
        """Stop listening, close every connection, remove the Unix socket. Idempotent."""


class Transport(ABC):
    """Makes channels, opened peers and listeners."""

    @abstractmethod
    def connect(self, target: Endpoint | Address | str, hello: Hello, *, timeout_s: float = 10.0) -> Channel:
        """Connect and prove who we are.

        Raises AddressError (nobody listens there), AuthenticationError, VersionError, DeadlineError,
        ConnectionLostError or ProtocolError.
        """

    @abstractmethod
    async def open(
        self, handler: Handler, target: Endpoint | Address | str, hello: Hello, *, timeout_s: float = 10.0
    ) -> Peer:
        """Connect from inside an event loop, without blocking it, and prove who we are.

        Every frame that the server sends goes to ``handler.frame_received``: its answers, and its ERROR frames too,
        as frames of ``FrameKind.ERROR`` with the request's header (``error_of(meta)`` is the exception). The
        connection's end, whoever closed it, goes once to ``handler.disconnected``; ``handler.connected`` is not
        called. To who awaits this call directly, the handler is told nothing of the peer before it has the peer;
        a connection that is lost until then is a failure of this call only.

        ``timeout_s`` bounds reaching the server, and then its handshake. Raises as :meth:`connect`.
        """

    @abstractmethod
    async def serve(
        self, handler: Handler, hello: Hello, *, address: Address | str | None = None, unix: bool = True
    ) -> Listener:
        """Listen at ``address`` (by default a free loopback port) and, if ``unix``, on a Unix socket too.

        ``hello`` is what clients are told. Raises AddressError.
        """
