"""Match messages with receives. Pure: no sockets, threads or clocks.

As in MPI (4.1, section 3.5), a receive takes the first message with its tag from its source, and of several fitting
receives the first one posted takes the message.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

MAX_KEPT_BYTES = 64 << 20
"""Limit for buffered messages of one rank without a receive."""


@dataclass(eq=False, slots=True)
class Posted:
    """A receive without a message."""

    buffer: memoryview
    source: int | None
    tag: int
    what: str
    owner: object = None
    """For the caller: the operation of this receive."""

    def fits(self, message: Message) -> bool:
        """Return whether the message has the expected size and type."""
        return message.nbytes == self.buffer.nbytes and message.what == self.what


@dataclass(eq=False, slots=True)
class Message:
    """A message whose header has arrived."""

    source: int
    tag: int
    what: str
    nbytes: int
    payload: memoryview = field(default_factory=lambda: memoryview(b""))
    """Buffer until a receive is posted; empty if there was one at the arrival."""
    is_complete: bool = False
    receive: Posted | None = None
    """The receive that takes the message."""


class Matching:
    """Receives without a message and messages without a receive, of one rank."""

    def __init__(self, max_kept_bytes: int = MAX_KEPT_BYTES) -> None:
        self._max_kept_bytes = max_kept_bytes
        self._posted: dict[int, deque[Posted]] = {}
        self.kept: dict[int, deque[Message]] = {}
        self._kept_bytes: dict[int, int] = {}
        self.num_posted = 0

    def post(self, posted: Posted) -> Message | None:
        """Return and remove the buffered message for a receive; without one, enqueue the receive."""
        kept = self.kept.get(posted.tag, ())
        for message in kept:
            if posted.source in (None, message.source):
                assert isinstance(kept, deque)
                kept.remove(message)
                if not kept:
                    del self.kept[posted.tag]
                self._kept_bytes[message.source] -= message.nbytes
                message.receive = posted
                return message
        self._posted.setdefault(posted.tag, deque()).append(posted)
        self.num_posted += 1
        return None

    def match(self, message: Message) -> bool:
        """Assign a new message to its receive; return whether there is one."""
        for posted in self._posted.get(message.tag, ()):
            if posted.source in (None, message.source):
                self._withdraw(posted)
                message.receive = posted
                return True
        return False

    def has_room(self, message: Message) -> bool:
        """Return whether to buffer a message without a receive.

        Beyond the limit it waits in the network, except if a receive waits for another message of the same rank, which
        may follow it.
        """
        kept = self._kept_bytes.get(message.source, 0)
        return kept + message.nbytes <= self._max_kept_bytes or bool(self.awaiting(message.source))

    def keep(self, message: Message) -> None:
        """Buffer a message for a later receive."""
        self.kept.setdefault(message.tag, deque()).append(message)
        self._kept_bytes[message.source] = self._kept_bytes.get(message.source, 0) + message.nbytes

    def drop(self, message: Message) -> None:
        """Remove a buffered message whose remainder will not arrive."""
        kept = self.kept.get(message.tag)
        if kept is not None and message in kept:
            kept.remove(message)
            if not kept:
                del self.kept[message.tag]
            self._kept_bytes[message.source] -= message.nbytes

    def posted(self) -> list[Posted]:
        """Return all waiting receives."""
        return [posted for waiting in self._posted.values() for posted in waiting]

    def awaiting(self, source: int) -> list[Posted]:
        """Return the receives that a message of this rank may satisfy."""
        return [posted for posted in self.posted() if posted.source in (None, source)]

    def _withdraw(self, posted: Posted) -> None:
        waiting = self._posted[posted.tag]
        waiting.remove(posted)
        self.num_posted -= 1
        if not waiting:
            del self._posted[posted.tag]
