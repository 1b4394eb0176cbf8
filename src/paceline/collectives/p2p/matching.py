"""Which message goes to which receive. Pure: no sockets, threads or clocks.

As in MPI (4.1, section 3.5): a receive takes the first message that came with its tag from its source, and of two
receives that both fit a message the one that was posted first takes it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

MAX_KEPT_BYTES = 64 << 20
"""How much of one rank's messages is kept that no receive asked for."""


@dataclass(eq=False, slots=True)
class Posted:
    """A receive that waits for its message."""

    buffer: memoryview
    source: int | None
    tag: int
    what: str
    owner: object = None
    """Whose receive it is; for the caller."""

    def fits(self, message: Message) -> bool:
        """Return whether the message is what the receive expects of it."""
        return message.nbytes == self.buffer.nbytes and message.what == self.what


@dataclass(eq=False, slots=True)
class Message:
    """A message of which at least the header has come."""

    source: int
    tag: int
    what: str
    nbytes: int
    payload: memoryview = field(default_factory=lambda: memoryview(b""))
    """Where it is kept until a receive asks for it; empty if one has from the first."""
    is_complete: bool = False
    receive: Posted | None = None
    """The receive that takes it."""


class Matching:
    """The receives without a message and the messages without a receive, of one rank."""

    def __init__(self, max_kept_bytes: int = MAX_KEPT_BYTES) -> None:
        self._max_kept_bytes = max_kept_bytes
        self._posted: dict[int, deque[Posted]] = {}
        self.kept: dict[int, deque[Message]] = {}
        self._kept_bytes: dict[int, int] = {}
        self.num_posted = 0

    def post(self, posted: Posted) -> Message | None:
        """Return the kept message that the receive takes, which is then kept no more; else keep the receive."""
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
        """Give a message whose header has come to the receive that takes it; return whether there is one."""
        for posted in self._posted.get(message.tag, ()):
            if posted.source in (None, message.source):
                self._withdraw(posted)
                message.receive = posted
                return True
        return False

    def has_room(self, message: Message) -> bool:
        """Return whether the message should be kept although no receive has asked for it.

        Beyond the limit it should wait in the network; but not if a receive waits for another message of the same
        rank, which may come behind it.
        """
        kept = self._kept_bytes.get(message.source, 0)
        return kept + message.nbytes <= self._max_kept_bytes or bool(self.awaiting(message.source))

    def keep(self, message: Message) -> None:
        """Keep a message for a receive to come."""
        self.kept.setdefault(message.tag, deque()).append(message)
        self._kept_bytes[message.source] = self._kept_bytes.get(message.source, 0) + message.nbytes

    def drop(self, message: Message) -> None:
        """Forget a kept message, whose rest will not come."""
        kept = self.kept.get(message.tag)
        if kept is not None and message in kept:
            kept.remove(message)
            if not kept:
                del self.kept[message.tag]
            self._kept_bytes[message.source] -= message.nbytes

    def posted(self) -> list[Posted]:
        """Return all receives that wait."""
        return [posted for waiting in self._posted.values() for posted in waiting]

    def awaiting(self, source: int) -> list[Posted]:
        """Return the receives that a message of this rank may yet satisfy."""
        return [posted for posted in self.posted() if posted.source in (None, source)]

    def _withdraw(self, posted: Posted) -> None:
        waiting = self._posted[posted.tag]
        waiting.remove(posted)
        self.num_posted -= 1
        if not waiting:
            del self._posted[posted.tag]
