"""Define non-blocking connections between the ranks of one group, for the executor and send/recv."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence


class Link(ABC):
    """A bidirectional byte stream to one rank. One thread may send while another receives."""

    rank: int
    """Rank in the group at the other end."""

    @abstractmethod
    def fileno(self) -> int:
        """Return the descriptor, for ``select.poll``."""

    @abstractmethod
    def send_nowait(self, buffers: Sequence[memoryview]) -> int:
        """Send as many bytes as the system accepts without waiting; return their number.

        Raises RankLostError if the connection is broken.
        """

    @abstractmethod
    def receive_nowait(self, buffer: memoryview) -> int:
        """Receive available bytes into ``buffer``; return their number, possibly 0.

        Raises RankLostError if the connection is broken or closed.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the connection; the other end detects it. Idempotent."""


class LinkSet(ABC):
    """The links of one rank to the other ranks of its group, each created at first use."""

    rank: int
    size: int

    @abstractmethod
    def link(self, rank: int, deadline: float) -> Link:
        """Return the link to a rank; connect it before ``deadline`` (a time of ``time.monotonic``).

        Both ranks must call this method. Raises RankLostError if the other rank is dead or does not connect in time,
        AuthenticationError if it has another token.
        """

    @abstractmethod
    def connected(self) -> Sequence[Link]:
        """Return the established links."""

    @abstractmethod
    def close(self) -> None:
        """Close every link. Idempotent."""
