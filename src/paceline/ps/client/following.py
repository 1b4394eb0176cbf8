"""Apply views and reconnect while a client is idle or waits for another server.

A separate thread handles view changes and reconnections, so that servers do not wait for the client.
"""

from __future__ import annotations

import contextlib
import threading

from paceline.errors import PacelineError
from paceline.ps.client.routes import RouteWatch
from paceline.ps.client.servers import Servers
from paceline.ps.messages import View


class ViewFollower:
    """Receives views, and applies them in its own thread while the client is idle."""

    def __init__(self) -> None:
        self.watch = RouteWatch()
        self.servers: Servers | None = None
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def take(self, view: View) -> None:
        if not self.watch.take(view) or self.servers is None:
            return
        for connection in self.servers.connections:
            if not self.watch.has(connection.session.server):
                connection.interrupt()
        # A busy client checks for a new view before each request; this thread applies the view for an idle client.
        self._start(self.servers)

    def fail(self, error: PacelineError) -> None:
        """Raise `error` in all current and later waits for a view or a server."""
        if self.servers is None:
            self.watch.fail(error)
        else:
            self.servers.abort(error)

    def check_connections(self) -> None:
        """Reconnect cut connections, because other processes may wait for messages that are lost."""
        servers = self.servers
        if servers is not None and not servers.is_closed and servers.cuts.check(servers.connections):
            self._start(servers)

    def _start(self, servers: Servers) -> None:
        with self._lock:
            if self._thread is None and not servers.is_closed:
                self._thread = threading.Thread(target=self._follow, args=(servers,), name="paceline-view", daemon=True)
                self._thread.start()

    def _follow(self, servers: Servers) -> None:
        with servers.lock:
            with self._lock:
                self._thread = None
            if servers.is_closed:
                return
            with contextlib.suppress(PacelineError, MemoryError):  # the next call of the client raises the error
                if self.watch.is_newer_than(servers.core.version):
                    servers.follow()
                else:
                    servers.cuts.reconnect(servers.connections)

    def close(self) -> None:
        with self._lock:
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(10.0)
