"""Send messages, and delay local copies that would overwrite unsent data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from paceline.collectives.network.blocks import Ranges, remaining_overlaps, scatter
from paceline.collectives.network.mesh import Link

_MAX_BUFFERS: Final = 512  # buffers per sendmsg; the system's limit (IOV_MAX) is 1024


class Blocker(Protocol):
    """A send or an earlier write that must finish before a write to the same memory starts."""

    def holds(self, low: int, high: int) -> bool: ...


class OutgoingMessage:
    """One message to send."""

    __slots__ = ("_buffers", "_head_bytes", "_num_unsent", "_ranges", "_total", "is_done")

    def __init__(self, head: bytes, views: list[memoryview], ranges: Ranges, nbytes: int) -> None:
        self._buffers = [memoryview(head), *views]
        self._ranges = ranges
        self._head_bytes = len(head)
        self._total = self._num_unsent = len(head) + nbytes
        self.is_done = False

    def advance(self, link: Link) -> bool:
        buffers = self._buffers
        count = link.send_nowait(buffers if len(buffers) <= _MAX_BUFFERS else buffers[:_MAX_BUFFERS])
        if not count:
            return False
        self._num_unsent -= count
        if not self._num_unsent:
            self.is_done = True
            return True
        for index, buffer in enumerate(buffers):
            if count < len(buffer):
                buffers[: index + 1] = [buffer[count:]]
                break
            count -= len(buffer)
        return True

    @property
    def is_started(self) -> bool:
        return self._num_unsent < self._total

    @property
    def unsent(self) -> list[memoryview]:
        """The remaining bytes of a partly sent message. They must be sent before the next message on the link."""
        return [] if self.is_done or not self.is_started else self._buffers

    def holds(self, low: int, high: int) -> bool:
        sent = max(0, self._total - self._num_unsent - self._head_bytes)
        return not self.is_done and remaining_overlaps(self._ranges, sent, low, high)


class LateCopy:
    """A local copy whose target overlaps a message. It saves the source at the beginning of the round, and writes the
    target after the message is done.
    """

    def __init__(self, sources: Sequence[memoryview], targets: Sequence[memoryview], ranges: Ranges) -> None:
        self._saved = memoryview(b"".join(sources))
        self._targets = targets
        self._ranges = ranges
        self.blockers: list[Blocker] = []
        self.is_done = False

    def advance(self) -> bool:
        if any(blocker.holds(low, high) for blocker in self.blockers for low, high in self._ranges):
            return False
        scatter(self._targets, self._saved)
        self.is_done = True
        return True

    def holds(self, low: int, high: int) -> bool:
        return not self.is_done and remaining_overlaps(self._ranges, 0, low, high)
