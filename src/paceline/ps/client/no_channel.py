"""A channel that never was: what a connection has before it is made."""

from __future__ import annotations

from typing import NoReturn

from paceline.errors import ConnectionLostError
from paceline.transport import Address, Channel, Hello
from paceline.transport.base import Frame, Statistics
from paceline.transport.frames import Buffer, Header, WritableBuffer


class NoChannel(Channel):
    """Every use of it is a lost connection."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.peer = Hello(role="server")

    def _fail(self) -> NoReturn:
        raise ConnectionLostError(f"there is no connection to {self.address}")

    def send(self, header: bytes | bytearray | memoryview, *buffers: Buffer) -> None:
        """See :meth:`Channel.send`."""
        self._fail()

    def send_frame(self, kind: int, **fields: object) -> None:
        """See :meth:`Channel.send_frame`."""
        self._fail()

    def receive(self, into: WritableBuffer, timeout_s: float) -> Header:
        """See :meth:`Channel.receive`."""
        self._fail()

    def receive_header(self, timeout_s: float) -> Header:
        """See :meth:`Channel.receive_header`."""
        self._fail()

    def receive_meta(self) -> bytes:
        """See :meth:`Channel.receive_meta`."""
        self._fail()

    def receive_into(self, buffer: WritableBuffer) -> None:
        """See :meth:`Channel.receive_into`."""
        self._fail()

    def receive_frame(self, timeout_s: float) -> Frame:
        """See :meth:`Channel.receive_frame`."""
        self._fail()

    def poll(self, timeout_s: float) -> bool:
        """See :meth:`Channel.poll`."""
        return True

    def fileno(self) -> int:
        """See :meth:`Channel.fileno`."""
        self._fail()

    def close(self) -> None:
        """See :meth:`Channel.close`."""

    def statistics(self) -> Statistics:
        """See :meth:`Channel.statistics`."""
        return Statistics(0, 0, 0, 0)
