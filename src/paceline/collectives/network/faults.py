"""End a group after an error: the last reads and writes on a rank's links.

The first rank that detects an error sends an ABORT on all its links. A rank that receives an ABORT forwards it once on
all its links, also back to the sender. The ABORT thus reaches all connected ranks, and the returned ABORT is the last
message of a link. A rank discards received bytes and closes a link only after that message, or after a time limit:
closing a socket with unread bytes resets the connection, and the other end could lose the ABORT.
"""

from __future__ import annotations

import math
import select
import time
from collections.abc import Iterable

import msgspec

from paceline.collectives.aborts import Abort
from paceline.collectives.network.frames import Head, MessageKind, pack_abort
from paceline.collectives.network.receiving import PeerMessages
from paceline.errors import PacelineError, ProtocolError
from paceline.transport.decoding import UNREADABLE, register_type

_CHUNK_BYTES = 1 << 17
_NUM_CHUNKS = 16  # read from one link before the next link


def read_frame(peer: PeerMessages, deadline: float) -> Head | None:
    """Return the next message of a link without its body; None if the link ended or after the deadline.

    Raises ProtocolError on invalid bytes.
    """
    scanner = peer.scan()
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    poll = select.poll()
    poll.register(peer.link.fileno(), select.POLLIN)
    while not scanner.frames:
        try:
            count = peer.link.receive_nowait(buffer)
        except PacelineError:
            return None
        if count:
            scanner.feed(buffer[:count])
        elif not poll.poll(max(0, math.ceil((deadline - time.monotonic()) * 1e3))):
            return None
    return scanner.frames.popleft()


def find_abort(peer: PeerMessages, deadline: float) -> Abort | None:
    """Return the ABORT in the unread bytes of a broken link, if any."""
    try:
        while (frame := read_frame(peer, deadline)) is not None:
            if frame.header.kind == MessageKind.ABORT:
                return unpack_abort(frame)
    except ProtocolError:
        pass
    return None


def unpack_abort(frame: Head) -> Abort:
    """Decode the ABORT in a message. Raises ProtocolError."""
    try:
        return msgspec.msgpack.decode(frame.text, type=register_type(Abort))
    except UNREADABLE as error:
        raise ProtocolError(f"got an ABORT that cannot be read: {error}") from None


def spread(abort: Abort, peers: Iterable[PeerMessages], *, read_from: Iterable[int], deadline: float) -> None:
    """Send an ABORT on all links, and read each link until an ABORT comes back.

    The links to ranks in ``read_from`` are not read: their ABORT has arrived, or the rank is lost.
    """
    frame = pack_abort(abort)
    poll = select.poll()
    exchanges: dict[int, _AbortExchange] = {}
    for peer in peers:
        exchange = _AbortExchange(peer, frame, peer.rank not in read_from)
        fd = peer.link.fileno()
        if exchange.is_done or fd < 0:
            continue
        exchanges[fd] = exchange
        poll.register(fd, exchange.events)
    while exchanges and (left_s := deadline - time.monotonic()) > 0:
        for fd, _ in poll.poll(math.ceil(left_s * 1e3)):
            exchange = exchanges[fd]
            exchange.advance()
            if exchange.is_done:
                poll.unregister(fd)
                del exchanges[fd]
            else:
                poll.modify(fd, exchange.events)


class _AbortExchange:
    """The exchange of ABORTs on one link."""

    def __init__(self, peer: PeerMessages, frame: bytes, expects_abort: bool) -> None:
        self._peer = peer
        self._expects_abort = expects_abort
        self._is_readable = True
        unsent = peer.sends[0].unsent if peer.sends else []
        self._buffers = [*unsent, memoryview(frame)]
        self._chunk = memoryview(bytearray(_CHUNK_BYTES))
        try:
            self._scanner = peer.scan()
        except ProtocolError:  # after invalid bytes no message can follow
            self._expects_abort = self._is_readable = False
        self.advance()

    @property
    def is_done(self) -> bool:
        return not self._buffers and not self._expects_abort

    @property
    def events(self) -> int:
        return (select.POLLIN if self._is_readable else 0) | (select.POLLOUT if self._buffers else 0)

    def advance(self) -> None:
        try:
            self._send()
        except PacelineError:  # the other end is closed, but bytes that it sent before may still arrive
            self._buffers = []
        try:
            self._receive()
        except PacelineError:
            self._expects_abort = self._is_readable = False
            self._buffers = []

    def _send(self) -> None:
        while self._buffers:
            count = self._peer.link.send_nowait(self._buffers[:64])
            if not count:
                return
            while self._buffers and count >= len(self._buffers[0]):
                count -= len(self._buffers.pop(0))
            if count:
                self._buffers[0] = self._buffers[0][count:]

    def _receive(self) -> None:
        if not self._is_readable:
            return
        for _ in range(_NUM_CHUNKS):
            while self._scanner.frames:
                if self._scanner.frames.popleft().header.kind == MessageKind.ABORT:
                    self._expects_abort = self._is_readable = False
                    return
            count = self._peer.link.receive_nowait(self._chunk)
            if not count:
                return
            self._scanner.feed(self._chunk[:count])
