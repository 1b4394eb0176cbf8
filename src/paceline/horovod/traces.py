"""The timeline of all ranks, with the names of Horovod's phases. Rank 0 writes the file.

The file is a Chrome trace, which Perfetto and ``chrome://tracing`` show: a JSON array. Each write replaces the bracket
at the end of the file by new events and a bracket. So the file is valid JSON after each write, even if the process is
killed later.

If the process is killed during a write, Linux may cut the write between two pages of the file. No event lies in two
pages, so the file then has only complete events, and no bracket at its end. The viewers accept such a file.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

from paceline.closing import Closing
from paceline.horovod.entries import TensorEntry
from paceline.transport import reader

_log = logging.getLogger(__name__)
_END: Final = b"\n]\n"
_PAGE_BYTES: Final = 4096
_MOST_EVENTS: Final = 500_000
"""About 60 MB. Chrome does not show much larger files."""
_MOST_PENDING: Final = 100_000
"""Events that a rank keeps for rank 0. If there are more, the oldest are dropped."""


class TimelineEvent(Struct, frozen=True, array_like=True):
    """A phase of the work of a rank."""

    name: str
    track: str
    """The name of the row that shows the event, such as a tensor. Events of one row must be nested."""
    start_ns: int
    duration_ns: int = -1
    """-1: the event is a moment."""


_decode_events = reader(list[TimelineEvent], "the timeline of another rank")


class TimelineWriter(Closing):
    """The file of a timeline."""

    def __init__(self, path: Path | str, *, most_events: int = _MOST_EVENTS) -> None:
        """Create the file. After `most_events` events, the writer adds a note, and drops later events."""
        self._start_ns, self._left = time.monotonic_ns(), most_events
        self._tracks: dict[tuple[int, str], int] = {}
        """The number of each row of each rank. The row without a name is the rank itself."""
        self._file = Path(path).open("wb", buffering=0)  # noqa: SIM115  (closed by close())
        start: dict[str, Any] = {"name": "timeline_start", "ph": "i", "s": "g", "ts": 0, "pid": 0, "tid": 0}
        epoch_us = (time.time_ns() - time.monotonic_ns() + self._start_ns) // 1000
        self._file.write(
            b"[\n" + msgspec.json.encode({**start, "args": {"start_time_since_epoch_in_micros": epoch_us}})
        )
        self._file.write(_END)

    def write(self, rank: int, events: Sequence[TimelineEvent]) -> None:
        """Append the events of one rank, whose times are those of this process's monotonic clock."""
        if not events or self._left <= 0:
            return
        lines = [line for event in events[: self._left] for line in self._lines_of(rank, event)]
        self._left -= len(events)
        if self._left <= 0:
            note = "the timeline is full: later events are not in this file"
            lines.append({"name": note, "ph": "i", "s": "g", "ts": lines[-1]["ts"], "pid": rank, "tid": 0})
        end = self._file.seek(-len(_END), 2)
        text = bytearray()
        for line in lines:
            data = b",\n" + msgspec.json.encode(line)
            left = _PAGE_BYTES - (end + len(text)) % _PAGE_BYTES
            text += b" " * (left if left < len(data) <= _PAGE_BYTES else 0) + data
        text += _END
        if self._file.write(text) < len(text):
            self._file.seek(end)
            self._file.write(_END)
            self._file.truncate()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._file.name)

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()

    def _lines_of(self, rank: int, event: TimelineEvent) -> Iterator[dict[str, Any]]:
        for track, kind, name in (("", "process_name", f"rank {rank}"), (event.track, "thread_name", event.track)):
            if (rank, track) not in self._tracks:
                self._tracks[rank, track] = len(self._tracks)
                number = self._tracks[rank, track]
                yield {"name": kind, "ph": "M", "pid": rank, "tid": number, "args": {"name": name}}
        common = {"name": event.name, "pid": rank, "tid": self._tracks[rank, event.track]}
        common["ts"] = (event.start_ns - self._start_ns) / 1000
        if event.duration_ns < 0:
            yield {**common, "ph": "i", "s": "p"}
        else:
            yield {**common, "ph": "X", "dur": event.duration_ns / 1000}


class PhaseRecorder:
    """Collects the phases of the operations of one rank."""

    def __init__(self, *, has_rounds: bool) -> None:
        self.has_rounds = has_rounds
        """Whether the rounds of the negotiation are recorded."""
        self._events: deque[TimelineEvent] = deque(maxlen=_MOST_PENDING)

    def add_round(self) -> None:
        if self.has_rounds:
            self._events.append(TimelineEvent("CYCLE_START", "cycles", time.monotonic_ns()))

    def add(self, entries: Iterable[TensorEntry | None], agreed_ns: int, phases: Sequence[tuple[str, int]]) -> None:
        """Add an operation. `phases` contains the name and the end of each phase after the ranks' agreement."""
        starts_ns = [agreed_ns, *(end_ns for _, end_ns in phases)]
        for entry in entries:
            if entry is None:
                continue
            operation, requested_ns = entry.request.operation, entry.requested_ns or agreed_ns
            track, name = f"{operation}.{entry.request.name}", operation.upper()
            self._events += [
                TimelineEvent(f"NEGOTIATE_{name}", track, requested_ns, agreed_ns - requested_ns),
                TimelineEvent(name, track, agreed_ns, starts_ns[-1] - agreed_ns),
                *(
                    TimelineEvent(phase, track, start_ns, end_ns - start_ns)
                    for (phase, end_ns), start_ns in zip(phases, starts_ns, strict=False)
                ),
            ]

    def take(self) -> bytes:
        """Return the events since the last call, encoded."""
        events = list(self._events)
        self._events.clear()
        return msgspec.msgpack.encode(events)


class RankTraces:
    """Rank 0's file of the events of all ranks."""

    def __init__(self, writer: TimelineWriter) -> None:
        self.offsets_ns: Sequence[int] = ()
        """The clock of each rank minus the clock of rank 0."""
        self._writer: TimelineWriter | None = writer

    def write(self, events_of_ranks: Iterable[bytes]) -> None:
        """Write the results of :meth:`PhaseRecorder.take`. A full disk ends the timeline, but not the training."""
        try:
            for rank, (data, offset_ns) in enumerate(zip(events_of_ranks, self.offsets_ns, strict=True)):
                if self._writer is not None:
                    events = _decode_events(data)
                    moved = [msgspec.structs.replace(event, start_ns=event.start_ns - offset_ns) for event in events]
                    self._writer.write(rank, moved)
        except OSError as error:
            _log.warning("the timeline ends because its file cannot be written: %s", error)
            self.close()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer = None
