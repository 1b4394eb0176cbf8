"""Values that the processes of an elastic training share, including processes that start later."""

from __future__ import annotations

import time
from datetime import timedelta

from paceline.meeting.network_store import NetworkStore


class SharedValues:
    """The values in the coordinator's store. `timeout` limits :meth:`wait`."""

    def __init__(self, store: NetworkStore, member: int, timeout: timedelta) -> None:
        self._store, self._member, self._timeout = store, member, timeout
        self._published: bytes | None = None
        """The last value of :meth:`publish`."""

    def mark(self, key: str, value: bytes = b"") -> None:
        """Set a key. All processes must set the same value."""
        self._store.set(key, value)

    def is_marked(self, key: str) -> bool:
        """Return whether a key is set."""
        return self._store.find(key) is not None

    def wait(self, key: str) -> bytes:
        """Wait until a key is set, and return its value. Raises DeadlineError after the time limit."""
        return self._store.get(key, time.monotonic() + self._timeout.total_seconds())

    def publish(self, value: bytes) -> None:
        """Replace this process's published value, which :meth:`published` returns even after its death."""
        self._store.replace(_published_key(self._member), self._published, value)
        self._published = value

    def published(self, member: int) -> bytes | None:
        """Return the last value that a member has published, or None."""
        return self._store.find(_published_key(member))


def _published_key(member: int) -> str:
    return f"published by {member}"
