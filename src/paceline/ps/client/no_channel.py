"""The channel of a server connection that was never established."""

from __future__ import annotations

from typing import NoReturn

from typing_extensions import override

from paceline.errors import ConnectionLostError
from paceline.transport import Address, Channel, Hello
from paceline.transport.base import Frame, Statistics
from paceline.transport.frames import Buffer, Header, WritableBuffer


class NoChannel(Channel):
    """A channel on which every operation raises ConnectionLostError."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.peer = Hello(role="server")

    def _fail(self) -> NoReturn:
        raise ConnectionLostError(f"not connected to {self.address}")

    @override
    def send(self, *parts: Buffer) -> None:
        self._fail()

    @override
    def receive(self, into: WritableBuffer, timeout_s: float) -> Header:
        self._fail()

    @override
    def receive_header(self, timeout_s: float) -> Header:
        self._fail()

    @override
    def receive_meta(self) -> bytes:
        self._fail()

    @override
    def receive_into(self, buffer: WritableBuffer) -> None:
        self._fail()

    @override
    def receive_frame(self, timeout_s: float) -> Frame:
        self._fail()

    @override
    def poll(self, timeout_s: float) -> bool:
        return True

    @override
    def has_ended(self) -> bool:
        return True

    @override
    def fileno(self) -> int:
        self._fail()

    @override
    def close(self) -> None:
        """Do nothing."""

    @override
    def statistics(self) -> Statistics:
        return Statistics(0, 0, 0, 0)
