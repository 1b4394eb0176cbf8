"""Connections that are cut while a client waits elsewhere: it is woken, and connects again.

A connection that breaks behind the last write to a server shows at the next one. If the client waits at another server
meanwhile, and that for a worker that waits for what was lost, none of them would go on.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.ps.client.connection import ServerConnection


class CutWatch:
    """Looks after the connections of one client."""

    def __init__(self) -> None:
        self.awaited: ServerConnection | None = None
        """Where the client waits for an answer."""
        self.has_cuts = False
        """Whether :meth:`mend` has something to do. Written before `awaited` is read; read after that is written."""

    def look(self, connections: Sequence[ServerConnection]) -> bool:
        """Return whether a connection is cut by which requests have gone; from any thread, without the client's lock.

        Who waits at another server meanwhile is interrupted, and connects to both again.
        """
        cut = [connection for connection in connections if connection.is_cut]
        if not cut:
            return False
        self.has_cuts = True
        awaited = self.awaited
        if awaited is not None and awaited not in cut:
            awaited.interrupt()
        return True

    def mend(self, connections: Sequence[ServerConnection]) -> None:
        """Try once to connect again wherever the connection is cut; with the client's lock."""
        self.has_cuts = False
        for connection in connections:
            connection.reconnect_once()
