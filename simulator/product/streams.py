"""Simulate streams of bytes. A stream may be split at any byte, and stops while the receiver does not read."""

from __future__ import annotations

from collections import deque
from typing import Any, Final

from typing_extensions import override

from simulator.network import RETRANSMIT_S, End, VirtualNetwork
from simulator.world import VirtualProcess

WINDOWS: Final = (300, 2_000, 20_000, 200_000)
"""Possible numbers of bytes that a connection stores until the receiver reads them."""


class StreamEnd(End):
    """One end of a stream."""

    other: StreamEnd

    def __init__(self, network: VirtualNetwork, process: VirtualProcess, path: tuple[str, str]) -> None:
        super().__init__(network, process, path)
        self.num_arrived = 0
        self._arrived: deque[bytes] = deque()
        self._window = network.world.random.choice(WINDOWS)
        self._num_sent = 0  # bytes that were sent and that the other end has not read

    def write(self, data: memoryview) -> int:
        """Send the data that fits into the window; return its size."""
        taken, random = min(len(data), max(self._window - self._num_sent, 0)), self.network.world.random
        if taken and not self.is_closed and not self.must_break():
            self._num_sent += taken
            at = 0
            while at < taken:
                size = taken - at if random.random() < 0.6 else random.randint(1, taken - at)
                self.transmit(self.other.arrive, bytes(data[at : at + size]))
                at += size
        return taken

    def read(self, view: memoryview) -> int:
        """Move arrived bytes into a buffer; return their number."""
        taken = 0
        while self._arrived and taken < len(view):
            data = self._arrived.popleft()
            size = min(len(data), len(view) - taken)
            view[taken : taken + size] = data[:size]
            if size < len(data):
                self._arrived.appendleft(data[size:])
            taken += size
        self.num_arrived -= taken
        if taken:
            self.transmit(self.other.has_read, taken)
        return taken

    @override
    def close(self) -> None:
        if self._arrived and not self.has_ended:  # TCP resets a connection that is closed with unread data
            self.abort()
        else:
            super().close()
        self._arrived.clear()

    @override
    def arrive(self, data: Any) -> None:
        if self.is_closed:
            self.transmit(self.other.reset)
        elif self.is_open:
            self._arrived.append(data)
            self.num_arrived += len(data)
            self.changed()

    @override
    def num_bytes(self, data: Any) -> int:
        return len(data) if isinstance(data, bytes) else 0

    def has_read(self, size: int) -> None:
        """Record that the other end has read some bytes."""
        self._num_sent -= size
        if not self.is_closed:
            self.changed()

    @override
    def reset(self) -> None:
        if self.is_open:
            self._arrived.clear()
            if self.other._num_sent:  # TCP would repeat the data or probe the full window, and receive a reset
                self.network.world.after(RETRANSMIT_S, self.other.reset)
        super().reset()
