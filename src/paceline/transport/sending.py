"""Send frames from an event loop, without blocking and without copying large frames.

Before Python 3.12, asyncio copies the bytes that the socket does not accept immediately. Therefore this module queues
large frames as views, and passes one chunk at a time to asyncio, which then copies at most this chunk.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from paceline.errors import UsageError
from paceline.transport.base import Peer, Statistics
from paceline.transport.decoding import error_meta
from paceline.transport.frames import Buffer, FrameKind, Header, Limits, frame_parts, join, size_of, view_of
from paceline.transport.receiving import FrameReceiver
from paceline.transport.security.authentication import Hello
from paceline.transport.security.sealing import PIECE_BYTES, TAG_BYTES, Seal

CHUNK_BYTES = 1 << 18
_JOINED_BYTES = 1 << 16
_END = memoryview(b"")  # the marker after a queued frame, which is replaced by the frame's authentication tag


class _Reading:
    """Pauses reading from the peer if the handler requests a pause, or if the peer's backlog is large."""

    def __init__(self, transport: asyncio.Transport, max_backlog_bytes: int) -> None:
        self.is_on = True
        self.is_paused = False
        self._transport = transport
        self._max_backlog_bytes = max_backlog_bytes

    def update(self, waiting_bytes: int) -> None:
        """Pause or resume reading, given the backlog in bytes. A backlog below half of its limit resumes reading."""
        is_full = waiting_bytes > (self._max_backlog_bytes if self.is_on else self._max_backlog_bytes // 2)
        is_on = not self.is_paused and not is_full
        if is_on != self.is_on and not self._transport.is_closing():
            self.is_on = is_on
            if is_on:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()


class TransportPeer(Peer):
    """A :class:`Peer` on an asyncio transport."""

    def __init__(
        self,
        transport: asyncio.Transport,
        receiver: FrameReceiver,
        hello: Hello,
        address: str,
        limits: Limits,
        *,
        is_opened: bool = False,
        seal: Seal | None = None,
    ) -> None:
        """``seal`` creates the authentication tags of all sent frames.

        With ``is_opened`` (this end opened the connection), a backlog does not pause reading. If both ends paused
        reading, they would wait for each other forever.
        """
        self.hello = hello
        self.address = address
        self._transport = transport
        self._write = transport.write
        self._receiver = receiver
        self._reading = _Reading(transport, sys.maxsize if is_opened else limits.max_backlog_bytes)
        self._waiting: deque[memoryview] = deque()
        self._waiting_bytes = 0
        self._is_paused = False
        self._is_closing = False
        self._is_opened = is_opened
        self._seal = seal
        self._chunk_bytes = CHUNK_BYTES if seal is None else PIECE_BYTES
        self._bytes_sent = 0
        self._frames_sent = 0

    @override
    def send(self, *parts: Buffer) -> None:
        frame: Any = parts[0] if len(parts) == 1 else None
        size = sum(map(size_of, parts)) if frame is None else len(frame)
        self._frames_sent += 1
        self._bytes_sent += size
        if self._seal is not None:
            self._send_sealed(self._seal, parts, size)
        elif not self._is_paused and size <= (_JOINED_BYTES if frame is None else CHUNK_BYTES):
            # asyncio logs errors for writes to a closed transport
            if not self._is_closing and not self._transport.is_closing():
                self._write(join(parts) if frame is None else frame)
        else:
            self._enqueue_parts(parts, size)

    def _send_sealed(self, seal: Seal, parts: Sequence[Buffer], size: int) -> None:
        """Send a frame and its authentication tag. Queued parts are hashed when they are sent, and must not change."""
        self._bytes_sent += TAG_BYTES
        if self._is_paused or size > _JOINED_BYTES:
            self._enqueue_parts(parts, size)
            self._enqueue(_END)
        elif not self._is_closing and not self._transport.is_closing():
            frame = join(parts)  # first, because a failed join must not change the number of sealed frames
            self._write(join((frame, seal.tag((frame,)))))

    @override
    def send_error(self, request: Header, error: Exception) -> None:
        if self._is_opened:
            raise UsageError(
                "send_error() on a connection that this process opened: only the accepting end reports errors. "
                "Send a frame of your own kind"
            )
        self.send(
            *frame_parts(
                FrameKind.ERROR,
                table=request.table,
                request=request.request,
                epoch=request.epoch,
                clock=request.clock,
                sequence=request.sequence,
                meta=error_meta(error),
            )
        )

    @property
    @override
    def write_backlog_bytes(self) -> int:
        return self._waiting_bytes + self._transport.get_write_buffer_size()

    @override
    def pause_receiving(self) -> None:
        self._reading.is_paused = True
        self._reading.update(self._waiting_bytes)

    @override
    def resume_receiving(self) -> None:
        self._reading.is_paused = False
        self._reading.update(self._waiting_bytes)

    @override
    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._receiver.stop_receiving()
            if not self._waiting:
                self._transport.close()

    @override
    def abort(self) -> None:
        self._receiver.stop_receiving()
        self.abandon()
        self._transport.abort()

    @override
    def statistics(self) -> Statistics:
        receiver = self._receiver
        return Statistics(receiver.bytes_received, self._bytes_sent, receiver.frames_received, self._frames_sent)

    def pause(self) -> None:
        """Queue all later frames. asyncio calls this method when the socket's buffer is full."""
        self._is_paused = True

    def resume(self) -> None:
        """Resume sending. asyncio calls this method when the socket's buffer has room again."""
        self._is_paused = False
        self._drain()

    def abandon(self) -> None:
        """Drop all unsent frames after the connection was closed."""
        self._is_closing = True
        self._waiting.clear()
        self._waiting_bytes = 0

    def _enqueue_parts(self, parts: Sequence[Buffer], size: int) -> None:
        """Send as much as the socket accepts, and queue the rest. A small frame is copied, so that the caller can reuse
        its memory.
        """
        for part in parts if len(parts) == 1 or size > _JOINED_BYTES else (join(parts),):
            if size_of(part):
                self._enqueue(view_of(part))

    def _enqueue(self, data: memoryview) -> None:
        if self._is_closing:
            return
        self._waiting.append(data)
        self._waiting_bytes += len(data)
        self._drain()
        self._reading.update(self._waiting_bytes)

    def _drain(self) -> None:
        while self._waiting and not self._is_paused:
            if self._transport.is_closing():  # asyncio would log a write to a lost connection
                self.abandon()
                return
            data = self._waiting.popleft()
            if len(data) > self._chunk_bytes:
                self._waiting.appendleft(data[self._chunk_bytes :])
                data = data[: self._chunk_bytes]
            self._waiting_bytes -= len(data)
            if self._seal is not None:
                if data is _END:
                    data = memoryview(self._seal.end())
                else:
                    self._seal.update(data)
            self._write(data)
        if self._is_closing and not self._waiting:
            self._transport.close()
        elif not self._reading.is_on:
            self._reading.update(self._waiting_bytes)
