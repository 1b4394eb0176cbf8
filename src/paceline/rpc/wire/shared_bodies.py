"""Send message bodies (the memory of arrays) through shared memory, if both ends of a connection are on one host.

A body is copied once through shared memory, but twice through a Unix socket. At the first large body in either
direction, the caller creates the shared memory and offers it to the callee. After the callee has mapped it, each sender
copies its bodies into free slots of the memory, and sends the number of the slot in the frame.

The receiver's arrays are views of the slot, which becomes free when the arrays are deleted. If few slots are free, the
receiver copies the bodies out of their slots. If no slot is free or a body is too large for a slot, the body is sent
through the socket.
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
SLOT_BYTES: Final = (1 << 20) + (1 << 16)
_SLOTS: Final = 4  # the number of slots per direction
_MAX_VIEWED: Final = 2
"""The maximum number of slots that the receiver's arrays may occupy. Further bodies are copied out of their slots."""
_HEAD_BYTES: Final = 4096
_LINE_BYTES: Final = 64
_UCRED = struct.Struct("=iII")


def can_share() -> bool:
    """Return whether this is Linux on x86-64. There, other processes see the data in a slot before the slot's flag."""
    return sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64")


class SlotView(np.ndarray[Any, np.dtype[np.uint8]]):
    """A view of a body in a slot. The slot becomes free when the last reference to the view's memory is deleted.

    If the process forks while a slot has a view, the slot is never freed, because parent and child may both use the
    view.
    """

    flag: NDArray[np.uint8] | None = None
    num_forks = 0

    def __del__(self) -> None:
        if self.flag is not None and self.num_forks == _forks.number:  # after a fork, both processes may use the slot
            self.flag[0] = 0


class _Forks:
    """Counts the forks of this process and its ancestors."""

    number = 0

    def count(self) -> None:
        self.number += 1


_forks = _Forks()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_forks.count)


class SharedBodies:
    """The shared memory of one connection: slots for bodies in both directions."""

    def __init__(self, segment: Segment, *, is_caller: bool) -> None:
        self._segment = segment
        self._out = 0 if is_caller else _SLOTS
        self.is_attached = not is_caller
        """Whether the other end has mapped the memory."""

    @classmethod
    def make(cls) -> SharedBodies | None:
        """Create the shared memory at the caller's end. Return None if the system has not enough memory."""
        try:
            return cls(Segment.create(_HEAD_BYTES + 2 * _SLOTS * SLOT_BYTES), is_caller=True)
        except SegmentError:
            return None

    @classmethod
    def attach(cls, path: str, connected: socket.socket) -> SharedBodies | None:
        """Map the memory that the other end of a Unix socket offers, and confirm this to the other end.

        Return None if the memory cannot be mapped.
        """
        if not can_share():
            return None
        try:
            pid = _UCRED.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))[0]
            segment = Segment.open(path, _HEAD_BYTES + 2 * _SLOTS * SLOT_BYTES, pid=pid)
        except (SegmentError, OSError, ValueError, struct.error):  # ValueError is raised for a NUL in the path
            return None
        segment.bytes[0] = 1
        return cls(segment, is_caller=False)

    @property
    def path(self) -> str:
        return self._segment.path

    def put(self, parts: Sequence[Buffer], size: int) -> int | None:
        """Copy a body into a free slot, and return the number of the slot.

        Return None if the body is too large or no slot is free.
        """
        memory = self._segment.bytes
        if size > SLOT_BYTES or not len(memory):  # closed memory is empty
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
        """Return a view of the body in a slot, or a copy if few slots are free.

        A view occupies its slot until the view is deleted. Raises ProtocolError for an invalid slot or size.
        """
        first = _SLOTS - self._out
        if not first <= slot < first + _SLOTS or size > SLOT_BYTES or not len(self._segment.bytes):
            raise ProtocolError(f"got a body of {size} bytes in slot {slot} of shared memory, which is invalid")
        at = _HEAD_BYTES + slot * SLOT_BYTES
        memory = self._segment.bytes
        body = memory[at : at + size].view(SlotView)
        body.flag, body.num_forks = memory[_LINE_BYTES * (1 + slot) :][:1], _forks.number
        flags = memory[_LINE_BYTES * (1 + first) : _LINE_BYTES * (1 + first + _SLOTS) : _LINE_BYTES]
        if np.count_nonzero(flags) > _MAX_VIEWED:
            return view_of(np.array(body, subok=False))
        return view_of(body)

    def close(self) -> None:
        self._segment.close()
