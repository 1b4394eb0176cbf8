"""The sender's end and the receiver's end of a connection that transfers messages.

The thread that runs the :class:`ProgressLoop` calls the methods of the ends, and holds the loop's lock.
"""

from __future__ import annotations

import socket
from collections import deque
from typing import Protocol

from typing_extensions import override

from paceline.collectives.aborts import Abort
from paceline.collectives.network.mesh import connection_closed
from paceline.collectives.p2p.matching import Matching, Message
from paceline.collectives.p2p.pending import ABORT, HEADER, Receiving, Sending, mismatch, unpack, unpack_abort_message
from paceline.collectives.p2p.progress import READ, WRITE, ProgressLoop, Watched
from paceline.errors import CollectiveError, PeerError, ProtocolError, RankLostError
from paceline.transport.client import shut
from paceline.transport.receiving import allocate

_MAX_MOVED_BYTES = 1 << 22
"""The number of bytes that one connection may receive before the loop continues with the next connection."""


class Ends(Protocol):
    """The object that owns the ends of connections, and that receives their events."""

    def abort_received(self, abort: Abort) -> None: ...

    def failed(self, error: CollectiveError) -> None: ...

    def incoming_lost(self, incoming: Incoming, error: OSError | PeerError | None) -> None: ...

    def outgoing_lost(self, outgoing: Outgoing, error: OSError | PeerError | None) -> None: ...


class Incoming(Watched):
    """The receiver's end of a connection. It receives each message directly into the buffer of the matching receive."""

    def __init__(
        self, source: int, rank: int, connected: socket.socket, matching: Matching, progress: ProgressLoop, ends: Ends
    ) -> None:
        self.source = source
        self.connected = connected
        self._rank = rank
        self._matching = matching
        self._progress = progress
        self._ends = ends
        self._header = bytearray(HEADER.size)
        self._into = memoryview(self._header)
        self._message: Message | None = None
        self._abort_message: memoryview | None = None
        self.is_paused = False

    @property
    def message(self) -> Message | None:
        return self._message

    @property
    def receive(self) -> Receiving | None:
        if self._message is None or self._message.receive is None:
            return None
        assert isinstance(self._message.receive.owner, Receiving)
        return self._message.receive.owner

    @override
    def ready(self, events: int) -> None:
        try:
            moved = 0
            while moved < _MAX_MOVED_BYTES and not self.is_paused:
                got = self.connected.recv_into(self._into)
                if not got:
                    self._ends.incoming_lost(self, None)
                    return
                moved += got
                self._into = self._into[got:]
                if not self._into and self._received():
                    return  # the next message has probably not arrived; the selector will report its arrival
        except BlockingIOError:
            pass
        except (OSError, PeerError) as error:
            self._ends.incoming_lost(self, error)

    def resume(self) -> None:
        """Check whether the message that waits in the network now has a matching receive, or room in the buffer.

        The owner calls this method when a receive has started.
        """
        if self.is_paused:
            self.is_paused = False
            try:
                self._choose_buffer()
            except PeerError as error:
                self._ends.incoming_lost(self, error)
                return
            if not self.is_paused:
                self._progress.watch(self, READ)
                if not self._into:
                    self._complete()

    def stop(self) -> None:
        self.is_paused = True
        self._progress.watch(self, 0)

    def _received(self) -> bool:
        if self._abort_message is not None:
            self.stop()
            self._ends.abort_received(unpack_abort_message(self._abort_message))
            return True
        if self._message is None:
            kind, tag, nbytes, description = unpack(self._header)
            if kind == ABORT:
                self._into = self._abort_message = memoryview(bytearray(nbytes))
                return False
            self._message = Message(self.source, tag, description, nbytes)
            self._choose_buffer()
            if self._into or self.is_paused:
                return False
        self._complete()
        return True

    def _choose_buffer(self) -> None:
        message = self._message
        assert message is not None
        self._into = memoryview(b"")
        if self._matching.match(message):
            posted = message.receive
            assert posted is not None
            if posted.matches(message):
                self._into = posted.buffer
            else:
                self.stop()
                fail_mismatched(message, self._rank, self._ends)
                return
        elif self._matching.has_room(message):
            message.payload = self._allocate(message)
            self._into = message.payload
            self._matching.add_buffered(message)
        else:
            self.stop()
            return
        if not message.nbytes:
            self._into = memoryview(b"")

    def _allocate(self, message: Message) -> memoryview:
        try:
            return memoryview(allocate(message.nbytes))
        except (MemoryError, OverflowError, ValueError):
            raise PeerError(
                f"not enough memory to buffer a message of {message.nbytes} bytes from rank {self.source}; post its "
                "receive earlier"
            ) from None

    def _complete(self) -> None:
        message = self._message
        assert message is not None
        message.is_complete = True
        self._message = None
        self._into = memoryview(self._header)
        if message.receive is not None:
            deliver(message, self._rank, self._ends)


def deliver(message: Message, rank: int, ends: Ends) -> None:
    posted = message.receive
    assert posted is not None
    assert isinstance(posted.owner, Receiving)
    if not posted.matches(message):
        fail_mismatched(message, rank, ends)
        return
    if message.payload:
        posted.buffer[:] = message.payload
    posted.owner.finish(message.source)


def deliver_to_self(sending: Sending, rank: int, matching: Matching, ends: Ends) -> None:
    message = Message(rank, sending.tag, sending.description, sending.nbytes, sending.parts[1], is_complete=True)
    if matching.match(message):
        deliver(message, rank, ends)
    else:
        message.payload = memoryview(bytes(message.payload))
        matching.add_buffered(message)


def fail_mismatched(message: Message, rank: int, ends: Ends) -> None:
    assert message.receive is not None
    assert isinstance(message.receive.owner, Receiving)
    error = mismatch(message, message.receive, rank)
    message.receive.owner.fail(error)
    ends.failed(error)


class Outgoing(Watched):
    """The sender's end of a connection. It sends messages in order, and queues them until the connection exists."""

    def __init__(self, to: int, progress: ProgressLoop, ends: Ends) -> None:
        self.to = to
        self.connected: socket.socket
        self.is_connected = False
        self.error: RankLostError | None = None
        self.queue: deque[Sending] = deque()
        self._progress = progress
        self._ends = ends
        self._answer = bytearray()

    def attach(self, connected: socket.socket) -> None:
        self.connected = connected
        self.is_connected = True
        self._progress.watch(self, READ)
        self.flush()

    def add(self, sending: Sending) -> None:
        self.queue.append(sending)
        if self.is_connected and len(self.queue) == 1:
            self.flush()

    @override
    def ready(self, events: int) -> None:
        if events & READ:
            self._read()
        if events & WRITE and self.is_connected:
            self.flush()

    def flush(self) -> None:
        try:
            moved = 0
            while self.queue and moved < _MAX_MOVED_BYTES:
                first = self.queue[0]
                sent = self.connected.sendmsg(first.parts)
                moved += sent
                if first.advance(sent):
                    self.queue.popleft()
                    first.finish(first.to)
        except BlockingIOError:
            pass
        except OSError as error:
            self._read()  # the other rank may have sent the reason for its failure
            if self.is_connected:
                self._ends.outgoing_lost(self, error)
            return
        self._progress.watch(self, READ | WRITE if self.queue else READ)

    def fail(self, error: RankLostError) -> bool:
        """Fail all unsent messages and all later messages. Return whether there was an unsent message."""
        self.error = error
        had_any = bool(self.queue)
        while self.queue:
            self.queue.popleft().fail(error)
        self.disconnect()
        return had_any

    def disconnect(self) -> None:
        if self.is_connected:
            self.is_connected = False
            self._progress.unwatch(self)
            shut(self.connected)

    def _read(self) -> None:
        try:
            while got := self.connected.recv(1 << 16):
                self._answer += got
                if len(self._answer) >= HEADER.size:
                    kind, _, nbytes, _ = unpack(self._answer[: HEADER.size])
                    if kind != ABORT:
                        raise ProtocolError(f"got a message from rank {self.to} on a connection to it")
                    if len(self._answer) >= HEADER.size + nbytes:
                        self._progress.watch(self, 0)
                        self._ends.abort_received(unpack_abort_message(self._answer[HEADER.size :]))
                        return
            self._ends.outgoing_lost(self, None)
        except BlockingIOError:
            pass
        except (OSError, PeerError) as error:
            self._ends.outgoing_lost(self, error)


def lost_connection(rank: int, error: OSError | PeerError | None) -> RankLostError:
    if isinstance(error, RankLostError):
        return error
    if isinstance(error, PeerError):
        return RankLostError(f"the connection to rank {rank} was closed: {error}", (rank,))
    return connection_closed(rank, error)
