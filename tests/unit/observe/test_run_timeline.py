"""The timeline of a run: the window of steps, the merged tracks, and both formats of its file."""

from __future__ import annotations

import mmap
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.chrome_traces import check_chrome

from paceline.errors import UsageError
from paceline.observe.spans.files import write_timeline
from paceline.observe.spans.operators import OperatorFile, OperatorSpan, num_operator_bytes
from paceline.observe.spans.timeline import ProcessEvents, make_tracks
from paceline.observe.spans.window import StepSpans, StepWindow, parse_steps
from paceline.observe.stuck.processes import WatchedProcess
from paceline.observe.stuck.recorder import (
    BUFFER_BYTES,
    COLLECTIVE,
    FRAME,
    PHASE,
    REQUEST,
    FlightRecorder,
    RecordedEvent,
    RecordedGroup,
    RecordedOperation,
    read_events,
)

_S = 10**9
_MAIN = 77


def _event(kind: str, name: str, start: int, end: int, sequence: int = 0, **fields: Any) -> RecordedEvent:
    words = {"count": fields.pop("count", -1), "thread": fields.pop("thread", _MAIN)}
    return RecordedEvent(start, RecordedOperation(kind, name, **fields), start * _S, end * _S, sequence, **words)


def _processes() -> list[ProcessEvents]:
    """A rank with a step and two overlapping pushes, another rank with a running push, and a server."""
    rank = [
        _event(PHASE, "step", 10, 30, 5),
        _event(PHASE, "forward", 11, 19, 5),
        _event(COLLECTIVE, "all_reduce", 12, 15, 1, subject="float64", shape=(3, 5)),
        _event(PHASE, "backward", 19, 29, 5),
        _event(COLLECTIVE, "all_reduce", 20, 40, 2, subject="float32", shape=(2,), thread=8),
        _event(REQUEST, "push", 13, 18, 1, subject="w", peer=0, count=4),
        _event(REQUEST, "push", 14, 26, 2, subject="w", peer=0, count=4),
        _event(REQUEST, "pull", 27, 28, 3, subject="w", peer=0, count=4),
    ]
    other = [_event(REQUEST, "push", 21, 0, 1, subject="w", peer=0)]
    server = [
        _event(FRAME, "pull", 10, 11, 9, subject="table 1", peer=1, count=10),
        _event(FRAME, "push", 15, 16, 1, subject="table 1", peer=0, count=100),
        _event(FRAME, "push", 17, 18, 2, subject="table 1", peer=0, count=100),
        _event(FRAME, "push", 22, 23, 1, subject="table 1", peer=1, count=100),
    ]
    names = ("rank 0", "rank 1", "server 0")
    return [
        ProcessEvents(WatchedProcess(name, 1, "", _MAIN), events, {})
        for name, events in zip(names, (rank, other, server), strict=True)
    ]


def test_the_merged_timeline_is_valid(tmp_path: Path) -> None:
    write_timeline(tmp_path / "t.json", list(make_tracks(_processes())), 10 * _S)
    trace = check_chrome(tmp_path / "t.json")
    assert trace.processes == {0: "rank 0", 1: "rank 1", 2: "server 0"}
    spans = {(process, row, span["name"], span["ts"]) for process, row, span in trace.spans()}
    assert ("rank 0", "main thread", "step 5", 0.0) in spans
    assert ("rank 0", "main thread", "all_reduce", 2e6) in spans
    assert ("rank 0", "thread 0x8", "all_reduce", 10e6) in spans
    assert ("rank 0", "requests to server 0", "push", 3e6) in spans
    assert ("rank 0", "requests to server 0 (2)", "push", 4e6) in spans
    assert ("rank 1", "requests to server 0", "push", 11e6) in spans
    assert trace.num_flows == 2  # the push of rank 1 is not acknowledged
    counters = [
        (trace.processes[event["pid"]], event["name"], event["ts"], event["args"]) for event in trace.kinds["C"]
    ]
    assert ("rank 0", "bytes", 30e6, {"bytes": 128}) in counters
    assert ("server 0", "bytes", 13e6, {"bytes": 310}) in counters
    assert [entry for entry in counters if entry[1] == "staleness"] == [
        ("server 0", "staleness", 12e6, {"staleness": 2}),
    ]


@pytest.mark.parametrize(
    ("dtype", "num_bytes"), [("bool", 1), ("uint8", 1), ("bfloat16", 2), ("uint16", 2), ("float32", 4), ("int64", 8)]
)
def test_bytes_of_collectives(dtype: str, num_bytes: int) -> None:
    call = _event(COLLECTIVE, "all_reduce", 1, 2, subject=dtype, shape=(3,))
    tracks = make_tracks([ProcessEvents(WatchedProcess("rank 0", 1, "", _MAIN), [call], {})])
    assert [counter.value for track in tracks for counter in track.counters] == [3 * num_bytes]


def test_a_replaced_rank_has_its_own_tracks(tmp_path: Path) -> None:
    step = _event(PHASE, "step", 1, 2)
    processes = [ProcessEvents(WatchedProcess("rank 1", pid, "", _MAIN), [step], {}) for pid in (5, 6)]
    write_timeline(tmp_path / "t.pftrace", list(make_tracks(processes)), 0)
    packets = [dict(_fields(packet)) for _, packet in _fields((tmp_path / "t.pftrace").read_bytes())]
    numbers = [dict(_fields(packet[60]))[1] for packet in packets if 60 in packet]
    assert len(numbers) == len(set(numbers)) == 4  # of two processes, and of a thread of each


def test_threads_of_one_group_have_their_own_tracks(tmp_path: Path) -> None:
    calls = [_event(COLLECTIVE, "all_reduce", 1, 3, group=0, thread=8), _event(COLLECTIVE, "all_reduce", 2, 4, group=0)]
    groups = {0: RecordedGroup(0, "world", (0, 1))}
    tracks = list(make_tracks([ProcessEvents(WatchedProcess("rank 0", 1, "", 1), calls, groups)]))
    assert [track.name for track in tracks if track.spans] == [
        "thread of group world",
        "thread of group world, thread 0x4d",
    ]
    write_timeline(tmp_path / "t.pftrace", tracks, 0)
    packets = [dict(_fields(packet)) for _, packet in _fields((tmp_path / "t.pftrace").read_bytes())]
    numbers = [dict(_fields(packet[60]))[1] for packet in packets if 60 in packet]
    assert len(numbers) == len(set(numbers))


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the fields of a protobuf message: number and value."""
    at = 0

    def varint() -> int:
        nonlocal at
        value, shift = 0, 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(data):
        key = varint()
        kind = key & 7
        if kind == 0:
            yield key >> 3, varint()
        elif kind == 1:
            at += 8
            yield key >> 3, struct.unpack("<Q", data[at - 8 : at])[0]
        else:
            assert kind == 2
            length = varint()
            at += length
            yield key >> 3, data[at - length : at]


def test_the_protobuf_has_the_same_spans_and_flows(tmp_path: Path) -> None:
    tracks = list(make_tracks(_processes()))
    write_timeline(tmp_path / "t.pftrace", tracks, 10 * _S)
    packets = [dict(_fields(packet)) for number, packet in _fields((tmp_path / "t.pftrace").read_bytes())]
    descriptors = [dict(_fields(packet[60])) for packet in packets if 60 in packet]
    uuids = {descriptor[1] for descriptor in descriptors}
    assert len(uuids) == len(descriptors) == 3 + len(tracks)
    assert {descriptor[2].decode() for descriptor in descriptors if 8 in descriptor} == {"bytes", "staleness"}
    open_spans: dict[int, list[bytes]] = {}
    arrows: dict[int, list[int]] = {}
    times: dict[int, int] = {}
    num_spans = 0
    for packet in packets:
        if 11 not in packet:
            continue
        event = dict(_fields(packet[11]))
        assert event[11] in uuids
        assert packet[8] >= times.get(event[11], 0)
        times[event[11]] = packet[8]
        stack = open_spans.setdefault(event[11], [])
        if event[9] == 1:
            stack.append(event[23])
            num_spans += 1
        elif event[9] == 2:
            stack.pop()
        for number in {47, 48} & event.keys():
            arrows.setdefault(event[number], []).append(number)
    assert not any(open_spans.values())
    assert num_spans == sum(len(track.spans) for track in tracks)
    assert [sorted(points) for points in arrows.values()] == [[47, 47, 48]] * 2


def test_files_of_two_machines_can_be_joined(tmp_path: Path) -> None:
    rank, other, server = _processes()
    contents = []
    for number, (processes, offset_ns) in enumerate((([rank, other], 0), ([server], 7))):
        path = tmp_path / f"{number}.pftrace"
        write_timeline(path, list(make_tracks(processes, may_be_joined=True)), 10 * _S, offset_ns)
        contents.append(path.read_bytes())
    packets = [dict(_fields(packet)) for _, packet in _fields(b"".join(contents))]
    arrows: dict[int, list[tuple[int, int]]] = {}
    for packet in packets:
        for number, value in _fields(packet.get(11, b"")):
            if number in (47, 48):
                arrows.setdefault(value, []).append((packet[8], number))
    assert sorted(sorted(points) for points in arrows.values()) == [
        [(13 * _S, 47), (15 * _S - 7, 47), (18 * _S - 1, 48)],
        [(14 * _S, 47), (17 * _S - 7, 47), (26 * _S - 1, 48)],
        [(22 * _S - 7, 47)],
    ]
    descriptors = [dict(_fields(packet[60])) for packet in packets if 60 in packet]
    assert len({descriptor[1] for descriptor in descriptors}) == len(descriptors)
    assert len({packet[10] for packet in packets}) == 2


def test_only_the_steps_of_the_window_are_recorded(tmp_path: Path) -> None:
    window = StepWindow.create(tmp_path, 2)
    buffer = mmap.mmap(-1, BUFFER_BYTES)
    windows = [StepWindow(tmp_path), StepWindow(tmp_path)]
    spans = StepSpans(FlightRecorder(buffer), windows[0], range(1, 3))
    other = StepSpans(FlightRecorder(mmap.mmap(-1, BUFFER_BYTES)), windows[1], range(1, 3))
    assert not window.is_open
    for number in range(4):
        spans.begin_step()
        spans.enter("forward")
        assert window.is_open == (number > 0)
    spans.end_loop()
    assert window.bounds_ns[1] == 0
    for _ in range(4):
        other.begin_step()
    assert window.has_ended
    assert not window.is_open
    events = read_events(buffer[:])
    assert [(event.operation.name, event.sequence) for event in events] == [
        ("step", 1), ("data", 1), ("forward", 1), ("step", 2), ("data", 2), ("forward", 2),
    ]  # fmt: skip
    assert all(event.end_ns > 0 and event.thread == threading.get_ident() for event in events)
    start_ns, end_ns = window.bounds_ns
    assert start_ns <= events[0].start_ns <= events[-1].end_ns <= end_ns
    assert read_events(buffer[:], start_ns, end_ns) == events
    assert read_events(buffer[:], end_ns + 1) == []
    assert read_events(buffer[:], 0, start_ns - 1) == []
    for opened in (window, *windows):
        opened.close()


def test_the_step_in_which_a_loop_ends_does_not_count(tmp_path: Path) -> None:
    with StepWindow.create(tmp_path, 1) as window:
        buffer = mmap.mmap(-1, BUFFER_BYTES)
        spans = StepSpans(FlightRecorder(buffer), window, range(1, 3))
        for _ in range(2):  # two loops over two batches
            for _ in range(2):
                spans.begin_step()
                spans.enter("forward")
            spans.begin_step()
            spans.end_loop()
        steps = [event.sequence for event in read_events(buffer[:]) if event.operation.name == "forward"]
        assert steps == [1, 2]
        assert window.has_ended


def test_profiled_operators_have_their_own_tracks(tmp_path: Path) -> None:
    process = WatchedProcess("rank 0", 5, "", _MAIN)
    file = OperatorFile(tmp_path, process)
    file.write([OperatorSpan("thread 1", "aten::linear", 10, 20), OperatorSpan("thread 1", "aten::addmm", 11, 20)])
    size = num_operator_bytes(tmp_path)
    file.write([OperatorSpan("thread 1", "aten::relu", 15, 30), OperatorSpan("thread 2", "aten::mm", 90, 95)])
    assert num_operator_bytes(tmp_path) > size > 0
    found = file.read(5, 50)
    assert [span.name for span in found] == ["aten::linear", "aten::addmm", "aten::relu"]
    tracks = list(make_tracks([ProcessEvents(process, [], {}, found)]))
    assert [(track.name, [span.name for span in track.spans]) for track in tracks] == [
        ("main thread", []),
        ("thread 1", ["aten::linear", "aten::addmm"]),
        ("thread 1 (2)", ["aten::relu"]),
    ]


@pytest.mark.parametrize("text", ["100", "5:5", "9:5", "a:b", "-1:3", "0:1001", ":", "²:³"])
def test_invalid_steps_are_one_sentence(text: str) -> None:
    with pytest.raises(UsageError, match=f"--timeline-steps {text}: expected the first step"):
        parse_steps(text)
