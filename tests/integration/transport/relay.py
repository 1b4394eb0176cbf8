"""A relay between client and server, which can change, drop and repeat frames."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from tests.waiting import join

from paceline.transport import HEADER_BYTES, Address, unpack_header

Meddle: TypeAlias = Callable[[int, bytes], list[bytes]]
"""A function of the number and the bytes of a client's frame; it returns the bytes to send instead."""


class Relay:
    """A relay that listens at :attr:`address`."""

    def __init__(self, server: Address, change: Meddle, tag_bytes: int) -> None:
        self._server = (server.host, server.port)
        self._meddle = change
        self._tag_bytes = tag_bytes
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self.address = Address("tcp", *self._listening.getsockname())
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            server = socket.create_connection(self._server)
            self._sockets += [client, server]
            for work in (self._to_server, self._to_client):
                self._threads.append(threading.Thread(target=work, args=(client, server), daemon=True))
                self._threads[-1].start()

    def _to_server(self, client: socket.socket, server: socket.socket) -> None:
        number = 0
        try:
            with client.makefile("rb") as frames:
                while head := frames.read(HEADER_BYTES):
                    header = unpack_header(head)
                    remaining = (header.meta_bytes + 7 & -8) + (header.body_bytes + 7 & -8)
                    frame = head + frames.read(remaining + (self._tag_bytes if number else 0))  # first: HELLO
                    for changed in self._meddle(number, frame):
                        server.sendall(changed)
                    number += 1
        except OSError:
            pass
        _shut(server)

    def _to_client(self, client: socket.socket, server: socket.socket) -> None:
        try:
            while data := server.recv(1 << 16):
                client.sendall(data)
        except OSError:
            pass
        _shut(client)

    def close(self) -> None:
        """Close everything."""
        _shut(self._listening)
        self._listening.close()
        join(self._threads[0])
        for opened in self._sockets:
            _shut(opened)
        for thread in self._threads:
            join(thread)
        for opened in self._sockets:
            opened.close()


def _shut(connected: socket.socket) -> None:
    try:
        connected.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass


@contextmanager
def relay(server: Address, change: Meddle = lambda number, frame: [frame], *, tag_bytes: int = 16) -> Iterator[Relay]:
    """Yield a relay in front of a server. Each frame of the client except the first ends with ``tag_bytes``."""
    between = Relay(server, change, tag_bytes)
    try:
        yield between
    finally:
        between.close()
