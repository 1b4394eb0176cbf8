"""What send and receive return, and what goes before each message on the wire."""

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
"""Either way, the last of its connection: the group is over; what follows the header says why (:class:`Abort`)."""
MAX_ABORT_BYTES: Final = 1 << 20
_WHAT_BYTES: Final = 40


class Waiting(Protocol):
    """Who a pending operation belongs to."""

    def wait(self, pending: Pending, timeout_s: float) -> None:
        """Return when ``pending`` is finished, at the latest with an error after ``timeout_s``."""

    def wait_for(self, pending: Pending, timeout_s: float) -> bool:
        """Return whether ``pending`` is finished, after ``timeout_s`` at the latest; it goes on if not."""
        ...


class Pending(Waitable):
    """A send or receive that is under way. Until it is done its buffer belongs to it."""

    def __init__(self, owner: Waiting) -> None:
        self._owner = owner
        self.source = -1
        self.error: CollectiveError | None = None

    def done(self) -> bool:
        """Return whether it is done; raise as :meth:`wait` if it has failed."""
        if self.error is not None:
            raise self.error
        return self.finished

    def wait(self, timeout_s: float) -> int:
        """Wait until it is done; return the rank that sent the message.

        Of a send: until the buffer may be written again, which does not mean that the message was received.

        Raises RankLostError when the other rank is dead or ``timeout_s`` has passed, MismatchError when the two sides
        differ in size or ``what``, what another rank's failure is told by, and GroupClosedError. All but the last end
        the group: nothing else is sent or received, and no buffer is written any more.
        """
        if not self.finished:
            self._owner.wait(self, timeout_s)
        if self.error is not None:
            raise self.error
        return self.source

    def wait_for(self, timeout_s: float) -> bool:
        """Wait, but give nothing up; return whether it is done, or has failed."""
        return self.finished or self._owner.wait_for(self, timeout_s)

    def finish(self, source: int) -> None:
        """Say that it is done (with the lock held)."""
        if not self.finished:
            self.source = source
            self.finished = True

    def fail(self, error: CollectiveError) -> None:
        """Say that it has failed (with the lock held)."""
        if not self.finished:
            self.error = error
            self.finished = True


class Sending(Pending):
    """A send, with what of it has not yet gone."""

    def __init__(self, owner: Waiting, buffer: memoryview, to: int, tag: int, what: str) -> None:
        super().__init__(owner)
        self.to = to
        self.tag = tag
        self.what = what
        self.nbytes = buffer.nbytes
        self.parts: list[memoryview] = [memoryview(pack(MESSAGE, tag, buffer.nbytes, what)), buffer]
        self.has_begun = False

    def advance(self, sent: int) -> bool:
        """Take away what has gone; return whether all has."""
        self.has_begun = self.has_begun or sent > 0
        while self.parts and sent >= len(self.parts[0]):
            sent -= len(self.parts.pop(0))
        if sent:
            self.parts[0] = self.parts[0][sent:]
        return not self.parts

    def overdue(self, timeout_s: float, rank: int, answers: Mapping[int, Status | None]) -> RankLostError:
        """Return the error for a message of `rank` that was not taken in time; `answers` say who waits for whom."""
        gone = self.nbytes - min(total(self.parts), self.nbytes)
        culprits, told = _blame(rank, (self.to,), answers)
        return RankLostError(
            f"rank {self.to} took {gone} of the {describe(self.nbytes, self.what)} with tag {self.tag} in "
            f"{timeout_s:g} s: {told or 'it is stopped, does not receive or cannot be reached'}",
            culprits or (self.to,),
        )


class Receiving(Pending):
    """A receive, as it waits for its message."""

    def __init__(self, owner: Waiting, buffer: memoryview, source: int | None, tag: int, what: str) -> None:
        super().__init__(owner)
        self.posted = Posted(buffer, source, tag, what, self)

    def overdue(
        self, timeout_s: float, rank: int, answers: Mapping[int, Status | None], begun: int | None, size: int
    ) -> RankLostError:
        """Return the error for a message to `rank` that did not come in time; `begun`: whose has begun to come."""
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
    """Return who keeps a rank waiting, and what is said of them."""
    culprits = find_silent(answers, rank, waits_for) if answers else {}
    return tuple(culprits), "; ".join(f"rank {each} {what}" for each, what in culprits.items())


def pack(kind: int, tag: int, nbytes: int, what: str) -> bytes:
    """Return the header of a message."""
    text = what.encode()
    return HEADER.pack(MAGIC, kind, len(text), tag, nbytes, text)


def unpack(header: Any) -> tuple[int, int, int, str]:
    """Return kind, tag, nbytes and ``what``; raise ProtocolError if it is no header, or announces too long a text."""
    magic, kind, length, tag, nbytes, text = HEADER.unpack(header)
    if magic != MAGIC or kind not in (MESSAGE, ABORT):
        raise ProtocolError(
            f"got bytes that are no message: they begin with {magic!r} and kind {kind}, {MAGIC!r} and kind {MESSAGE} "
            f"or {ABORT} was expected"
        )
    if kind == ABORT and nbytes > MAX_ABORT_BYTES:
        raise ProtocolError(f"got an ABORT of {nbytes} bytes, at most {MAX_ABORT_BYTES} may be")
    return kind, tag, nbytes, str(text[:length], "utf-8", "replace")


def pack_last(abort: Abort) -> bytes:
    """Return the last message of a connection."""
    text = msgspec.msgpack.encode(abort)
    return pack(ABORT, 0, len(text), "") + text


def unpack_last(text: Any) -> Abort:
    """Read what follows the header of an ABORT; raise ProtocolError if it is something else."""
    abort: Abort = read_meta(text, Abort, "an ABORT")
    return abort


def check(buffer: memoryview, tag: int, what: str, *, writable: bool = False) -> memoryview:
    """Return the buffer as bytes, or raise UsageError."""
    if not buffer.c_contiguous:
        raise UsageError("a buffer with gaps was given, a contiguous one was expected; copy it first")
    if writable and buffer.readonly:
        raise UsageError("a read-only buffer was given to receive into")
    if not -(1 << 63) <= tag < 1 << 63:
        raise UsageError(f"tag {tag} was given, one of 64 bits was expected")
    if len(what.encode()) > _WHAT_BYTES:
        raise UsageError(f"{what!r} was given to say what is sent, at most {_WHAT_BYTES} bytes were expected")
    return buffer.cast("B") if buffer.nbytes else memoryview(bytearray() if writable else b"")


def mismatch(message: Message, posted: Posted, rank: int) -> MismatchError:
    """Return the error for a receive that expected another message."""
    return MismatchError(
        f"rank {message.source} sent {describe(message.nbytes, message.what)} with tag {message.tag}, rank {rank} "
        f"receives {describe(posted.buffer.nbytes, posted.what)} with it; both must be the same"
    )


def describe(nbytes: int, what: str) -> str:
    """Return size and kind in words."""
    return f"{nbytes} bytes ({what})" if what else f"{nbytes} bytes"


def total(parts: Sequence[memoryview]) -> int:
    """Return the size of several buffers in bytes."""
    return sum(part.nbytes for part in parts)
