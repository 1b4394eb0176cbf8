"""Limit the number of unauthenticated connections per listener.

If a listener waited for a free slot, a few silent connections could block the listener. Without a limit the listener
would run out of file descriptors. Therefore the listener accepts all connections. Above the limit it drops the oldest
connection from the source with the most connections. A handshake takes milliseconds, so an honest client is rarely the
oldest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Generic, TypeVar

_Connection = TypeVar("_Connection", bound=Hashable)
_MOST = 1024


def max_unauthenticated() -> int:
    """Return the limit for a server process: at most a quarter of its file descriptors."""
    try:
        import resource
    except ImportError:
        return _MOST
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if soft == resource.RLIM_INFINITY else max(min(_MOST, soft // 4), 1)


class UnauthenticatedConnections(Generic[_Connection]):
    """A listener's connections in their handshake. Not thread-safe. The caller closes connections."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._sources: dict[_Connection, Hashable] = {}
        self._counts: Counter[Hashable] = Counter()

    def __len__(self) -> int:
        return len(self._sources)

    def add(self, connection: _Connection, source: Hashable) -> _Connection | None:
        """Add a connection from ``source`` (a host or user); return a connection to close, if any."""
        self._sources[connection] = source
        self._counts[source] += 1
        if len(self._sources) <= self._limit:
            return None
        most = max(self._counts.values())
        oldest = next(candidate for candidate, source in self._sources.items() if self._counts[source] == most)
        self.remove(oldest)
        return oldest

    def remove(self, connection: _Connection) -> None:
        """Remove a connection that has authenticated or ended. Idempotent."""
        if connection not in self._sources:
            return
        source = self._sources.pop(connection)
        self._counts[source] -= 1
        if not self._counts[source]:
            del self._counts[source]


class LogRateLimit:
    """Limits log lines about unauthenticated peers, to protect the disk: a burst, then one line per pause."""

    def __init__(self, burst: int = 20, pause_s: float = 3.0) -> None:
        self._burst = burst
        self._pause_s = pause_s
        self._left = float(burst)
        self._at_s = 0.0
        self._num_skipped = 0

    def record(self, time_s: float) -> int | None:
        """Return the number of events without a line since the last line; None if this event gets no line either."""
        self._left = min(self._left + max(time_s - self._at_s, 0.0) / self._pause_s, float(self._burst))
        self._at_s = time_s
        if self._left < 1.0:
            self._num_skipped += 1
            return None
        self._left -= 1.0
        num_skipped, self._num_skipped = self._num_skipped, 0
        return num_skipped
