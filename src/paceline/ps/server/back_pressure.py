"""Backpressure: a server stops reading from clients whose messages fill its memory.

A primary buffers pushes until all successors have them, early frames until their view arrives, and under sequential
consistency the pushes of incomplete iterations. Beyond a budget, the server stops reading from the clients that send
more, until half of the budget is free. The budget also bounds the memory of the successors, because a push counts until
the last successor has it. A server always reads from other servers, because their connections also carry heartbeats.
"""

from __future__ import annotations

import asyncio
from typing import cast

from paceline.protocol import ServerCore
from paceline.ps.server.pushes import Frame, payload_of
from paceline.tables.aggregation import IterationBuffer
from paceline.transport import Peer

MAX_HELD_BYTES = 1 << 28
_CHECK_PERIOD_S = 0.01


class BackPressure:
    """The paused connections of one server."""

    def __init__(self, core: ServerCore, buffer: IterationBuffer | None) -> None:
        self._core = core
        self._buffer = buffer
        self.max_bytes = MAX_HELD_BYTES
        self._added = 0  # an upper bound of the buffered bytes: the last count, and all bytes added after it
        self.paused: dict[Peer, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def count_held(self) -> int:
        """Return the bytes of early frames and of pushes that wait for successors."""
        early = sum(len(frame[2]) + len(frame[3]) for frame in cast("list[Frame]", self._core.early_requests))
        payloads = (payload_of(token) for token in self._core.pending_pushes)
        return early + sum(push.num_bytes for push in payloads)

    def count_ahead(self) -> int:
        """Return the bytes of the buffered pushes of incomplete iterations."""
        return 0 if self._buffer is None else self._buffer.num_bytes

    def record(self, peer: Peer, num_bytes: int) -> None:
        """Record buffered bytes of a peer; pause the peer if the budget is exceeded."""
        self._added += num_bytes
        if self._added <= self.max_bytes:  # the exact count is not needed yet
            return
        held, ahead = self.count_held(), self.count_ahead()
        self._added = held + ahead
        if held > self.max_bytes or (held + ahead > self.max_bytes and self._core.is_ahead(peer.hello.incarnation)):
            peer.pause_receiving()
            self.paused[peer] = None
            self._schedule_check()

    def resume_all(self) -> None:
        """Resume all connections, because the awaited event may have come, or must come from a paused connection."""
        paused, self.paused = self.paused, {}
        for peer in paused:
            peer.resume_receiving()

    def disconnected(self, peer: Peer) -> None:
        self.paused.pop(peer, None)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _schedule_check(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_CHECK_PERIOD_S, self._check)

    def _check(self) -> None:
        self._timer = None
        held, ahead = self.count_held(), self.count_ahead()
        self._added = held + ahead
        for peer in list(self.paused):
            if 2 * held <= self.max_bytes and (
                2 * (held + ahead) <= self.max_bytes or not self._core.is_ahead(peer.hello.incarnation)
            ):
                del self.paused[peer]
                peer.resume_receiving()
        if self.paused:
            self._schedule_check()
