"""Bodies of messages through memory that both ends of a connection on one host have mapped.

A Unix socket copies a body twice, into pages of its own and out of them; here it is copied once, by who sends. The
caller makes the memory when the first large body goes or has come, and offers it; once the callee has mapped it, bodies
that fit go through it either way, and the frame says in which slot. The receiver's arrays are views of the slot, which
is free again when they are gone; where they are kept and slots run short, it copies them out. If no slot is free, the
body goes through the socket as others do.
"""

from __future__ import annotations

import os
import platform
import socket
import struct
import sys
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from paceline.collectives.shared.segment import Segment, SegmentError
from paceline.errors import ProtocolError
from paceline.transport.frames import Buffer, view_of

SMALLEST_BYTES: Final = 1 << 16
"""Smaller bodies go through the socket."""
SLOT_BYTES: Final = (1 << 20) + (1 << 16)
_SLOTS: Final = 4  # each way
_MAX_VIEWED: Final = 2
"""How many slots what was received may keep; while they do, what comes in others is copied out."""
_HEAD_BYTES: Final = 4096
_LINE_BYTES: Final = 64
_UCRED = struct.Struct("=iII")


def can_share() -> bool:
    """Return whether this platform can: Linux, on a processor that does not reorder stores (a slot's byte says that it
    is free, after what was copied out of it).
    """
    return sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64")


class SlotView(np.ndarray[Any, np.dtype[np.uint8]]):
    """A body in a slot: the slot is free when the last reference to its memory goes.

    A slot that is viewed while the process forks stays taken: parent and child may both look at it for ever.
    """

    flag: NDArray[np.uint8] | None = None
    num_forks = 0

    def __del__(self) -> None:
        if self.flag is not None and self.num_forks == _forks.number:  # else another process may have it still
            self.flag[0] = 0


class _Forks:
    """How often this process, or the one that it was forked from, has forked."""

    number = 0

    def count(self) -> None:
        """Count one more: what was taken before stays, since both processes have it."""
        self.number += 1


_forks = _Forks()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_forks.count)


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
        except (SegmentError, OSError, ValueError, struct.error):  # a path with a NUL, too
            return None
        segment.bytes[0] = 1
        return cls(segment, is_caller=False)

    @property
    def path(self) -> str:
        """Where the other end opens it."""
        return self._segment.path

    def put(self, parts: Sequence[Buffer], size: int) -> int | None:
        """Copy a body into a free slot and return its number; None if there is none, or the body does not fit."""
        memory = self._segment.bytes
        if size > SLOT_BYTES or not len(memory):  # closed
            return None
        if not self.is_attached:
            if not memory[0]:
                return None
            self.is_attached = True
            self._segment.hide()
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
        """Return the body in a slot, which is free once nothing refers to that; where many slots are taken, a copy.

        Raises ProtocolError for a slot or a size that cannot be.
        """
        first = _SLOTS - self._out
        if not first <= slot < first + _SLOTS or size > SLOT_BYTES or not len(self._segment.bytes):
            raise ProtocolError(f"got a body of {size} bytes in slot {slot} of shared memory, which cannot be")
        at = _HEAD_BYTES + slot * SLOT_BYTES
        memory = self._segment.bytes
        body = memory[at : at + size].view(SlotView)
        body.flag, body.num_forks = memory[_LINE_BYTES * (1 + slot) :][:1], _forks.number
        flags = memory[_LINE_BYTES * (1 + first) : _LINE_BYTES * (1 + first + _SLOTS) : _LINE_BYTES]
        if np.count_nonzero(flags) > _MAX_VIEWED:
            return view_of(np.array(body, subok=False))
        return view_of(body)

    def close(self) -> None:
        """Unmap it. Idempotent."""
        self._segment.close()
