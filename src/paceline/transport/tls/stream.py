"""Present a TLS connection as a plain socket, for callers that do not support TLS.

A thread copies the bytes between the plain socket and the TLS connection. This costs two thread switches per direction.
"""

from __future__ import annotations

import select
import socket
import ssl
import threading
import time
from typing import Final

_CHUNK_BYTES: Final = 1 << 18
_LINGER_S: Final = 2.0
"""The time limit for sending the remaining bytes after the plain end is closed."""


def plain_end(encrypted: ssl.SSLSocket) -> socket.socket:
    """Return a plain socket whose bytes are sent through a TLS connection.

    The TLS connection is closed when the caller closes the socket.
    """
    caller_end, pump_end = socket.socketpair()
    pump = _Pump(encrypted, pump_end)
    threading.Thread(target=pump.run, name="paceline-tls", daemon=True).start()
    return caller_end


class _Direction:
    """The bytes that are copied in one direction, from a source to a target."""

    def __init__(self, source: socket.socket, target: socket.socket) -> None:
        self._source, self._target = source, target
        self._buffer = memoryview(bytearray(_CHUNK_BYTES))
        self.held = self._buffer[:0]
        self.has_ended = False
        """Whether the target has received all bytes and the end of the source."""
        self._is_open = True

    def advance(self) -> bool:
        """Copy bytes from the source to the target without waiting. Return whether any were copied."""
        if self.has_ended:
            return False
        try:
            if not self.held and self._is_open:
                got = self._source.recv_into(self._buffer)
                self.held, self._is_open = self._buffer[:got], got > 0
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return False
        except OSError:
            self._is_open = False
        try:
            if self.held:
                self.held = self.held[self._target.send(self.held) :]
                return True
            # SSLSocket.shutdown would discard the TLS state, so that the other direction would end too.
            socket.socket.shutdown(self._target, socket.SHUT_WR)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return False
        except OSError:  # the target is closed and accepts no more bytes
            self.held = self._buffer[:0]
        self.has_ended = True
        return True


class _Pump:
    """Copies bytes in both directions until both directions have ended or the plain socket is closed."""

    def __init__(self, encrypted: ssl.SSLSocket, plain: socket.socket) -> None:
        self._encrypted, self._plain = encrypted, plain
        self._out, self._in = _Direction(plain, encrypted), _Direction(encrypted, plain)
        for endpoint in (encrypted, plain):
            endpoint.setblocking(False)

    def run(self) -> None:
        closed_at: float | None = None
        with self._encrypted, self._plain:
            poll = select.poll()
            while not (self._out.has_ended and self._in.has_ended):
                if self._out.advance() | self._in.advance():
                    continue
                left_s = None if closed_at is None else closed_at + _LINGER_S - time.monotonic()
                if left_s is not None and (left_s <= 0 or self._out.has_ended):
                    return
                poll.register(self._encrypted, self._events_of(self._in, self._out))
                poll.register(self._plain, 0 if closed_at else self._events_of(self._out, self._in))
                if closed_at is not None:
                    poll.unregister(self._plain)  # poll() would report the end of the plain socket repeatedly
                events = dict(poll.poll(None if left_s is None else left_s * 1e3))
                if closed_at is None and events.get(self._plain.fileno(), 0) & select.POLLHUP:
                    closed_at = time.monotonic()

    @staticmethod
    def _events_of(reading: _Direction, writing: _Direction) -> int:
        reads = 0 if reading.held or reading.has_ended else select.POLLIN
        return reads | (select.POLLOUT if writing.held else 0)
