"""Send message bodies through shared memory, if both ends of a connection are on one host. Shared memory needs one copy
of a body; a Unix socket needs two. At the first large body in either direction, the caller creates the memory and
offers it to the callee. After the callee has mapped the memory, bodies that fit into a slot use the memory in both
directions; the frame contains the slot's number. The receiver's arrays are views of the slot, which becomes free when
the arrays are deleted. If few slots are free, the receiver copies bodies out of their slots. Without a free slot, the
body is sent through the socket.
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
_SLOTS: Final = 4  # slots per direction
_MAX_VIEWED: Final = 2
"""Maximum number of slots in use by received arrays. If more slots are in use, bodies are copied."""
_HEAD_BYTES: Final = 4096
_LINE_BYTES: Final = 64
_UCRED = struct.Struct("=iII")


def can_share() -> bool:
    """Return whether this is Linux on x86-64, which never makes a slot's flag visible before the data in the slot."""
    return sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64")


class SlotView(np.ndarray[Any, np.dtype[np.uint8]]):
    """A body in a slot, which becomes free when the last reference to its memory is deleted.

    If the process forks while a slot has a view, the slot is never freed, because parent and child may both use the
    view.
    """

    flag: NDArray[np.uint8] | None = None
    num_forks = 0

    def __del__(self) -> None:
        if self.flag is not None and self.num_forks == _forks.number:  # after a fork, both processes may use the slot
            self.flag[0] = 0


class _Forks:
    """The number of forks of this process and its ancestors."""

    number = 0

    def count(self) -> None:
        self.number += 1


_forks = _Forks()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_forks.count)


class SharedBodies:
    """The memory of one connection: slots for bodies in both directions."""

    def __init__(self, segment: Segment, *, is_caller: bool) -> None:
        self._segment = segment
        self._out = 0 if is_caller else _SLOTS
        self.is_attached = not is_caller
        """Whether the other end has mapped the memory."""

    @classmethod
    def make(cls) -> SharedBodies | None:
        """Create the memory at the caller's end; None if the system has no memory for it."""
        try:
            return cls(Segment.create(_HEAD_BYTES + 2 * _SLOTS * SLOT_BYTES), is_caller=True)
        except SegmentError:
            return None

    @classmethod
    def attach(cls, path: str, connected: socket.socket) -> SharedBodies | None:
        """Map the memory that the other end of a Unix socket offers, and confirm the mapping; None if mapping fails."""
        if not can_share():
            return None
        try:
            pid = _UCRED.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))[0]
            segment = Segment.open(path, _HEAD_BYTES + 2 * _SLOTS * SLOT_BYTES, pid=pid)
        except (SegmentError, OSError, ValueError, struct.error):  # ValueError: the path contains a NUL
            return None
        segment.bytes[0] = 1
        return cls(segment, is_caller=False)

    @property
    def path(self) -> str:
        return self._segment.path

    def put(self, parts: Sequence[Buffer], size: int) -> int | None:
        """Copy a body into a free slot and return the slot's number; None if the body is too large or no slot free."""
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
        """Return the body in a slot: a view, which keeps the slot in use, or a copy if few slots are free.

        Raises ProtocolError for an invalid slot or size.
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
