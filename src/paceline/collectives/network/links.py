"""Connections between the ranks of one group, as the executor and send/recv see them: non-blocking, both ways."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence


class Link(ABC):
    """A stream of bytes to one rank and back. One thread may send while another receives."""

    rank: int
    """The rank in the group at the other end."""

    @abstractmethod
    def fileno(self) -> int:
        """Return the descriptor, for ``select.poll``."""

    @abstractmethod
    def send_some(self, buffers: Sequence[memoryview]) -> int:
        """Send what the system takes at once of these; return the number of bytes (0: it would block).

        Raises RankLostError when the connection is broken.
        """

    @abstractmethod
    def receive_some(self, buffer: memoryview) -> int:
        """Receive what is there, at most ``buffer``; return the number of bytes (0: it would block).

        Raises RankLostError when the connection is broken or its end has come.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the connection; the other end then finds its end. Idempotent."""


class LinkSet(ABC):
    """The links of one rank to the others of its group, each made when it is first asked for."""

    rank: int
    size: int

    @abstractmethod
    def link(self, rank: int, deadline: float) -> Link:
        """Return the link to a rank, connected before ``deadline`` (by ``time.monotonic``).

        Both ranks must ask for it. Raises RankLostError if the other is dead or does not come, AuthenticationError if
        it holds another token.
        """

    @abstractmethod
    def connected(self) -> Sequence[Link]:
        """Return the links made so far."""

    @abstractmethod
    def close(self) -> None:
        """Close every link. Idempotent."""
