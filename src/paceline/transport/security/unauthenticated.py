"""Limit the number of unauthenticated connections of a listener.

Without a limit, clients that connect but do not finish the handshake could use all file descriptors. If the listener
stopped accepting connections at the limit, these clients would block it. Therefore the listener accepts all
connections. Above the limit it drops the oldest unauthenticated connection of the host or user that has most of them. A
handshake takes milliseconds, so the oldest connection rarely belongs to an honest client.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Generic, TypeVar

_Connection = TypeVar("_Connection", bound=Hashable)
_MOST = 1024


def max_unauthenticated() -> int:
    """Return the maximum number of unauthenticated connections: at most a quarter of this process's descriptors."""
    try:
        import resource
    except ImportError:
        return _MOST
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if soft == resource.RLIM_INFINITY else max(min(_MOST, soft // 4), 1)


class UnauthenticatedConnections(Generic[_Connection]):
    """The connections of a listener that are in their handshake. The caller closes connections. Not thread-safe."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._sources: dict[_Connection, Hashable] = {}
        self._counts: Counter[Hashable] = Counter()

    def __len__(self) -> int:
        return len(self._sources)

    def add(self, connection: _Connection, source: Hashable) -> _Connection | None:
        """Add a connection from ``source`` (a host or user). Above the limit, return a connection to close."""
        self._sources[connection] = source
        self._counts[source] += 1
        if len(self._sources) <= self._limit:
            return None
        most = max(self._counts.values())
        oldest = next(candidate for candidate, source in self._sources.items() if self._counts[source] == most)
        self.remove(oldest)
        return oldest

    def remove(self, connection: _Connection) -> None:
        """Remove a connection that has finished its handshake or has ended. Idempotent."""
        if connection not in self._sources:
            return
        source = self._sources.pop(connection)
        self._counts[source] -= 1
        if not self._counts[source]:
            del self._counts[source]


class LogRateLimit:
    """Limits the log lines about unauthenticated peers, so that they cannot fill the disk.

    Some lines are allowed at once, then one line per pause.
    """

    def __init__(self, burst: int = 20, pause_s: float = 3.0) -> None:
        self._burst = burst
        self._pause_s = pause_s
        self._left = float(burst)
        self._at_s = 0.0
        self._num_skipped = 0

    def record(self, time_s: float) -> int | None:
        """Record an event. Return None if it must not be logged. Otherwise return how many events were not logged since
        the last log line.
        """
        self._left = min(self._left + max(time_s - self._at_s, 0.0) / self._pause_s, float(self._burst))
        self._at_s = time_s
        if self._left < 1.0:
            self._num_skipped += 1
            return None
        self._left -= 1.0
        num_skipped, self._num_skipped = self._num_skipped, 0
        return num_skipped
