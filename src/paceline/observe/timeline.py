"""Write the work of several ranks as a Chrome trace, which Perfetto and ``chrome://tracing`` show.

The file is a JSON array. Each write replaces the bracket at the end of the file by new events and a bracket. So the
file is valid JSON after each write, even if the process is killed later.

If the process is killed during a write, Linux may cut the write between two pages of the file. No event lies in two
pages, so the file then has only complete events, and no bracket at its end. Perfetto and ``chrome://tracing`` accept
such a file.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

from paceline.closing import Closing

_END: Final = b"\n]\n"
_PAGE_BYTES: Final = 4096
_MOST_EVENTS: Final = 500_000
"""About 60 MB. Chrome does not show much larger files."""


class TimelineEvent(Struct, frozen=True, array_like=True):
    """A phase of the work of a rank."""

    name: str
    track: str
    """The name of the row that shows the event, such as a tensor. Events of one row must be nested."""
    start_ns: int
    duration_ns: int = -1
    """-1: the event is a moment."""


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
