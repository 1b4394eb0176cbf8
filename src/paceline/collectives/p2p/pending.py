"""Pending sends and receives, and the format of a message header."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

import msgspec

from paceline.collectives.aborts import Abort
from paceline.collectives.network.culprits import Status, find_silent
from paceline.collectives.p2p.matching import Message, Posted
from paceline.collectives.p2p.progress import Waitable
from paceline.errors import CollectiveError, MismatchError, ProtocolError, RankLostError, UsageError
from paceline.observe.stuck.processes import flight_recorder
from paceline.transport import read_meta

HEADER: Final = struct.Struct("<2sBB4xqQ40s")
"""The header of a message: magic number, kind, length of the description, tag, number of bytes, and description."""
MAGIC: Final = b"PM"
MESSAGE: Final = 1
ABORT: Final = 2
"""The kind of the last message on a connection after a failure. Its body is an :class:`Abort`."""
MAX_ABORT_BYTES: Final = 1 << 20
_DESCRIPTION_BYTES: Final = 40


class Waiting(Protocol):
    """The object that creates operations, and that waits for them."""

    def wait(self, pending: Pending, timeout_s: float) -> None: ...

    def wait_for(self, pending: Pending, timeout_s: float) -> bool: ...


class Pending(Waitable):
    """A send or receive in progress. The caller must not use the buffer of the operation before the operation ends."""

    def __init__(self, owner: Waiting) -> None:
        self._owner = owner
        self.source = -1
        self.error: CollectiveError | None = None
        self._event = 0

    def record(self, event: int) -> None:
        """Set the number of this operation in the flight recorder, which gets the operation's end."""
        self._event = event
        if self.finished:
            flight_recorder().end(event, has_failed=self.error is not None)

    def done(self) -> bool:
        """Return whether the operation is done. If the operation failed, raise its error."""
        if self.error is not None:
            raise self.error
        return self.finished

    def wait(self, timeout_s: float) -> int:
        """Wait until the operation is done, and return the sender's rank.

        When a send is done, its message may not have arrived yet. Raises RankLostError for a dead rank or a timeout,
        MismatchError if the type or size of the message is not the expected one, the error of another rank that failed,
        or GroupClosedError. After every error the group transfers no more messages, and writes no buffers.
        """
        if not self.finished:
            self._owner.wait(self, timeout_s)
        if self.error is not None:
            raise self.error
        return self.source

    def wait_for(self, timeout_s: float) -> bool:
        return self.finished or self._owner.wait_for(self, timeout_s)

    def finish(self, source: int) -> None:
        """Mark the operation as done. The caller must hold the lock of the progress loop."""
        if not self.finished:
            self.source = source
            self.finished = True
            flight_recorder().end(self._event)

    def fail(self, error: CollectiveError) -> None:
        """Mark the operation as failed. The caller must hold the lock of the progress loop."""
        if not self.finished:
            self.error = error
            self.finished = True
            flight_recorder().end(self._event, has_failed=True)


class Sending(Pending):
    """A send in progress. ``parts`` contains the buffers that are not sent yet."""

    def __init__(self, owner: Waiting, buffer: memoryview, to: int, tag: int, description: str) -> None:
        super().__init__(owner)
        self.to = to
        self.tag = tag
        self.description = description
        self.nbytes = buffer.nbytes
        self.parts: list[memoryview] = [memoryview(pack(MESSAGE, tag, buffer.nbytes, description)), buffer]
        self.is_started = False

    def advance(self, sent: int) -> bool:
        self.is_started = self.is_started or sent > 0
        while self.parts and sent >= len(self.parts[0]):
            sent -= len(self.parts.pop(0))
        if sent:
            self.parts[0] = self.parts[0][sent:]
        return not self.parts

    def timeout_error(self, timeout_s: float, rank: int, answers: Mapping[int, Status | None]) -> RankLostError:
        num_sent = self.nbytes - min(total(self.parts), self.nbytes)
        culprits, reasons = _blame(rank, (self.to,), answers)
        return RankLostError(
            f"rank {self.to} received {num_sent} of the {describe(self.nbytes, self.description)} with tag {self.tag} "
            f"in {timeout_s:g} s: {reasons or 'it is stopped, does not receive or cannot be reached'}",
            culprits or (self.to,),
        )


class Receiving(Pending):
    """A receive in progress, which waits for its message."""

    def __init__(self, owner: Waiting, buffer: memoryview, source: int | None, tag: int, description: str) -> None:
        super().__init__(owner)
        self.posted = Posted(buffer, source, tag, description, self)

    def timeout_error(
        self, timeout_s: float, rank: int, answers: Mapping[int, Status | None], partial_source: int | None, size: int
    ) -> RankLostError:
        """Return the error for a receive that timed out. `partial_source` is the rank that sent a part of the message;
        None if no part has arrived.
        """
        source = self.posted.source if partial_source is None else partial_source
        culprits, reasons = _blame(rank, range(size) if source is None else (source,), answers)
        missing = "no message" if partial_source is None else "only a part of a message"
        sender = "any rank" if source is None else f"rank {source}"
        return RankLostError(
            f"{missing} with tag {self.posted.tag} arrived from {sender} in {timeout_s:g} s: "
            f"{reasons or 'the rank is stopped, has not sent it or cannot be reached'}",
            culprits or (() if source is None else (source,)),
        )


def _blame(rank: int, waits_for: Sequence[int], answers: Mapping[int, Status | None]) -> tuple[tuple[int, ...], str]:
    culprits = find_silent(answers, rank, waits_for) if answers else {}
    return tuple(culprits), "; ".join(f"rank {culprit} {reason}" for culprit, reason in culprits.items())


def pack(kind: int, tag: int, nbytes: int, description: str) -> bytes:
    text = description.encode()
    return HEADER.pack(MAGIC, kind, len(text), tag, nbytes, text)


def unpack(header: Any) -> tuple[int, int, int, str]:
    magic, kind, length, tag, nbytes, text = HEADER.unpack(header)
    if magic != MAGIC or kind not in (MESSAGE, ABORT):
        raise ProtocolError(
            f"got bytes that are not a message: they begin with {magic!r} and kind {kind}, expected {MAGIC!r} and "
            f"kind {MESSAGE} or {ABORT}"
        )
    if kind == ABORT and nbytes > MAX_ABORT_BYTES:
        raise ProtocolError(f"got an ABORT of {nbytes} bytes, expected at most {MAX_ABORT_BYTES}")
    return kind, tag, nbytes, str(text[:length], "utf-8", "replace")


def pack_abort_message(abort: Abort) -> bytes:
    text = msgspec.msgpack.encode(abort)
    return pack(ABORT, 0, len(text), "") + text


def unpack_abort_message(text: Any) -> Abort:
    abort: Abort = read_meta(text, Abort, "an ABORT")
    return abort


def check(buffer: memoryview, tag: int, description: str, *, writable: bool = False) -> memoryview:
    if not buffer.c_contiguous:
        raise UsageError("got a buffer with gaps, expected a contiguous one; copy it first")
    if writable and buffer.readonly:
        raise UsageError("got a read-only buffer to receive into, expected a writable one")
    if not -(1 << 63) <= tag < 1 << 63:
        raise UsageError(f"got tag {tag}, expected a number of 64 bits")
    if len(description.encode()) > _DESCRIPTION_BYTES:
        raise UsageError(
            f"got the description {description!r} of a message, expected at most {_DESCRIPTION_BYTES} bytes"
        )
    return buffer.cast("B") if buffer.nbytes else memoryview(bytearray() if writable else b"")


def mismatch(message: Message, posted: Posted, rank: int) -> MismatchError:
    return MismatchError(
        f"rank {message.source} sent {describe(message.nbytes, message.description)} with tag {message.tag}, but rank "
        f"{rank} receives {describe(posted.buffer.nbytes, posted.description)}; sizes and types must be equal"
    )


def describe(nbytes: int, description: str) -> str:
    return f"{nbytes} bytes ({description})" if description else f"{nbytes} bytes"


def total(parts: Sequence[memoryview]) -> int:
    return sum(part.nbytes for part in parts)
