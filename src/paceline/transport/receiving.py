"""Receive frames in an event loop without copies. The handler gets views of the buffers that received the frames.

One system call receives many small frames into one buffer. If a frame is larger, only its bytes that are already in
this buffer are copied. The other bytes are received directly into a large buffer. All connections of an event loop
share a pool of buffers. An idle connection returns its buffers to the pool. An unauthenticated connection has only a
small buffer.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from paceline.errors import ProtocolError
from paceline.transport.frames import (
    FIRST_APPLICATION_KIND,
    HEADER,
    HEADER_BYTES,
    MAGIC,
    PROTOCOL_VERSION,
    Header,
    Limits,
    not_a_header,
    view_of,
)
from paceline.transport.security.sealing import TAG_BYTES, Seal, not_sealed

BUFFER_BYTES = 1 << 18
_KEPT_BYTES = 1 << 26
_NUM_KEPT = 2
_NUM_BUFFERS_KEPT = 16
_EMPTY = memoryview(b"")
_IGNORED = memoryview(bytearray(1 << 12))  # the buffer for bytes that arrive after stop_receiving() and are ignored

Deliver = Callable[[Header, memoryview, memoryview], None]


def allocate(size: int) -> memoryview:
    """Return new memory whose address is a multiple of 8. The system provides its pages at the first write."""
    return view_of(np.empty(size, np.uint8))


class BufferPool:
    """A pool of buffers. Reuse saves time, because the first write to a page of new memory costs as much as a copy."""

    def __init__(self) -> None:
        self._free: list[memoryview] = []
        self.free_buffers: list[memoryview] = []
        """The free buffers of ``BUFFER_BYTES`` bytes. The most recently used buffer is the last."""

    @classmethod
    def of_running_loop(cls) -> BufferPool:
        """Return the pool shared by all connections of this thread's event loop."""
        return _pools.setdefault(asyncio.get_running_loop(), cls())

    def give_buffer(self, buffer: memoryview) -> None:
        """Return a buffer to the pool. A buffer of another size, or for which the pool has no room, is freed."""
        if len(buffer) == BUFFER_BYTES and len(self.free_buffers) < _NUM_BUFFERS_KEPT:
            self.free_buffers.append(buffer)

    def take(self, size: int) -> memoryview:
        for index, buffer in enumerate(self._free):
            if len(buffer) >= size:
                return self._free.pop(index)
        return allocate(1 << (size - 1).bit_length())

    def give(self, buffer: memoryview) -> None:
        """Return a large buffer to the pool. A buffer above 64 MiB, or for which the pool has no room, is freed."""
        if len(buffer) <= _KEPT_BYTES:
            self._free.append(buffer)
            self._free.sort(key=len)
            del self._free[:-_NUM_KEPT]


_pools: WeakKeyDictionary[asyncio.AbstractEventLoop, BufferPool] = WeakKeyDictionary()


class _LargeFrame(NamedTuple):
    """A large frame that is being received, and its buffer, which may be larger than the frame."""

    memory: memoryview
    header: Header
    size: int


class _TagCheck:
    """Checks the authentication tags of received frames. It hashes a frame while the frame's other bytes arrive."""

    def __init__(self, seal: Seal) -> None:
        self._seal = seal
        self._hashed = 0  # the number of hashed bytes of the current frame

    def hash(self, received: memoryview, frame_bytes: int) -> None:
        stop = min(len(received), frame_bytes - TAG_BYTES)
        if stop > self._hashed:
            self._seal.update(received[self._hashed : stop])
            self._hashed = stop

    def passes(self, frame: memoryview) -> bool:
        self._seal.update(frame[self._hashed : -TAG_BYTES])
        self._hashed = 0
        return self._seal.matches(frame[-TAG_BYTES:])


class FrameReceiver(asyncio.BufferedProtocol, ABC):
    """Divides received bytes into frames, and passes each frame to ``deliver``.

    This class is abstract; its subclasses handle failures.
    """

    def __init__(self, limits: Limits, pool: BufferPool) -> None:
        self.deliver: Deliver = self._ignore
        self.bytes_received = 0
        self.frames_received = 0
        self._max_meta_bytes = limits.max_meta_bytes
        self._max_frame_bytes = limits.max_handshake_bytes
        self._first_kind = 0
        self._check: _TagCheck | None = None
        self._tag_bytes = 0  # the size of the authentication tag after every frame
        self._pool = pool
        self._is_authenticated = False
        self._buffer: memoryview | None = None  # the buffer for small frames; None if no received bytes are stored
        self._start = 0  # the position in the buffer of the first frame that is not delivered
        self._end = 0  # the position in the buffer after the last received byte
        self._large: _LargeFrame | None = None
        self._stopped = False

    @abstractmethod
    def frame_failed(self, header: Header, error: Exception) -> None:
        """Handle an exception that ``deliver`` raised for a frame."""

    @abstractmethod
    def stream_failed(self, error: Exception) -> None:
        """Close the connection after an invalid frame, because the bytes after this frame cannot be decoded."""

    def allow_application(
        self, limits: Limits, deliver: Deliver, *, first_kind: int = FIRST_APPLICATION_KIND, seal: Seal | None = None
    ) -> None:
        """Accept application frames instead of handshake frames.

        Frames of kinds below ``first_kind`` are rejected. With ``seal``, frames without a valid authentication tag are
        rejected too.
        """
        self._check = None if seal is None else _TagCheck(seal)
        self._tag_bytes = 0 if seal is None else TAG_BYTES
        self._max_frame_bytes = limits.max_frame_bytes
        self._first_kind = first_kind
        self._is_authenticated = True
        self.deliver = deliver

    @property
    def is_within_frame(self) -> bool:
        return self._end > self._start

    def stop_receiving(self) -> None:
        """Ignore the bytes that are not delivered yet and all later bytes, and free their memory."""
        self._stopped = True
        self.deliver = self._ignore
        self._buffer = None  # not returned to the pool, because the caller may use a frame in this buffer
        if self._large is not None:
            self._pool.give(self._large.memory)
            self._large = None

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the memory for the next bytes (called by asyncio before each receive)."""
        if self._large is not None:
            return self._large.memory[self._end : self._large.size]
        if self._stopped:
            return _IGNORED
        if self._buffer is None:
            free = self._pool.free_buffers
            if free and self._is_authenticated:
                self._buffer = free.pop()
            else:
                self._buffer = allocate(BUFFER_BYTES if self._is_authenticated else self._max_frame_bytes)
        return self._buffer[self._end :] if self._end else self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Deliver complete frames (called by asyncio after each receive)."""
        self.bytes_received += nbytes
        if self._stopped:
            return
        self._end = end = self._end + nbytes
        large = self._large
        if large is not None:
            if self._check is not None:
                self._check.hash(large.memory[:end], large.size)
            if end == large.size:
                self._deliver_large(large)
            return
        buffer = self._buffer
        assert buffer is not None
        start = self._start
        stop = 0
        while end - start >= HEADER_BYTES:
            header: Header = tuple.__new__(Header, HEADER.unpack_from(buffer, start))
            if header[0] != MAGIC or header[1] != PROTOCOL_VERSION:
                self.stream_failed(not_a_header(header, bytes(buffer[start : start + 16])))
                return
            meta_bytes, body_bytes = header[9], header[10]
            body_at = start + HEADER_BYTES + ((meta_bytes + 7) & -8)
            stop = body_at + ((body_bytes + 7) & -8)
            if stop - start > self._max_frame_bytes or meta_bytes > self._max_meta_bytes:
                self.stream_failed(self._too_long(header, stop - start))
                return
            if header[2] < self._first_kind:
                self.stream_failed(self._not_allowed(header))
                return
            stop += self._tag_bytes
            if stop > end:
                break
            if self._check is not None and not self._check.passes(buffer[start:stop]):
                self.stream_failed(not_sealed("the other end"))
                return
            self.frames_received += 1
            meta_at = start + HEADER_BYTES
            # The position advances before the call, so that the frame counts as delivered even if `deliver` raises an
            # error or stops the receiver.
            self._start = start = stop
            try:
                self.deliver(
                    header,
                    buffer[meta_at : meta_at + meta_bytes] if meta_bytes else _EMPTY,
                    buffer[body_at : body_at + body_bytes],
                )
            except Exception as error:
                self.frame_failed(header, error)
            if self._stopped:  # true if `deliver` has stopped this receiver
                return  # type: ignore[unreachable]
        if self._check is not None and stop > end:
            self._check.hash(buffer[start:end], stop - start)
        if start == end:
            self._start = self._end = 0
            self._buffer = None
            self._pool.give_buffer(buffer)
        else:
            self._make_room(buffer, stop - start)

    def _make_room(self, buffer: memoryview, frame_bytes: int) -> None:
        start, end = self._start, self._end
        have = end - start
        if have >= HEADER_BYTES and frame_bytes > len(buffer):
            memory = self._pool.take(frame_bytes)
            memory[:have] = buffer[start:end]
            self._large = _LargeFrame(memory, Header._make(HEADER.unpack_from(buffer, start)), frame_bytes)
            self._buffer = None
            self._pool.give_buffer(buffer)
        elif have < HEADER_BYTES or start + frame_bytes > len(buffer):
            buffer[:have] = buffer[start:end]
        else:
            return
        self._start, self._end = 0, have

    def _deliver_large(self, frame: _LargeFrame) -> None:
        memory, header, size = frame
        self._large = None
        self._start = self._end = 0
        if self._check is not None and not self._check.passes(memory[:size]):
            self._pool.give(memory)
            self.stream_failed(not_sealed("the other end"))
            return
        self.frames_received += 1
        meta_end = HEADER_BYTES + header.meta_bytes
        body_at = (meta_end + 7) & -8
        try:
            self.deliver(header, memory[HEADER_BYTES:meta_end], memory[body_at : body_at + header.body_bytes])
        except Exception as error:
            self.frame_failed(header, error)
        self._pool.give(memory)

    def _too_long(self, header: Header, size: int) -> ProtocolError:
        return ProtocolError(
            f"got a frame of kind {header.kind} that claims {size} bytes, {header.meta_bytes} in its meta. At most "
            f"{self._max_frame_bytes} ({self._max_meta_bytes}) are allowed here. The "
            "connection is closed"
        )

    def _not_allowed(self, header: Header) -> ProtocolError:
        return ProtocolError(
            f"got a frame of kind {header.kind} after the handshake, but kinds below {FIRST_APPLICATION_KIND} "
            "are the transport's own. The connection is closed"
        )

    def _ignore(self, header: Header, meta: memoryview, body: memoryview) -> None:
        pass
