"""Connect the ranks of one group by sockets: Unix sockets on one host, TCP between hosts."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence

from paceline.errors import (
    AddressError,
    AuthenticationError,
    DeadlineError,
    GroupClosedError,
    PeerError,
    RankLostError,
    UsageError,
)
from paceline.meeting.node import Node, NodeInfo, Purpose
from paceline.transport.client import shut

_MAX_BUFFERS = 64
"""Maximum number of buffers in one system call. POSIX guarantees 16; Linux and macOS accept 1024."""
_PURPOSE: Purpose = "collective"
_CHECK_S = 1.0
"""The interval of checks that the other rank is alive, while this rank waits for its connection."""


class Link:
    """A bidirectional byte stream to one rank, on a non-blocking socket. One thread may send while another receives."""

    def __init__(self, rank: int, connected: socket.socket) -> None:
        self.rank = rank
        self.socket = connected

    def fileno(self) -> int:
        return self.socket.fileno()

    def send_nowait(self, buffers: Sequence[memoryview]) -> int:
        """Send as many bytes as the system accepts now, and return their number. Raises RankLostError if broken."""
        try:
            if len(buffers) == 1:
                return self.socket.send(buffers[0])
            return self.socket.sendmsg(buffers[:_MAX_BUFFERS])
        except BlockingIOError:
            return 0
        except OSError as error:
            raise self._broken(error) from None

    def receive_nowait(self, buffer: memoryview) -> int:
        """Receive the available bytes, and return their number. Raises RankLostError if broken or closed."""
        if not buffer.nbytes:
            return 0
        try:
            received = self.socket.recv_into(buffer)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise self._broken(error) from None
        if not received:
            raise self._broken(None)
        return received

    def close(self) -> None:
        shut(self.socket)

    def _broken(self, error: OSError | None) -> RankLostError | GroupClosedError:
        if self.socket.fileno() < 0:
            return GroupClosedError(f"the link to rank {self.rank} was closed on this rank during a call")
        return connection_closed(self.rank, error)


def connection_closed(rank: int, error: OSError | None) -> RankLostError:
    cause = "" if error is None or isinstance(error, ConnectionError) else f": {error.strerror or error}"
    return RankLostError(
        f"rank {rank} has closed its connection (its process ended or it left the group){cause}", (rank,)
    )


class Mesh:
    """The links of one rank, created at first use. The lower rank of a pair connects; the higher rank accepts."""

    def __init__(self, node: Node, group: str, rank: int, infos: Sequence[NodeInfo]) -> None:
        self.rank = rank
        self.size = len(infos)
        self.infos = infos
        self.group = group
        self._node = node
        self._lock = threading.Lock()
        self._making = [threading.Lock() for _ in infos]
        self._links: dict[int, Link] = {}
        self._is_closed = False

    def link(self, rank: int, deadline: float) -> Link:
        """Return the link to ``rank``, and create it at the first call. The other rank must call this method too.

        Raises RankLostError if the other rank is dead or does not call the method before ``deadline``, and
        AuthenticationError if the other rank has a different token.
        """
        link = self._links.get(rank)
        if link is not None:
            return link
        if not 0 <= rank < self.size or rank == self.rank:
            raise UsageError(f"rank {self.rank} of {self.size} has no link to rank {rank}")
        with self._making[rank]:
            if rank not in self._links:
                self._add(Link(rank, self._connect(rank, deadline)))
            return self._links[rank]

    def connected(self) -> Sequence[Link]:
        with self._lock:
            return list(self._links.values())

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            links = list(self._links.values())
        for link in links:
            link.close()

    def _add(self, link: Link) -> None:
        with self._lock:
            if not self._is_closed:
                self._links[link.rank] = link
                return
        link.close()
        raise GroupClosedError(f"group {self.group!r} was closed while it connected to rank {link.rank}")

    def _connect(self, rank: int, deadline: float) -> socket.socket:
        if self._is_closed:
            raise GroupClosedError(f"group {self.group!r} is closed")
        start = time.monotonic()
        try:
            if self.rank < rank:
                return self._node.connect(self.infos[rank], self.group, self.rank, _PURPOSE, deadline)
            return self._accept(rank, deadline)
        except DeadlineError as error:
            raise RankLostError(
                f"rank {rank} did not connect to rank {self.rank} within {time.monotonic() - start:.3g} s ({error}); "
                "its process is stopped, waits for another rank or cannot reach this machine",
                (rank,),
            ) from None
        except (AddressError, PeerError) as error:
            if isinstance(error, (AuthenticationError, GroupClosedError, RankLostError)):
                raise
            raise unreachable(rank, error) from None

    def _accept(self, rank: int, deadline: float) -> socket.socket:
        while True:
            check_at = min(deadline, time.monotonic() + _CHECK_S)
            try:
                return self._node.accept(self.group, rank, _PURPOSE, check_at)
            except DeadlineError:
                if time.monotonic() >= deadline:
                    raise
            if self._is_closed:
                raise GroupClosedError(f"group {self.group!r} was closed while it waited for rank {rank}")
            if not self._node.is_listening(self.infos[rank]):
                raise unreachable(rank, AddressError(f"no process listens at {self.infos[rank].endpoint}"))


def unreachable(rank: int, error: Exception) -> RankLostError:
    return RankLostError(f"rank {rank} cannot be reached, its process has probably ended: {error}", (rank,))
