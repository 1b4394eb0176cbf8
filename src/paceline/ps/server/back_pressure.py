"""Whose requests a server does not read for now, since what they have sent fills its memory.

A primary keeps a push until all servers behind it have it, a frame of a map that is not here yet until it comes, and
under sequential consistency the pushes of an iteration until it is complete. Who sends more, while that is beyond a
budget, is not read until half of it is gone: the client waits in its own send, and everybody else is served. A primary
so bounds the memory of the servers behind it too, since a push counts until the last of them has it. Servers that
replicate are always read: their signs of life come by the same connections.
"""

from __future__ import annotations

import asyncio
from typing import cast

from paceline.protocol import ServerCore
from paceline.ps.server.pushes import Frame, payload_of
from paceline.tables.aggregation import IterationBuffer
from paceline.transport import Peer

MAX_HELD_BYTES = 1 << 28
_LOOK_PERIOD_S = 0.01


class BackPressure:
    """The connections of one server that are not read."""

    def __init__(self, core: ServerCore, buffer: IterationBuffer | None) -> None:
        self._core = core
        self._buffer = buffer
        self.max_bytes = MAX_HELD_BYTES
        self._added = 0  # bytes since they were counted, and what they were then
        self._paused: dict[Peer, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_paused(self) -> int:
        """How many connections are not read."""
        return len(self._paused)

    def count_held(self) -> int:
        """Return the bytes that are held for others: early frames, and pushes that wait for servers behind."""
        early = sum(len(frame[2]) + len(frame[3]) for frame in cast("list[Frame]", self._core.early_requests))
        payloads = (payload_of(token) for token in self._core.pending_pushes)
        return early + sum(push.num_bytes for push in payloads)

    def count_ahead(self) -> int:
        """Return the bytes of iterations that are not complete: only workers that are ahead of another add to them."""
        return 0 if self._buffer is None else self._buffer.num_bytes

    def note(self, peer: Peer, num_bytes: int) -> None:
        """Take note of what a peer has sent, and that is kept; read it no more for now if that is too much."""
        self._added += num_bytes
        if self._added <= self.max_bytes:  # counted, it may be less
            return
        held, ahead = self.count_held(), self.count_ahead()
        self._added = held + ahead
        if held > self.max_bytes or (held + ahead > self.max_bytes and self._core.is_ahead(peer.hello.incarnation)):
            peer.pause_receiving()
            self._paused[peer] = None
            self._look_soon()

    def resume_all(self) -> None:
        """Read everybody again: what was waited for may be here, or may have to come from them."""
        paused, self._paused = self._paused, {}
        for peer in paused:
            peer.resume_receiving()

    def disconnected(self, peer: Peer) -> None:
        """Forget a connection."""
        self._paused.pop(peer, None)

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()

    def _look_soon(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_LOOK_PERIOD_S, self._look)

    def _look(self) -> None:
        self._timer = None
        held, ahead = self.count_held(), self.count_ahead()
        self._added = held + ahead
        for peer in list(self._paused):
            if 2 * held <= self.max_bytes and (
                2 * (held + ahead) <= self.max_bytes or not self._core.is_ahead(peer.hello.incarnation)
            ):
                del self._paused[peer]
                peer.resume_receiving()
        if self._paused:
            self._look_soon()
