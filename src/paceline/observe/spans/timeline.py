"""Merge the operations of all processes of a job into one timeline."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from typing_extensions import override

from paceline.closing import Closing
from paceline.observe.spans.files import (
    JOINABLE,
    FlowPoint,
    SpanTrack,
    TimelineCounter,
    TimelineSpan,
    number_of,
    write_timeline,
)
from paceline.observe.spans.operators import OperatorFile, OperatorSpan, num_operator_bytes
from paceline.observe.spans.window import StepWindow
from paceline.observe.stuck.jobs import LaunchedJob
from paceline.observe.stuck.processes import WatchedProcess, read_processes
from paceline.observe.stuck.recorder import (
    COLLECTIVE,
    FRAME,
    MESSAGE,
    PHASE,
    REQUEST,
    RecordedEvent,
    RecordedGroup,
    item_bytes,
)
from paceline.observe.stuck.report import describe
from paceline.observe.stuck.stacks import read_recorder
from paceline.output_files import check_output

_POLL_S: Final = 0.5
_PUSHES: Final = ("push", "push_pull")
_READS: Final = ("pull", "push_pull")


class ProcessEvents(NamedTuple):
    """The operations of a process during the timeline."""

    process: WatchedProcess
    events: list[RecordedEvent]
    groups: dict[int, RecordedGroup]
    operators: Sequence[OperatorSpan] = ()


class TimelineTask(Closing):
    """Waits in a thread until all ranks have finished the steps, and then writes the timeline."""

    def __init__(self, folder: Path, path: Path, steps: range, num_ranks: int, report: Callable[[str], None]) -> None:
        """See :meth:`start`."""
        self._folder, self._path, self._steps, self._report = folder, path, steps, report
        self._window = StepWindow.create(folder, num_ranks)
        self._closed = threading.Event()
        self._num_written = -1
        """The bytes of profiled operators at the last writing; -1 before."""
        self._thread = threading.Thread(target=self._run, name="paceline-timeline", daemon=True)

    @classmethod
    def start(
        cls, job: LaunchedJob, path: Path, steps: range, num_ranks: int, report: Callable[[str], None]
    ) -> TimelineTask:
        """Start the thread, and let the later processes of the job record the steps.

        `report` receives a sentence when the timeline is written. Raises UsageError if `path` cannot be written.
        """
        check_output("--timeline", path)
        task = cls(job.folder, path, steps, num_ranks, report)
        job.variables["PACELINE_TIMELINE_STEPS"] = f"{steps.start}:{steps.stop}"
        task._thread.start()
        return task

    def finish(self) -> None:
        """Write the timeline of a run that has ended, unless the file has everything already."""
        self._closed.set()
        self._thread.join()
        if self._num_written != num_operator_bytes(self._folder):  # a profile of the script may end after the steps
            self._write()

    @override
    def close(self) -> None:
        """Stop waiting."""
        self._closed.set()
        self._thread.join()
        self._window.close()

    def _run(self) -> None:
        while not self._closed.wait(_POLL_S):
            if self._window.has_ended:
                self._write()
                return

    def _write(self) -> None:
        self._num_written = num_operator_bytes(self._folder)
        start_ns, end_ns = self._window.bounds_ns
        steps = f"steps {self._steps.start} to {self._steps.stop - 1}"
        if not start_ns:
            steps = f"the last operations, because the training loop did not reach step {self._steps.start}"
        try:
            processes = read_events_of(self._folder, start_ns, end_ns)
            start_ns = start_ns or min((event.start_ns for found in processes for event in found.events), default=0)
            tracks = list(make_tracks(processes, may_be_joined=self._path.suffix == JOINABLE))
            write_timeline(self._path, tracks, start_ns, self._window.offset_ns)
        except OSError as error:
            self._report(f"cannot write the timeline {self._path}: {error.strerror}")
        else:
            self._report(f"{self._path} has the timeline of {steps}. Open it at https://ui.perfetto.dev")


def read_events_of(folder: Path, start_ns: int, end_ns: int) -> list[ProcessEvents]:
    """Return the operations of all processes of a job in this time; 0: without a limit."""
    return [
        ProcessEvents(
            process,
            *read_recorder(process, folder, start_ns, end_ns),
            OperatorFile(folder, process).read(start_ns, end_ns),
        )
        for process in read_processes(folder)
        if process.main_thread
    ]


def make_tracks(processes: Sequence[ProcessEvents], *, may_be_joined: bool = False) -> Iterator[SpanTrack]:
    """Yield the tracks of all processes: one for each thread, for requests to each server, and for each counter.

    With `may_be_joined`, flows may begin or end in the files of other machines.
    """
    until_ns = max((max(event.start_ns, abs(event.end_ns)) for found in processes for event in found.events), default=0)
    flows = _flows(processes, may_be_joined=may_be_joined)
    for number, found in enumerate(processes):
        name, pid = found.process.name, found.process.pid
        tracks: dict[tuple[str, int], list[RecordedEvent]] = {}
        for event in found.events:
            operation = event.operation
            is_async = operation.kind in (REQUEST, MESSAGE)
            place = (f"requests to server {operation.peer}", 0) if operation.kind == REQUEST else ("messages", 0)
            tracks.setdefault(place if is_async else ("", event.thread), []).append(event)
        titles: set[str] = set()
        for (title, thread), events in sorted(tracks.items()):
            is_main = thread == found.process.main_thread
            title = title or ("main thread" if is_main else _name_thread(events, found.groups))
            title += f", thread {thread:#x}" if title in titles else ""  # several threads may use one group
            titles.add(title)
            yield from _tracks(number, found, title, [_span(event, found, until_ns, flows) for event in events])
        if not tracks:
            yield SpanTrack(number, name, "main thread", pid=pid)
        yield from _operator_tracks(number, found)
        yield from _counters(number, found)


def _name_thread(events: Sequence[RecordedEvent], groups: dict[int, RecordedGroup]) -> str:
    collective = next((event for event in events if event.operation.kind == COLLECTIVE), None)
    group = None if collective is None else groups.get(collective.operation.group)
    return f"thread {events[0].thread:#x}" if group is None else f"thread of group {group.name}"


def _span(
    event: RecordedEvent, found: ProcessEvents, until_ns: int, flows: dict[tuple[str, int, int, int], int]
) -> TimelineSpan:
    operation = event.operation
    end_ns = abs(event.end_ns) or until_ns
    name = f"step {event.sequence}" if operation.kind == PHASE and operation.name == "step" else operation.name
    details = name if operation.kind in (PHASE, FRAME) else describe(event, found.groups)
    points: list[FlowPoint] = []
    flow = flows.get(_flow_key(found.process, event))
    if flow is not None and operation.kind == REQUEST:
        points = [FlowPoint(flow, "start", event.start_ns), FlowPoint(flow, "end", end_ns)]
    elif flow is not None:
        points = [FlowPoint(flow, "step", event.start_ns)]
    return TimelineSpan(name, event.start_ns, max(end_ns, event.start_ns + 1), details, tuple(points))


def _flow_key(process: WatchedProcess, event: RecordedEvent) -> tuple[str, int, int, int]:
    """Return the request's name, rank, server and number; equal for the request and its frame at the server."""
    number = process.name.rpartition(" ")[2]
    own = int(number) if number.isdigit() else -1
    rank, server = (own, event.operation.peer) if event.operation.kind == REQUEST else (event.operation.peer, own)
    return event.operation.name, rank, server, event.sequence


def _flows(processes: Sequence[ProcessEvents], *, may_be_joined: bool) -> dict[tuple[str, int, int, int], int]:
    """Return the numbers of the flows: pushes that have been acknowledged, and whose frame was recorded."""
    keys: dict[str, set[tuple[str, int, int, int]]] = {REQUEST: set(), FRAME: set()}
    for found in processes:
        for event in found.events:
            kind = event.operation.kind
            if kind in keys and event.operation.name in _PUSHES and event.end_ns > 0:
                keys[kind].add(_flow_key(found.process, event))
    chosen = keys[REQUEST] | keys[FRAME] if may_be_joined else keys[REQUEST] & keys[FRAME]
    return {key: number_of(repr(key)) for key in chosen}


def _tracks(number: int, found: ProcessEvents, title: str, spans: Sequence[TimelineSpan]) -> Iterator[SpanTrack]:
    """Yield as many tracks as are needed for spans that overlap without being nested."""
    for lane, part in enumerate(_lanes(spans)):
        name = f"{title} ({lane + 1})" if lane else title
        yield SpanTrack(number, found.process.name, name, part, pid=found.process.pid)


def _lanes(spans: Sequence[TimelineSpan]) -> list[list[TimelineSpan]]:
    """Divide spans into lanes. Any two spans of a lane are nested or do not overlap."""
    lanes: list[list[TimelineSpan]] = []
    stacks: list[list[TimelineSpan]] = []
    for span in sorted(spans, key=lambda span: (span.start_ns, -span.end_ns)):
        lane = next((lane for lane, stack in enumerate(stacks) if _has_room(stack, span)), len(lanes))
        if lane == len(lanes):
            lanes.append([])
            stacks.append([])
        lanes[lane].append(span)
        stacks[lane].append(span)
    return lanes


def _has_room(stack: list[TimelineSpan], span: TimelineSpan) -> bool:
    """Remove the spans that end before `span`; return whether the last remaining span contains it."""
    while stack and stack[-1].end_ns <= span.start_ns:
        stack.pop()
    return not stack or stack[-1].end_ns >= span.end_ns


def _operator_tracks(number: int, found: ProcessEvents) -> Iterator[SpanTrack]:
    """Yield a track for the profiled operators of each thread and device."""
    tracks: dict[str, list[TimelineSpan]] = {}
    for operator in found.operators:
        span = TimelineSpan(operator.name, operator.start_ns, max(operator.end_ns, operator.start_ns + 1), "")
        tracks.setdefault(operator.track, []).append(span)
    for title, operators in sorted(tracks.items()):
        yield from _tracks(number, found, title, operators)


def _counters(number: int, found: ProcessEvents) -> Iterator[SpanTrack]:
    """Yield the bytes of a rank's collectives or of a server's frames, and the staleness of the server's pushes."""
    num_bytes, name, pid = 0, found.process.name, found.process.pid
    values: list[TimelineCounter] = []
    for event in found.events:
        operation = event.operation
        if operation.kind == COLLECTIVE and operation.shape:
            num_bytes += math.prod(operation.shape) * item_bytes(operation.subject)
        elif operation.kind == FRAME:
            num_bytes += event.count
        else:
            continue
        values.append(TimelineCounter(abs(event.end_ns) or event.start_ns, num_bytes))
    if values:
        yield SpanTrack(number, name, "bytes", counters=sorted(values), pid=pid)
    staleness = list(_staleness(found.events))
    if staleness:
        yield SpanTrack(number, name, "staleness", counters=staleness, pid=pid)


def _staleness(events: Sequence[RecordedEvent]) -> Iterator[TimelineCounter]:
    """Yield for each push to a server the number of other ranks' pushes to the table since the rank's last pull."""
    since: dict[tuple[str, int], int] = {}
    for event in events:
        operation = event.operation
        if operation.kind != FRAME or operation.peer < 0:
            continue
        key = (operation.subject, operation.peer)
        if operation.name in _PUSHES:
            if key in since:
                yield TimelineCounter(event.start_ns, since[key])
            for other in since:
                since[other] += other[0] == operation.subject and other != key
        if operation.name in _READS:
            since[key] = 0
