"""Match messages with receives. Pure.

The rules are those of MPI 4.1, section 3.5: a receive gets the first message with its tag from its source. If several
receives match a message, the receive that started first gets the message.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

MAX_BUFFERED_BYTES = 64 << 20
"""The maximum number of bytes of buffered messages from one rank. A message is buffered if it has no receive yet."""


@dataclass(eq=False, slots=True)
class Posted:
    """A receive that waits for its message."""

    buffer: memoryview
    source: int | None
    tag: int
    description: str
    owner: object = None

    def matches(self, message: Message) -> bool:
        return message.nbytes == self.buffer.nbytes and message.description == self.description


@dataclass(eq=False, slots=True)
class Message:
    """A message whose header has arrived."""

    source: int
    tag: int
    description: str
    nbytes: int
    payload: memoryview = field(default_factory=lambda: memoryview(b""))
    """The buffer of a message that arrived before its receive was posted; empty for other messages."""
    is_complete: bool = False
    receive: Posted | None = None


class Matching:
    """The receives of one rank that wait for a message, and the arrived messages that wait for a receive."""

    def __init__(self, max_buffered_bytes: int = MAX_BUFFERED_BYTES) -> None:
        self._max_buffered_bytes = max_buffered_bytes
        self._posted: dict[int, deque[Posted]] = {}
        self.buffered: dict[int, deque[Message]] = {}
        self._buffered_bytes: dict[int, int] = {}

    def post(self, posted: Posted) -> Message | None:
        buffered = self.buffered.get(posted.tag, ())
        for message in buffered:
            if posted.source in (None, message.source):
                assert isinstance(buffered, deque)
                buffered.remove(message)
                if not buffered:
                    del self.buffered[posted.tag]
                self._buffered_bytes[message.source] -= message.nbytes
                message.receive = posted
                return message
        self._posted.setdefault(posted.tag, deque()).append(posted)
        return None

    def match(self, message: Message) -> bool:
        for posted in self._posted.get(message.tag, ()):
            if posted.source in (None, message.source):
                self._remove_posted(posted)
                message.receive = posted
                return True
        return False

    def has_room(self, message: Message) -> bool:
        """Return whether to buffer a message that has no receive yet.

        Above the memory limit, this process does not read the message, so that its sender waits. There is one
        exception: it buffers the message if a receive waits for another message of the sender, which may be the next
        one.
        """
        buffered = self._buffered_bytes.get(message.source, 0)
        return buffered + message.nbytes <= self._max_buffered_bytes or bool(self.awaiting(message.source))

    def add_buffered(self, message: Message) -> None:
        self.buffered.setdefault(message.tag, deque()).append(message)
        self._buffered_bytes[message.source] = self._buffered_bytes.get(message.source, 0) + message.nbytes

    def drop(self, message: Message) -> None:
        buffered = self.buffered.get(message.tag)
        if buffered is not None and message in buffered:
            buffered.remove(message)
            if not buffered:
                del self.buffered[message.tag]
            self._buffered_bytes[message.source] -= message.nbytes

    def posted(self) -> list[Posted]:
        return [posted for waiting in self._posted.values() for posted in waiting]

    def awaiting(self, source: int) -> list[Posted]:
        return [posted for posted in self.posted() if posted.source in (None, source)]

    def _remove_posted(self, posted: Posted) -> None:
        waiting = self._posted[posted.tag]
        waiting.remove(posted)
        if not waiting:
            del self._posted[posted.tag]
