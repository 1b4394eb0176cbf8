"""The last operations of this process, in a buffer of fixed size that other processes can read.

The buffer is a file in the job's folder, which is mapped into memory. So the launcher can read it while the process
hangs, even within C code, and after the process was killed.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import re
import struct
import threading
import time
from typing import Final

import msgspec
from msgspec import Struct

from paceline.decoded_types import register_type

NUM_EVENTS: Final = 1024
_EVENT_BYTES: Final = 256
_EVENT_WORDS: Final = _EVENT_BYTES // 8
BUFFER_BYTES: Final = NUM_EVENTS * _EVENT_BYTES
TIMELINE_BYTES: Final = 32 * BUFFER_BYTES
"""The size of the buffer in a run with a timeline, which has 32,768 operations of each process."""
_WORDS: Final = struct.Struct("<7q")
_TEXT_BYTES: Final = _EVENT_BYTES - _WORDS.size
_LENGTH: Final = struct.Struct("<H")
_MOST_SIZES: Final = 8

COLLECTIVE, MESSAGE, REQUEST, PHASE, FRAME = "collective", "message", "request", "phase", "frame"


def item_bytes(dtype: str) -> int:
    """Return the size of an item of a dtype such as ``bfloat16``, ``float8_e4m3fn`` or ``bool``."""
    bits = re.search(r"\d+", dtype)
    return int(bits[0]) // 8 if bits else 1


class RecordedOperation(Struct, frozen=True, array_like=True):
    """The constant part of an event."""

    kind: str
    """``COLLECTIVE``, ``MESSAGE`` (between two ranks) or ``REQUEST`` (to a server).

    In a run with a timeline also ``PHASE`` (of a step) or ``FRAME`` (that a server or the scheduler handles).
    """
    name: str
    """Such as ``all_reduce``, ``send`` or ``pull``."""
    group: int = -1
    """The number of the group in this process, from :meth:`FlightRecorder.add_group`."""
    subject: str = ""
    """The dtype of the array, or the name of the table."""
    shape: tuple[int, ...] = ()
    reduction: str = ""
    peer: int = -1
    """The root, the other rank or the server; -1: none."""

    def encode(self) -> bytes:
        """Return the operation in the format of the buffer. Long shapes are cut."""
        short = msgspec.structs.replace(self, name=self.name[:40], subject=self.subject[:8], shape=())
        cut = msgspec.structs.replace(self, shape=self.shape[:_MOST_SIZES])
        texts = (msgspec.json.encode(operation) for operation in (cut, short))
        text = next((text for text in texts if len(text) <= _TEXT_BYTES - _LENGTH.size), b"")
        return (_LENGTH.pack(len(text)) + text).ljust(_TEXT_BYTES, b"\0")


class RecordedGroup(Struct, frozen=True, array_like=True):
    """A group of ranks whose operations are recorded."""

    number: int
    name: str
    ranks: tuple[int, ...]
    """The rank in the program of each rank of the group."""


class RecordedEvent(Struct, frozen=True):
    """An operation of a process. Times are nanoseconds since 1970."""

    number: int
    operation: RecordedOperation
    start_ns: int
    end_ns: int
    """0 while the operation runs; negative if it has failed."""
    sequence: int
    """The number of the call in its group, or of the request to its server."""
    count: int = -1
    """The number of keys of a request, or of bytes of a frame.

    For a collective, it is the number of earlier collectives of the process.
    """
    clock: int = -1
    """The iteration of a request."""
    thread: int = 0
    """Python's number of the thread."""


class FlightRecorder:
    """Records the operations of this process. All methods are thread-safe."""

    def __init__(self, buffer: mmap.mmap, groups: int | None = None) -> None:
        """`groups` is the descriptor of the file for the groups; without it, the groups are not stored."""
        self._bytes = memoryview(buffer)
        self._num_slots = len(self._bytes) // _EVENT_BYTES
        self._words = self._bytes.cast("q")
        self._numbers, self._collectives = itertools.count(1), itertools.count()
        self._groups = groups
        self._group_numbers = itertools.count()
        self._num_lives: dict[str, int] = {}
        self._ranks_of_world: dict[str, tuple[int, ...]] = {}

    def number_ranks(self, world: str, ranks: tuple[int, ...]) -> None:
        """Set the program's rank of each rank of a world. This applies to the groups that are added later."""
        self._ranks_of_world[world] = ranks

    def add_group(self, name: str, ranks: tuple[int, ...], world: str = "") -> int:
        """Add a group, and return its number for :class:`RecordedOperation`.

        A group may have the name of an earlier group. `ranks` are ranks of the `world`.
        """
        program_ranks = self._ranks_of_world.get(world)
        if program_ranks is not None:
            ranks = tuple(program_ranks[rank] for rank in ranks)
        number = next(self._group_numbers)
        life = self._num_lives[name] = self._num_lives.get(name, 0) + 1
        if self._groups is not None and number < NUM_EVENTS:
            group = RecordedGroup(number, name if life == 1 else f"{name} #{life}", ranks)
            append_line(self._groups, msgspec.json.encode(group))
        return number

    def begin(self, operation: bytes, sequence: int, count: int = -1, clock: int = -1, thread: int = 0) -> int:
        """Record the start of an operation, and return its number for :meth:`end`.

        `operation` is the result of :meth:`RecordedOperation.encode`. The default of `thread` is the current thread.
        """
        number = next(self._numbers)
        slot = number % self._num_slots
        start = slot * _EVENT_BYTES + _WORDS.size
        words, at = self._words, slot * _EVENT_WORDS
        words[at] = 0  # the event is incomplete
        self._bytes[start : start + _TEXT_BYTES] = operation
        words[at + 1] = time.time_ns()
        words[at + 2] = 0
        words[at + 3] = sequence
        words[at + 4] = count
        words[at + 5] = clock
        words[at + 6] = thread or threading.get_ident()
        words[at] = number
        return number

    def begin_collective(self, operation: bytes, sequence: int) -> int:
        """Record the start of a collective, as :meth:`begin` does."""
        return self.begin(operation, sequence, next(self._collectives))

    def end(self, number: int, *, has_failed: bool = False) -> None:
        """Record the end of an operation."""
        words, at = self._words, number % self._num_slots * _EVENT_WORDS
        if words[at] == number:
            words[at + 2] = -time.time_ns() if has_failed else time.time_ns()


def append_line(descriptor: int, line: bytes) -> None:
    """Append a line to a file; if the disk is full, the line is lost."""
    with contextlib.suppress(OSError):
        os.write(descriptor, line + b"\n")


def read_events(data: bytes, start_ns: int = 0, end_ns: int = 0) -> list[RecordedEvent]:
    """Return the events in a buffer, the oldest first.

    With `start_ns` or `end_ns`, return only events that overlap with this time.
    """
    events = []
    for at in range(0, len(data) - _EVENT_BYTES + 1, _EVENT_BYTES):
        number, began_ns, ended_ns, sequence, count, clock, thread = _WORDS.unpack_from(data, at)
        if not number or 0 < ended_ns < start_ns or 0 < end_ns < began_ns:
            continue
        (length,) = _LENGTH.unpack_from(data, at + _WORDS.size)
        text = data[at + _WORDS.size + _LENGTH.size :][:length]
        try:
            operation = msgspec.json.decode(text, type=register_type(RecordedOperation))
        except msgspec.DecodeError:
            continue  # the process is writing this event
        events.append(RecordedEvent(number, operation, began_ns, ended_ns, sequence, count, clock, thread))
    return sorted(events, key=lambda event: event.number)


def read_groups(text: bytes) -> dict[int, RecordedGroup]:
    """Return the recorded groups of a process by number."""
    groups = {}
    for line in text.splitlines():
        try:
            group = msgspec.json.decode(line, type=register_type(RecordedGroup))
        except msgspec.DecodeError:
            continue  # the process was killed while it wrote the line
        groups[group.number] = group
    return groups
