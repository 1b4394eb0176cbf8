"""The connections of a node to servers, by incarnation: each is made again when it breaks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from simulator.protocol.connections import MessageEnd, MessageProcess
from simulator.protocol.messages import EventFrame


class ServerLinks:
    """The links of one process, which introduces itself as a `kind` with an incarnation.

    `address` returns the address of a server, None if it is unknown. A link is None while disconnected.
    """

    def __init__(self, process: MessageProcess, kind: str, address: Callable[[int], str | None]) -> None:
        self._process = process
        self._kind = kind
        self._address = address
        self._links: dict[int, MessageEnd | None] = {}
        self._connecting: set[int] = set()
        self.incarnation = 0
        """The incarnation of this process."""

    def __iter__(self) -> Iterator[int]:
        return iter(self._links)

    def connected(self) -> list[tuple[int, MessageEnd]]:
        return [(server, link) for server, link in self._links.items() if link is not None]

    def want(self, server: int) -> None:
        """Want a link to a server; :meth:`connect` makes it."""
        self._links.setdefault(server, None)

    def want_only(self, servers: frozenset[int]) -> None:
        """Keep and make links to these servers, and drop all others."""
        for server in [server for server in self._links if server not in servers]:
            self.drop(server)
        for server in sorted(servers):
            self.want(server)
        self.connect()

    def drop(self, server: int) -> None:
        link = self._links.pop(server, None)
        if link is not None:
            link.close()

    def connect(self) -> None:
        """Make all links that are wanted and missing."""
        for server, link in self._links.items():
            address = self._address(server)
            if link is None and address is not None and server not in self._connecting:
                self._connecting.add(server)
                self._process.connect(address, (self._kind, self.incarnation, server))

    def opened(self, connection: MessageEnd) -> bool:
        """Take a new connection, if the link is missing; return whether it is taken."""
        server = connection.hello[2]
        self._connecting.discard(server)
        if server not in self._links or self._links[server] is not None:
            connection.close()
            return False
        self._links[server] = connection
        return True

    def refused(self, server: int) -> None:
        self._connecting.discard(server)
        self.connect()

    def closed(self, connection: MessageEnd) -> bool:
        """Record the end of a connection; return whether it was a link. Then call :meth:`connect`."""
        server = connection.hello[2]
        if not connection.was_opened:
            self._connecting.discard(server)
        was_link = self._links.get(server) is connection
        if was_link:
            self._links[server] = None
        return was_link

    def send(
        self, server: int, make_event: Callable[[EventFrame], Any], *, number: int = 0, version: int, payload: Any = ()
    ) -> None:
        """Send an event to a server; it is lost without a connection."""
        link = self._links.get(server)
        if link is not None:
            link.send(EventFrame(link.other, make_event, number=number, version=version, payload=payload))
