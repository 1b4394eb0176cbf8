"""Maps that come, and connections that are cut, while a client is idle or waits at another server.

It goes by them in a thread of its own, lest servers wait for it.
"""

from __future__ import annotations

import contextlib
import threading

from paceline.errors import PacelineError
from paceline.ps.client.routes import MapWatch
from paceline.ps.client.servers import Servers
from paceline.ps.messages import View


class MapFollower:
    """Takes maps in the thread of the line to the scheduler, or in that which registers."""

    def __init__(self) -> None:
        self.watch = MapWatch()
        self.servers: Servers | None = None
        """The client's, as soon as there are any."""
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def take(self, cluster: View) -> None:
        """Take a map."""
        if not self.watch.take(cluster) or self.servers is None:
            return
        for connection in self.servers.connections:
            if not self.watch.has(connection.session.server):
                connection.interrupt()
        # Who is at work looks before every request; servers are not to wait for one who is busy elsewhere.
        self._start(self.servers)

    def fail(self, error: PacelineError) -> None:
        """Have whoever waits for a map or for a server, now or later, raise this."""
        if self.servers is None:
            self.watch.fail(error)
        else:
            self.servers.abort(error)

    def look(self) -> None:
        """Have connections made again that are cut: others may wait for what was lost on them."""
        if self.servers is not None and not self.servers.is_closed and self.servers.cuts.look(self.servers.connections):
            self._start(self.servers)

    def _start(self, servers: Servers) -> None:
        with self._lock:
            if self._thread is None and not servers.is_closed:
                self._thread = threading.Thread(target=self._follow, args=(servers,), name="paceline-map", daemon=True)
                self._thread.start()

    def _follow(self, servers: Servers) -> None:
        with servers.lock:
            with self._lock:
                self._thread = None
            if servers.is_closed:
                return
            with contextlib.suppress(PacelineError, MemoryError):  # who uses the client next is told
                if self.watch.is_newer_than(servers.core.version):
                    servers.follow()
                else:
                    servers.cuts.mend(servers.connections)

    def close(self) -> None:
        """Wait for the thread."""
        with self._lock:
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(10.0)
