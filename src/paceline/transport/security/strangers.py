"""Connections that have proved nothing yet: so many, and no more, whoever comes.

A listener that waited for a place for the next connection could be stopped by a few that are silent; one that takes all
runs out of descriptors. So all are taken, and when there are too many, one that has had its time goes: the oldest of
the source that has the most. A handshake takes milliseconds, so an honest one is hardly ever the oldest of a crowd.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Generic, TypeVar

_Connection = TypeVar("_Connection", bound=Hashable)
_MOST = 1024


def max_strangers() -> int:
    """Return how many there may be in a process that serves many: at most a quarter of its file descriptors."""
    try:
        import resource
    except ImportError:
        return _MOST
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if soft == resource.RLIM_INFINITY else max(min(_MOST, soft // 4), 1)


class Strangers(Generic[_Connection]):
    """The connections of one listener that are still in their handshake. Not thread-safe; closes nothing."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._sources: dict[_Connection, Hashable] = {}
        self._counts: Counter[Hashable] = Counter()

    def __len__(self) -> int:
        return len(self._sources)

    def enter(self, connection: _Connection, source: Hashable) -> _Connection | None:
        """Take note of a connection from ``source`` (a host or user); return another that is to be closed, if any."""
        self._sources[connection] = source
        self._counts[source] += 1
        if len(self._sources) <= self._limit:
            return None
        most = max(self._counts.values())
        oldest = next(each for each, source in self._sources.items() if self._counts[source] == most)
        self.leave(oldest)
        return oldest

    def leave(self, connection: _Connection) -> None:
        """Forget a connection: it has proved who it is, or has gone. Idempotent."""
        if connection not in self._sources:
            return
        source = self._sources.pop(connection)
        self._counts[source] -= 1
        if not self._counts[source]:
            del self._counts[source]


class Complaints:
    """What is said of strangers: a few lines at once, then one in a while, so that they fill nobody's disk."""

    def __init__(self, burst: int = 20, pause_s: float = 3.0) -> None:
        self._burst = burst
        self._pause_s = pause_s
        self._left = float(burst)
        self._at_s = 0.0
        self._num_unsaid = 0

    def note(self, now_s: float) -> int | None:
        """Return None if nothing is to be said of one now, else how many were passed over since the last that was."""
        self._left = min(self._left + max(now_s - self._at_s, 0.0) / self._pause_s, float(self._burst))
        self._at_s = now_s
        if self._left < 1.0:
            self._num_unsaid += 1
            return None
        self._left -= 1.0
        unsaid, self._num_unsaid = self._num_unsaid, 0
        return unsaid
