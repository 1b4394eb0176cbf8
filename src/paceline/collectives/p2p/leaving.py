"""Send the reason for a failure on every connection before closing it."""

from __future__ import annotations

import math
import select
import socket
import time
from collections.abc import Sequence

_CHUNK_BYTES = 1 << 18


class Leaving:
    """One connection that other code does not use. Received bytes are discarded.

    It is closed when the other end has closed, or after a short time: closing a socket with unread bytes resets the
    connection, and the other end could lose the message.
    """

    def __init__(self, connected: socket.socket, words: Sequence[memoryview]) -> None:
        self.connected = connected
        self._words = list(words)
        self._is_readable = True
        connected.setblocking(False)

    @property
    def events(self) -> int:
        """Events to poll for; 0 at the end."""
        if not self._is_readable and not self._words:
            return 0
        return (select.POLLIN if self._is_readable else 0) | (select.POLLOUT if self._words else 0)

    def advance(self) -> None:
        """Send and receive without waiting."""
        try:
            self._say()
        except BlockingIOError:
            pass
        except OSError:
            self._words = []
        try:
            while self._is_readable:
                self._is_readable = bool(self.connected.recv(_CHUNK_BYTES))
        except BlockingIOError:
            pass
        except OSError:
            self._is_readable, self._words = False, []

    def _say(self) -> None:
        while self._words:
            sent = self.connected.send(self._words[0])
            self._words[0] = self._words[0][sent:]
            if not self._words[0]:
                self._words.pop(0)
                if not self._words:
                    self.connected.shutdown(socket.SHUT_WR)


def say_last_words(leaving: Sequence[Leaving], deadline: float) -> None:
    """Send the messages on all connections concurrently, then close the connections."""
    open_ = {each.connected.fileno(): each for each in leaving}
    poll = select.poll()
    for fd, each in list(open_.items()):
        each.advance()
        if each.events:
            poll.register(fd, each.events)
        else:
            del open_[fd]
    while open_ and (left_s := deadline - time.monotonic()) > 0:
        for fd, _ in poll.poll(math.ceil(left_s * 1e3)):
            each = open_[fd]
            each.advance()
            if each.events:
                poll.modify(fd, each.events)
            else:
                poll.unregister(fd)
                del open_[fd]
    for each in leaving:
        each.connected.close()
