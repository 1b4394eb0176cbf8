"""Read the rest of a rank's links after an error.

The first failing rank sends an ABORT as the last message on all its links. A rank that receives an ABORT forwards it
once on all its links, so the ABORT reaches all connected ranks.
"""

from __future__ import annotations

import math
import select
import time

import msgspec

from paceline.collectives.aborts import Abort
from paceline.collectives.network.frames import Head, MessageKind
from paceline.collectives.network.receiving import PeerMessages
from paceline.errors import PacelineError, ProtocolError
from paceline.transport.decoding import UNREADABLE, register_type

_CHUNK_BYTES = 1 << 17


def read_frame(peer: PeerMessages, deadline: float) -> Head | None:
    """Return the next head of a link; None if the link ended or after the deadline. Raises ProtocolError."""
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
    try:
        return msgspec.msgpack.decode(frame.text, type=register_type(Abort))
    except UNREADABLE as error:
        raise ProtocolError(f"got an ABORT that cannot be read: {error}") from None
