"""Bodies of messages through memory that both ends of a connection on one host have mapped.

Copied in and out, a body costs half of what a Unix socket takes for it, which copies it twice too, into pages of its
own. The caller makes the memory when the first large body goes or has come, and offers it; once the callee has mapped
it, bodies that fit go through it either way, and the frame says in which slot. Who sends copies into a free slot, who
receives copies out and frees it. If no slot is free, the body goes through the socket as others do.
"""

from __future__ import annotations

import platform
import socket
import struct
import sys
from collections.abc import Sequence
from typing import Final

import numpy as np

from paceline.collectives.shared.segment import Segment, SegmentError
from paceline.errors import ProtocolError
from paceline.transport.frames import Buffer, view_of

SMALLEST_BYTES: Final = 1 << 16
"""Smaller bodies go through the socket."""
SLOT_BYTES: Final = 1 << 21
_SLOTS: Final = 2  # each way
_HEAD_BYTES: Final = 4096
_LINE_BYTES: Final = 64
_UCRED = struct.Struct("=iII")


def can_share() -> bool:
    """Return whether this platform can: Linux, on a processor that does not reorder stores (a slot's byte says that it
    is free, after what was copied out of it).
    """
    return sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64")


class SharedBodies:
    """The memory of one connection: slots for the bodies that go either way."""

    def __init__(self, segment: Segment, *, is_caller: bool) -> None:
        self._segment = segment
        self._out = 0 if is_caller else _SLOTS
        self.is_attached = not is_caller
        """Whether the other end is known to have mapped it."""

    @classmethod
    def make(cls) -> SharedBodies | None:
        """Return fresh memory, the caller's; None if there is none to be had."""
        try:
            return cls(Segment.create(_HEAD_BYTES + 2 * _SLOTS * SLOT_BYTES), is_caller=True)
        except SegmentError:
            return None

    @classmethod
    def attach(cls, path: str, connected: socket.socket) -> SharedBodies | None:
        """Map what the process at the other end of a Unix socket offers, and say so; None if that cannot be."""
        if not can_share():
            return None
        try:
            pid = _UCRED.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))[0]
            segment = Segment.open(path, _HEAD_BYTES + 2 * _SLOTS * SLOT_BYTES, pid=pid)
        except (SegmentError, OSError, struct.error):
            return None
        segment.bytes[0] = 1
        return cls(segment, is_caller=False)

    @property
    def path(self) -> str:
        """Where the other end opens it."""
        return self._segment.path

    def put(self, parts: Sequence[Buffer], size: int) -> int | None:
        """Copy a body into a free slot and return its number; None if there is none, or the body does not fit."""
        if not self.is_attached:
            if not self._segment.bytes[0]:
                return None
            self.is_attached = True
            self._segment.hide()
        if size > SLOT_BYTES:
            return None
        memory = self._segment.bytes
        for slot in range(self._out, self._out + _SLOTS):
            if not memory[_LINE_BYTES * (1 + slot)]:
                memory[_LINE_BYTES * (1 + slot)] = 1
                at = _HEAD_BYTES + slot * SLOT_BYTES
                for part in parts:
                    view = np.frombuffer(view_of(part), np.uint8)
                    memory[at : at + len(view)] = view
                    at += len(view)
                return slot
        return None

    def take(self, slot: int, size: int) -> memoryview:
        """Return the body in a slot, which is free again. Raises ProtocolError for one that cannot be."""
        first = _SLOTS - self._out
        if not first <= slot < first + _SLOTS or size > SLOT_BYTES or not len(self._segment.bytes):
            raise ProtocolError(f"got a body of {size} bytes in slot {slot} of shared memory, which cannot be")
        at = _HEAD_BYTES + slot * SLOT_BYTES
        body = self._segment.bytes[at : at + size].copy()
        self._segment.bytes[_LINE_BYTES * (1 + slot)] = 0
        return view_of(body)

    def close(self) -> None:
        """Unmap it. Idempotent."""
        self._segment.close()
