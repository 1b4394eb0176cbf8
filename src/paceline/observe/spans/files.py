"""Write a timeline as Chrome's JSON, or as Perfetto's protobuf. https://ui.perfetto.dev opens both.

Formats: "Trace Event Format" (Chrome), and ``protos/perfetto/trace`` (Perfetto).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from paceline.output_files import replacing

JOINABLE: Final = ".pftrace"
"""The suffix of files that can be joined with the files of other machines, for example by ``cat``."""
_MOST_32: Final = 0x7FFF_FFFF
_START: Final = {"start": "s", "step": "t", "end": "f"}
_BEGIN, _END, _INSTANT, _COUNTER = 1, 2, 3, 4
"""Types of Perfetto's events on tracks."""


class FlowPoint(NamedTuple):
    """A point of an arrow between spans: its start, a step or its end."""

    flow: int
    place: str
    """``start``, ``step`` or ``end``."""
    time_ns: int


class TimelineSpan(NamedTuple):
    """An operation with its start and end. Times are nanoseconds since 1970."""

    name: str
    start_ns: int
    end_ns: int
    details: str
    flows: tuple[FlowPoint, ...] = ()


class TimelineCounter(NamedTuple):
    """A value at a time."""

    time_ns: int
    value: int


class SpanTrack(NamedTuple):
    """A row of a process in the timeline: a counter, or spans. Two spans are nested, or they do not overlap."""

    process: int
    """The position of the process in the timeline."""
    process_name: str
    name: str
    spans: Sequence[TimelineSpan] = ()
    counters: Sequence[TimelineCounter] = ()
    pid: int = 0
    """The id of the process, because a replaced process has the same name."""

    @property
    def parent(self) -> int:
        """The number of the process in Perfetto's files."""
        return number_of(f"{self.process_name} {self.pid}")


def write_timeline(path: Path, tracks: Sequence[SpanTrack], start_ns: int, offset_ns: int = 0) -> None:
    """Write the tracks as protobuf if the name ends with ``.pftrace``, else as JSON.

    In JSON, times begin at `start_ns`. Protobuf has times since 1970, so that files of several machines can be joined.
    `offset_ns` is the clock of this machine minus the clock of rank 0's machine.
    """
    content = _perfetto(tracks, offset_ns) if path.suffix == JOINABLE else _chrome(tracks, start_ns, offset_ns)
    with replacing(path) as aside:
        aside.write_bytes(content)


def number_of(name: str) -> int:
    """Return a number of 48 bits for a name, which is equal on all machines."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=6).digest(), "little")


def _chrome(tracks: Sequence[SpanTrack], start_ns: int, offset_ns: int) -> bytes:
    names: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []
    for tid, track in enumerate(tracks):
        place = {"pid": track.process, "tid": tid}
        names.append({"name": "process_name", "ph": "M", **place, "args": {"name": track.process_name}})
        names.append({"name": "process_sort_index", "ph": "M", **place, "args": {"sort_index": track.process}})
        if track.spans:
            names.append({"name": "thread_name", "ph": "M", **place, "args": {"name": track.name}})
            names.append({"name": "thread_sort_index", "ph": "M", **place, "args": {"sort_index": tid}})
        for span in track.spans:
            times = {"ts": _us(span.start_ns - start_ns), "dur": _us(span.end_ns - span.start_ns)}
            events.append({"name": span.name, "ph": "X", **place, **times, "args": {"details": span.details}})
            for point in span.flows:
                time_ns = point.time_ns - (point.place == "end")  # an arrow must end within the span
                arrow = {"name": span.name, "cat": "acknowledgement", "ph": _START[point.place], "id": point.flow}
                events.append({**arrow, **place, "ts": _us(time_ns - start_ns), "bp": "e"})
        for counter in track.counters:
            values = {track.name: counter.value}
            events.append(
                {"name": track.name, "ph": "C", **place, "ts": _us(counter.time_ns - start_ns), "args": values}
            )
    events.sort(key=lambda event: event["ts"])
    about = {"start_time_since_epoch_in_micros": (start_ns - offset_ns) // 1000, "clock": "the clock of rank 0"}
    about["offset_of_this_machine_ns"] = offset_ns
    return msgspec.json.encode({"traceEvents": [*names, *events], "displayTimeUnit": "ms", "otherData": about})


def _us(time_ns: int) -> float:
    return time_ns / 1000


def _perfetto(tracks: Sequence[SpanTrack], offset_ns: int) -> bytes:
    packets: list[bytes] = []
    processes: set[int] = set()
    start_ns = offset_ns
    for track in tracks:
        parent, uuid = track.parent, number_of(f"{track.process_name} {track.pid}/{track.name}")
        if track.process not in processes:
            processes.add(track.process)
            process = _message(3, _number(1, parent & _MOST_32) + _text(6, track.process_name))
            packets.append(_message(60, _number(1, parent) + process))
        kind = _message(8, b"") if track.counters else b""
        packets.append(_message(60, _number(1, uuid) + _text(2, track.name) + _number(5, parent) + kind))
        for counter in track.counters:
            packets.append(_event(counter.time_ns - start_ns, _COUNTER, uuid, _number(30, counter.value)))
        packets += _perfetto_spans(track.spans, uuid, start_ns)
    sequence = _number(10, number_of(str([track.parent for track in tracks])) & _MOST_32 | 1)
    return b"".join(_message(1, packet + sequence) for packet in packets)


def _perfetto_spans(spans: Sequence[TimelineSpan], uuid: int, start_ns: int) -> Iterator[bytes]:
    """Yield the begins and ends of nested spans in the order of time."""
    open_spans: list[TimelineSpan] = []

    def ends(until_ns: float) -> Iterator[bytes]:
        while open_spans and open_spans[-1].end_ns <= until_ns:
            span = open_spans.pop()
            for point in span.flows:
                if point.place == "end":
                    arrow = _text(23, "acknowledged") + _fixed(48, point.flow)
                    yield _event(span.end_ns - 1 - start_ns, _INSTANT, uuid, arrow)
            yield _event(span.end_ns - start_ns, _END, uuid)

    for span in sorted(spans, key=lambda span: (span.start_ns, -span.end_ns)):
        yield from ends(span.start_ns)
        details = _message(4, _text(10, "details") + _text(6, span.details))
        arrows = b"".join(_fixed(47, point.flow) for point in span.flows if point.place != "end")
        yield _event(span.start_ns - start_ns, _BEGIN, uuid, _text(23, span.name) + details + arrows)
        open_spans.append(span)
    yield from ends(float("inf"))


def _event(time_ns: int, kind: int, track: int, content: bytes = b"") -> bytes:
    return _number(8, max(time_ns, 0)) + _message(11, _number(9, kind) + _number(11, track) + content)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _fixed(field: int, value: int) -> bytes:
    return _varint(field << 3 | 1) + struct.pack("<Q", value)


def _message(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _text(field: int, value: str) -> bytes:
    return _message(field, value.encode())
