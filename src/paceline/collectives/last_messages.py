"""Send a last message with the reason for a failure on several connections, and close the connections."""

from __future__ import annotations

import math
import select
import socket
import time
from collections.abc import Sequence

_CHUNK_BYTES = 1 << 18


class ClosingConnection:
    """A connection that sends its last message, and then reads until the peer closes it or the deadline passes.

    If a process closes a socket with unread bytes, the system resets the connection, and the peer could lose the last
    message. So this process reads all bytes first.
    """

    def __init__(self, connected: socket.socket, message: Sequence[memoryview]) -> None:
        self.connected = connected
        self._unsent = list(message)
        self._is_readable = True
        connected.setblocking(False)

    @property
    def events(self) -> int:
        if not self._is_readable and not self._unsent:
            return 0
        return (select.POLLIN if self._is_readable else 0) | (select.POLLOUT if self._unsent else 0)

    def advance(self) -> None:
        try:
            self._send()
        except BlockingIOError:
            pass
        except OSError:
            self._unsent = []
        try:
            while self._is_readable:
                self._is_readable = bool(self.connected.recv(_CHUNK_BYTES))
        except BlockingIOError:
            pass
        except OSError:
            self._is_readable, self._unsent = False, []

    def _send(self) -> None:
        while self._unsent:
            sent = self.connected.send(self._unsent[0])
            self._unsent[0] = self._unsent[0][sent:]
            if not self._unsent[0]:
                self._unsent.pop(0)
                if not self._unsent:
                    self.connected.shutdown(socket.SHUT_WR)


def send_and_close(closing: Sequence[ClosingConnection], deadline: float) -> None:
    open_ = {connection.connected.fileno(): connection for connection in closing}
    poll = select.poll()
    for fd, connection in list(open_.items()):
        connection.advance()
        if connection.events:
            poll.register(fd, connection.events)
        else:
            del open_[fd]
    while open_ and (left_s := deadline - time.monotonic()) > 0:
        for fd, _ in poll.poll(math.ceil(left_s * 1e3)):
            connection = open_[fd]
            connection.advance()
            if connection.events:
                poll.modify(fd, connection.events)
            else:
                poll.unregister(fd)
                del open_[fd]
    for connection in closing:
        connection.connected.close()
