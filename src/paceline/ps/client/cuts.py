"""Detection of connections that break while the client waits for another server.

A client notices a broken connection at its next write. A deadlock would be possible: the client waits for a server,
which waits for a worker, which needs a message lost on the broken connection.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.ps.client.connection import ServerConnection


class CutWatch:
    """Watches the connections of one client."""

    def __init__(self) -> None:
        self.waiting_on: ServerConnection | None = None
        """The connection on which the client waits for an answer."""
        self.has_cuts = False
        """Whether :meth:`reconnect` must run. Set before `waiting_on` is read, and read after it is set."""

    def check(self, connections: Sequence[ServerConnection]) -> bool:
        """Return whether a connection with lost messages is cut. Call it from any thread, without the client's lock.

        A client that waits for another server is interrupted and reconnects to both.
        """
        cut = [connection for connection in connections if connection.is_cut]
        if not cut:
            return False
        self.has_cuts = True
        waiting_on = self.waiting_on
        if waiting_on is not None and waiting_on not in cut:
            waiting_on.interrupt()
        return True

    def reconnect(self, connections: Sequence[ServerConnection]) -> None:
        """Try once to reconnect each cut connection; the caller holds the client's lock."""
        self.has_cuts = False
        for connection in connections:
            connection.reconnect_once()
