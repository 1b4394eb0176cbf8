"""Define pending sends and receives, and the header of a message on the wire."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

import msgspec

from paceline.collectives.network.culprits import Status, find_silent
from paceline.collectives.network.frames import Abort
from paceline.collectives.p2p.matching import Message, Posted
from paceline.collectives.p2p.progress import Waitable
from paceline.errors import CollectiveError, MismatchError, ProtocolError, RankLostError, UsageError
from paceline.transport import read_meta

HEADER: Final = struct.Struct("<2sBB4xqQ40s")
"""Magic, kind, length of ``what``, tag, length in bytes, ``what``."""
MAGIC: Final = b"PM"
MESSAGE: Final = 1
ABORT: Final = 2
"""The last message of a connection in either direction; the reason follows (:class:`Abort`)."""
MAX_ABORT_BYTES: Final = 1 << 20
_WHAT_BYTES: Final = 40


class Waiting(Protocol):
    """Owner of pending operations."""

    def wait(self, pending: Pending, timeout_s: float) -> None:
        """Return when ``pending`` is finished, with an error after ``timeout_s``."""

    def wait_for(self, pending: Pending, timeout_s: float) -> bool:
        """Return whether ``pending`` is finished, after at most ``timeout_s``; it continues otherwise."""
        ...


class Pending(Waitable):
    """A send or receive in progress, which owns its buffer until the end."""

    def __init__(self, owner: Waiting) -> None:
        self._owner = owner
        self.source = -1
        self.error: CollectiveError | None = None

    def done(self) -> bool:
        """Return whether it is done; raise the error if it has failed."""
        if self.error is not None:
            raise self.error
        return self.finished

    def wait(self, timeout_s: float) -> int:
        """Wait until it is done; return the sender's rank.

        For a send: until the buffer may be written; the message may not have been received yet.

        Raises RankLostError if the other rank is dead or after ``timeout_s``, MismatchError if the two sides differ in
        size or ``what``, another rank's error, and GroupClosedError. All but the last end the group: no messages are
        transferred and no buffers written afterwards.
        """
        if not self.finished:
            self._owner.wait(self, timeout_s)
        if self.error is not None:
            raise self.error
        return self.source

    def wait_for(self, timeout_s: float) -> bool:
        """Wait without a timeout error; return whether it is done or has failed."""
        return self.finished or self._owner.wait_for(self, timeout_s)

    def finish(self, source: int) -> None:
        """Mark as done (with the lock held)."""
        if not self.finished:
            self.source = source
            self.finished = True

    def fail(self, error: CollectiveError) -> None:
        """Mark as failed (with the lock held)."""
        if not self.finished:
            self.error = error
            self.finished = True


class Sending(Pending):
    """A send with its unsent parts."""

    def __init__(self, owner: Waiting, buffer: memoryview, to: int, tag: int, what: str) -> None:
        super().__init__(owner)
        self.to = to
        self.tag = tag
        self.what = what
        self.nbytes = buffer.nbytes
        self.parts: list[memoryview] = [memoryview(pack(MESSAGE, tag, buffer.nbytes, what)), buffer]
        self.has_begun = False

    def advance(self, sent: int) -> bool:
        """Remove sent bytes; return whether all are sent."""
        self.has_begun = self.has_begun or sent > 0
        while self.parts and sent >= len(self.parts[0]):
            sent -= len(self.parts.pop(0))
        if sent:
            self.parts[0] = self.parts[0][sent:]
        return not self.parts

    def overdue(self, timeout_s: float, rank: int, answers: Mapping[int, Status | None]) -> RankLostError:
        """Return the timeout error for a message of `rank`; `answers` are the statuses of the ranks."""
        gone = self.nbytes - min(total(self.parts), self.nbytes)
        culprits, told = _blame(rank, (self.to,), answers)
        return RankLostError(
            f"rank {self.to} took {gone} of the {describe(self.nbytes, self.what)} with tag {self.tag} in "
            f"{timeout_s:g} s: {told or 'it is stopped, does not receive or cannot be reached'}",
            culprits or (self.to,),
        )


class Receiving(Pending):
    """A receive that waits for its message."""

    def __init__(self, owner: Waiting, buffer: memoryview, source: int | None, tag: int, what: str) -> None:
        super().__init__(owner)
        self.posted = Posted(buffer, source, tag, what, self)

    def overdue(
        self, timeout_s: float, rank: int, answers: Mapping[int, Status | None], begun: int | None, size: int
    ) -> RankLostError:
        """Return the timeout error for a message to `rank`; `begun`: source of a partly received message."""
        source = self.posted.source if begun is None else begun
        culprits, told = _blame(rank, range(size) if source is None else (source,), answers)
        what = "no message" if begun is None else "not the whole of a message"
        whom = "any rank" if source is None else f"rank {source}"
        return RankLostError(
            f"{what} with tag {self.posted.tag} came from {whom} in {timeout_s:g} s: "
            f"{told or 'it is stopped, has not sent it or cannot be reached'}",
            culprits or (() if source is None else (source,)),
        )


def _blame(rank: int, waits_for: Sequence[int], answers: Mapping[int, Status | None]) -> tuple[tuple[int, ...], str]:
    """Return the ranks that delay a rank, and the reasons."""
    culprits = find_silent(answers, rank, waits_for) if answers else {}
    return tuple(culprits), "; ".join(f"rank {each} {what}" for each, what in culprits.items())


def pack(kind: int, tag: int, nbytes: int, what: str) -> bytes:
    """Return the header of a message."""
    text = what.encode()
    return HEADER.pack(MAGIC, kind, len(text), tag, nbytes, text)


def unpack(header: Any) -> tuple[int, int, int, str]:
    """Return kind, tag, nbytes and ``what``; raise ProtocolError for invalid bytes or too long a text."""
    magic, kind, length, tag, nbytes, text = HEADER.unpack(header)
    if magic != MAGIC or kind not in (MESSAGE, ABORT):
        raise ProtocolError(
            f"got bytes that are no message: they begin with {magic!r} and kind {kind}, expected {MAGIC!r} and kind "
            f"{MESSAGE} or {ABORT}"
        )
    if kind == ABORT and nbytes > MAX_ABORT_BYTES:
        raise ProtocolError(f"got an ABORT of {nbytes} bytes, expected at most {MAX_ABORT_BYTES}")
    return kind, tag, nbytes, str(text[:length], "utf-8", "replace")


def pack_last(abort: Abort) -> bytes:
    """Return the last message of a connection."""
    text = msgspec.msgpack.encode(abort)
    return pack(ABORT, 0, len(text), "") + text


def unpack_last(text: Any) -> Abort:
    """Decode the body of an ABORT; raise ProtocolError for other data."""
    abort: Abort = read_meta(text, Abort, "an ABORT")
    return abort


def check(buffer: memoryview, tag: int, what: str, *, writable: bool = False) -> memoryview:
    """Return the buffer as bytes, or raise UsageError."""
    if not buffer.c_contiguous:
        raise UsageError("got a buffer with gaps, expected a contiguous one; copy it first")
    if writable and buffer.readonly:
        raise UsageError("got a read-only buffer to receive into, expected a writable one")
    if not -(1 << 63) <= tag < 1 << 63:
        raise UsageError(f"got tag {tag}, expected a number of 64 bits")
    if len(what.encode()) > _WHAT_BYTES:
        raise UsageError(f"got the description {what!r} of a message, expected at most {_WHAT_BYTES} bytes")
    return buffer.cast("B") if buffer.nbytes else memoryview(bytearray() if writable else b"")


def mismatch(message: Message, posted: Posted, rank: int) -> MismatchError:
    """Return the error for a receive with a message of another size or type."""
    return MismatchError(
        f"rank {message.source} sent {describe(message.nbytes, message.what)} with tag {message.tag}, but rank {rank} "
        f"receives {describe(posted.buffer.nbytes, posted.what)} with this tag; both must be equal"
    )


def describe(nbytes: int, what: str) -> str:
    """Return size and type as text."""
    return f"{nbytes} bytes ({what})" if what else f"{nbytes} bytes"


def total(parts: Sequence[memoryview]) -> int:
    """Return the size of several buffers in bytes."""
    return sum(part.nbytes for part in parts)
