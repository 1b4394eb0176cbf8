"""The two ends of a connection that carries messages one way, from sender to receiver.

Both are called with the lock of their :class:`Progress` held, by whichever thread leads.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable

from paceline.collectives._p2p_matching import Matching, Message
from paceline.collectives._p2p_pending import HEADER, MESSAGE, MISMATCH, Receiving, Sending, mismatch, pack, unpack
from paceline.collectives._p2p_progress import READ, WRITE, Progress, Watched
from paceline.collectives.mesh import connection_closed
from paceline.errors import MismatchError, PeerError, RankLostError
from paceline.transport.client import shut
from paceline.transport.receiving import allocate

_AT_ONCE_BYTES = 1 << 22
"""How much one connection may move before the others have their turn."""
_SCRATCH_BYTES = 1 << 18
_MAX_COMPLAINT_BYTES = 2000


class Incoming(Watched):
    """The receiver's end: each message into the buffer of the receive that takes it, without a copy in between."""

    def __init__(
        self,
        source: int,
        rank: int,
        connected: socket.socket,
        matching: Matching,
        progress: Progress,
        lost: Callable[[Incoming, OSError | PeerError | None], None],
    ) -> None:
        self.source = source
        self.connected = connected
        self._rank = rank
        self._matching = matching
        self._progress = progress
        self._lost = lost
        self._header = bytearray(HEADER.size)
        self._into = memoryview(self._header)
        self._to_skip = 0
        self._message: Message | None = None
        self.is_paused = False

    @property
    def message(self) -> Message | None:
        """The message that is arriving, or waits for room."""
        return self._message

    def ready(self, events: int) -> None:
        """See :meth:`Watched.ready`."""
        try:
            moved = 0
            while moved < _AT_ONCE_BYTES and not self.is_paused:
                into = self._into
                if self._to_skip and not into:
                    into = memoryview(allocate(min(self._to_skip, _SCRATCH_BYTES)))
                got = self.connected.recv_into(into)
                if not got:
                    self._lost(self, None)
                    return
                moved += got
                if self._received(got):
                    return  # most likely nothing has followed yet; the selector knows
        except BlockingIOError:
            pass
        except (OSError, PeerError) as error:
            self._lost(self, error)

    def resume(self) -> None:
        """Look again whether the message that waits has a receive, or room; one was posted."""
        if self.is_paused:
            self.is_paused = False
            try:
                self._place()
            except PeerError as error:
                self._lost(self, error)
                return
            if not self.is_paused:
                self._progress.watch(self, READ)
                if not (self._into or self._to_skip):
                    self._complete()

    def _received(self, got: int) -> bool:
        """Take note of bytes; return whether a message is complete."""
        if self._to_skip and not self._into:
            self._to_skip -= got
            if self._to_skip:
                return False
        else:
            self._into = self._into[got:]
            if self._into:
                return False
        if self._message is None:
            kind, tag, sequence, nbytes, what = unpack(self._header)
            if kind != MESSAGE:
                raise PeerError(f"got a message of the unknown kind {kind} from rank {self.source}")
            self._message = Message(self.source, tag, what, nbytes, sequence)
            self._place()
            if self._into or self._to_skip or self.is_paused:
                return False
        self._complete()
        return True

    def _place(self) -> None:
        """Decide where the message goes whose header has come."""
        message = self._message
        assert message is not None
        self._into = memoryview(b"")
        if self._matching.match(message):
            posted = message.receive
            assert posted is not None
            if posted.fits(message):
                self._into = posted.buffer
                assert isinstance(posted.owner, Receiving)
                posted.owner.message = message
            else:
                self._to_skip = message.nbytes
                message.receive = None
                refuse(message, mismatch(message, posted, self._rank), posted.owner, self.connected)
        elif self._matching.has_room(message):
            message.payload = self._room_for(message)
            self._into = message.payload
            self._matching.keep(message)
        else:
            self.is_paused = True
            self._progress.watch(self, 0)
            return
        if not message.nbytes:
            self._into = memoryview(b"")

    def _room_for(self, message: Message) -> memoryview:
        try:
            return memoryview(allocate(message.nbytes))
        except (MemoryError, OverflowError, ValueError):
            raise PeerError(
                f"rank {self.source} announces a message of {message.nbytes} bytes that no receive has asked for, and "
                "there is no memory for it"
            ) from None

    def give_up(self, message: Message) -> None:
        """Write no more into the buffer of a receive that takes the arriving message; skip its rest."""
        if message is self._message and message.receive is not None and not message.payload:
            self._to_skip, self._into = len(self._into), memoryview(b"")
        message.receive = None

    def _complete(self) -> None:
        message = self._message
        assert message is not None
        message.is_complete = True
        self._message = None
        self._into = memoryview(self._header)
        if message.receive is not None:
            deliver(message, self._rank, self.connected)


def deliver(message: Message, rank: int, back: socket.socket | None) -> None:
    """Finish the receive that takes a complete message; what was kept of the message is copied to it."""
    posted = message.receive
    assert posted is not None
    assert isinstance(posted.owner, Receiving)
    if not posted.fits(message):
        refuse(message, mismatch(message, posted, rank), posted.owner, back)
        return
    if message.payload:
        posted.buffer[:] = message.payload
    posted.owner.message = None
    posted.owner.finish(message.source)


def refuse(message: Message, error: MismatchError, owner: object, back: socket.socket | None) -> None:
    """Fail a receive with its mismatch, and tell the sender as far as the connection takes it at once."""
    assert isinstance(owner, Receiving)
    owner.fail(error)
    if back is not None:
        text = str(error).encode()[:_MAX_COMPLAINT_BYTES]
        try:
            back.send(pack(MISMATCH, message.tag, message.sequence, len(text), "") + text)
        except OSError:
            pass  # the sender has gone, or does not listen: the receiver knows


class Outgoing(Watched):
    """The sender's end: messages in the order sent. It may be given messages before it is connected."""

    def __init__(self, to: int, progress: Progress, lost: Callable[[Outgoing, OSError | None], None]) -> None:
        self.to = to
        self.connected: socket.socket
        self.is_connected = False
        self.error: RankLostError | None = None
        self.complaint: MismatchError | None = None
        """A mismatch that the receiver has told after the send was done."""
        self.queue: deque[Sending] = deque()
        self._progress = progress
        self._lost = lost
        self._num_sent = 0
        self._answer = bytearray()

    def attach(self, connected: socket.socket) -> None:
        """Begin to send."""
        self.connected = connected
        self.is_connected = True
        self._progress.watch(self, READ)
        self.flush()

    def add(self, sending: Sending) -> None:
        """Send a message, at once if the connection takes it."""
        sending.number(self._num_sent)
        self._num_sent += 1
        self.queue.append(sending)
        if self.is_connected and len(self.queue) == 1:
            self.flush()

    def ready(self, events: int) -> None:
        """See :meth:`Watched.ready`."""
        if events & READ:
            self._read()
        if events & WRITE and self.is_connected:
            self.flush()

    def flush(self) -> None:
        """Send what the connection takes."""
        try:
            moved = 0
            while self.queue and moved < _AT_ONCE_BYTES:
                first = self.queue[0]
                sent = self.connected.sendmsg(first.parts)
                moved += sent
                if first.advance(sent):
                    self.queue.popleft()
                    first.finish(first.to)
        except BlockingIOError:
            pass
        except OSError as error:
            self._lost(self, error)
            return
        self._progress.watch(self, READ | WRITE if self.queue else READ)

    def fail(self, error: RankLostError) -> None:
        """Fail every message that has not gone, and all that will be sent."""
        self.error = error
        while self.queue:
            self.queue.popleft().fail(error)
        if self.is_connected:
            self.is_connected = False
            self._progress.unwatch(self)
            shut(self.connected)

    def _read(self) -> None:
        try:
            got = self.connected.recv(1 << 12)
        except BlockingIOError:
            return
        except OSError as error:
            self._lost(self, error)
            return
        if not got:
            self._lost(self, None)
            return
        self._answer += got
        try:
            while len(self._answer) >= HEADER.size:
                kind, _, sequence, nbytes, _ = unpack(self._answer[: HEADER.size])
                if nbytes > _MAX_COMPLAINT_BYTES:
                    raise PeerError(f"got a complaint of {nbytes} bytes")
                if len(self._answer) < HEADER.size + nbytes:
                    return
                text = self._answer[HEADER.size : HEADER.size + nbytes].decode(errors="replace")
                del self._answer[: HEADER.size + nbytes]
                if kind == MISMATCH:
                    self._complain(sequence, MismatchError(text))
        except PeerError:
            self._answer.clear()

    def _complain(self, sequence: int, error: MismatchError) -> None:
        for sending in self.queue:
            if sending.sequence == sequence:
                sending.fail(error)  # its bytes go on, for the receiver to skip
                return
        self.complaint = error


def lost_connection(rank: int, error: OSError | PeerError | None) -> RankLostError:
    """Return the error for a connection that ended."""
    if isinstance(error, PeerError):
        return RankLostError(f"the connection to rank {rank} was given up: {error}", (rank,))
    return connection_closed(rank, error)
