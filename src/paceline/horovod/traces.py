"""The timeline of all ranks, with the names of Horovod's phases. Rank 0 writes the file."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from paceline.horovod.entries import TensorEntry
from paceline.observe.timeline import TimelineEvent, TimelineWriter
from paceline.transport import reader

_log = logging.getLogger(__name__)
_decode_events = reader(list[TimelineEvent], "the timeline of another rank")
_MOST_PENDING: Final = 100_000
"""Events that a rank keeps for rank 0. If there are more, the oldest are dropped."""


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
