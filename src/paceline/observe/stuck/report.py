"""Print the stacks of a job's processes, grouped by equal stacks, with the operation of each process."""

from __future__ import annotations

import contextlib
import fcntl
import linecache
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from paceline.environment import environment
from paceline.errors import PacelineError, printable
from paceline.observe.stuck.recorder import COLLECTIVE, MESSAGE, REQUEST, RecordedEvent, RecordedGroup
from paceline.observe.stuck.stacks import ProcessState, StackFrame, collect

_LIBRARIES: Final = tuple(sysconfig.get_path(name) + os.sep for name in ("platlib", "purelib", "stdlib", "scripts"))
_OWN: Final = str(Path(__file__).parents[2]) + os.sep
_INSTALLED: Final = (_OWN, *_LIBRARIES, "<")
_ONCE_IN_S: Final = 60.0
_MOST_FRAMES: Final = 4
"""Calls inside libraries that are shown after the last call of the script."""
_OMITTED: Final = StackFrame("", 0, "...")
"""The maximum length of the name of a file."""


def format_stacks(states: Sequence[ProcessState], *, is_full: bool = False) -> str:
    """Return the stacks of the main threads, one for each group of processes with equal stacks.

    Calls inside libraries are shortened. With `is_full`, all calls of all threads are shown for each process.
    """
    if is_full:
        return "\n".join(line for state in states for line in _format_process(state))
    groups: dict[tuple[str, str, tuple[StackFrame, ...]], list[ProcessState]] = {}
    for state in states:
        role = state.process.name.partition(" ")[0]
        groups.setdefault((role, state.problem, _shorten(state)), []).append(state)
    # The ranks come first, and the largest group of ranks before the ranks that differ.
    order = sorted(groups.items(), key=lambda item: (item[0][0] != "rank", item[0][0], -len(item[1])))
    lines: list[str] = []
    for (_, problem, frames), members in order:
        lines += ["", name_processes(members), *_describe_operations(members)]
        lines += [f"  no stack: {problem}"] if problem else [f"  {format_call(frame)}" for frame in frames]
    return "\n".join(lines[1:])


def name_processes(states: Sequence[ProcessState]) -> str:
    """Return the names of processes of one role, such as ``ranks 0-2, 5``."""
    names = [state.process.name for state in states]
    role = names[0].partition(" ")[0]
    numbers = sorted(int(name.rpartition(" ")[2]) for name in names if name.rpartition(" ")[2].isdigit())
    if len(numbers) < len(names) or len(names) == 1:
        return ", ".join(names)
    runs: list[list[int]] = []
    for value in numbers:
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    return f"{role}s " + ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


class _Activity(NamedTuple):
    """The operation of a process: a description, and the seconds since its start or end."""

    text: str
    seconds: float
    is_running: bool


def _describe_operations(states: Sequence[ProcessState]) -> list[str]:
    found: dict[tuple[str, bool], list[tuple[ProcessState, float]]] = {}
    for state in states:
        activity = _activity(state)
        if activity is not None:
            found.setdefault((activity.text, activity.is_running), []).append((state, activity.seconds))
    lines = []
    for (text, is_running), members in found.items():
        names = f"{name_processes([state for state, _ in members])}: " if len(found) > 1 else ""
        seconds = max(seconds for _, seconds in members)
        lines.append(
            f"  {names}in {text}, for {seconds:.1f} s"
            if is_running
            else f"  {names}in no operation; the last was {text}, {seconds:.1f} s ago"
        )
    return lines


def _activity(state: ProcessState) -> _Activity | None:
    """Return the operation that runs longest, or else the last operation; None without operations."""
    time_ns = state.time_ns or time.time_ns()
    running = [event for event in state.events if event.end_ns == 0]
    if running:
        event = running[0]
        more = f" (and {len(running) - 1} more)" if len(running) > 1 else ""
        return _Activity(describe(event, state.groups) + more, (time_ns - event.start_ns) / 1e9, True)
    if not state.events:
        return None
    last = max(state.events, key=lambda event: abs(event.end_ns))
    failed = ", which failed" if last.end_ns < 0 else ""
    return _Activity(describe(last, state.groups) + failed, (time_ns - abs(last.end_ns)) / 1e9, False)


def describe(event: RecordedEvent, groups: dict[int, RecordedGroup]) -> str:
    """Return an operation with its array and its number."""
    operation = event.operation
    if operation.kind == REQUEST:
        keys = f" of {event.count:,} keys" if event.count >= 0 else ""
        table = f" of table {operation.subject!r}" if operation.subject else ""
        place = f" at server {operation.peer}, request {event.sequence}"
        return f"{operation.name}{keys}{table}{place}" + (f", iteration {event.clock}" if event.clock >= 0 else "")
    parts = [f"{operation.subject}{list(operation.shape)}"] if operation.subject else []
    parts += [operation.reduction] if operation.reduction else []
    parts += [f"root={operation.peer}"] if operation.peer >= 0 and operation.kind == COLLECTIVE else []
    found = groups.get(operation.group)
    group = "" if found is None else f" of group {found.name!r}"
    text = f"{operation.name}({', '.join(parts)})"
    if operation.kind == MESSAGE:
        peer = "any rank" if operation.peer < 0 else f"rank {operation.peer}"
        return f"{text} {'to' if operation.name == 'send' else 'from'} {peer}, message {event.sequence}{group}"
    return f"{text}, call {event.sequence}{group}"


def _shorten(state: ProcessState) -> tuple[StackFrame, ...]:
    """Return the calls that distinguish processes: the calls of the script, and outer and inner calls of libraries."""
    frames = state.main_stack
    own = [number for number, frame in enumerate(frames) if not _is_library(frame)]
    if not own:
        return frames[-_MOST_FRAMES:]
    shown: list[StackFrame] = []
    run: list[StackFrame] = []
    for frame in frames[own[0] : own[-1] + 1]:
        if _is_library(frame):
            run.append(frame)
        else:
            shown += [*(run if len(run) < 3 else [run[0], _OMITTED, run[-1]]), frame]
            run = []
    inner = frames[own[-1] + 1 :]
    # A running operation shows where the process waits, and calls inside libraries may differ between processes.
    if not any(event.end_ns == 0 for event in state.events):
        shown += inner if len(inner) <= _MOST_FRAMES else [inner[0], _OMITTED, *inner[-2:]]
    return tuple(shown)


def _is_library(frame: StackFrame) -> bool:
    return frame.file.startswith(_INSTALLED) or f"{os.sep}site-packages{os.sep}" in frame.file


def format_call(frame: StackFrame) -> str:
    """Return the place of a call, with the line of a script."""
    if frame is _OMITTED:
        return "..."
    source, place = "", frame.file.rpartition(f"site-packages{os.sep}")[2]
    if _is_library(frame):
        folders = (str(Path(__file__).parents[3]) + os.sep, *_LIBRARIES)
        place = place.removeprefix(next((folder for folder in folders if place.startswith(folder)), ""))
    else:
        source = frame.source or linecache.getline(frame.file, frame.line).strip()
        with contextlib.suppress(ValueError, OSError):
            place = str(Path(place).relative_to(Path.cwd()))
    return f"{place}, line {frame.line}, in {frame.function}" + (f": {source}" if source else "")


def without_files(state: ProcessState) -> ProcessState:
    """Return a state for display on another machine: with lines of source code, and only with the displayed events."""
    threads = {
        thread: tuple(
            frame if _is_library(frame) else frame._replace(source=linecache.getline(frame.file, frame.line).strip())
            for frame in frames
        )
        for thread, frames in state.threads.items()
    }
    last = max(state.events, key=lambda event: abs(event.end_ns), default=None)
    events = [event for event in state.events if event.end_ns == 0 or event is last]
    numbers = {event.operation.group for event in events}
    groups = {number: group for number, group in state.groups.items() if number in numbers}
    return state._replace(threads=threads, events=events, groups=groups)


def _format_process(state: ProcessState) -> list[str]:
    lines = [f"{state.process.name} (process {state.process.pid})", *_describe_operations([state])]
    if state.problem:
        return [*lines, f"  no stack: {state.problem}", ""]
    for thread, frames in sorted(state.threads.items(), key=lambda item: item[0] != state.process.main_thread):
        lines.append("  main thread" if thread == state.process.main_thread else f"  thread {thread:#x}")
        lines += [f"    {format_call(frame)}" for frame in frames]
    return [*lines, ""]


def script_calls() -> tuple[StackFrame, ...]:
    """Return the calls of the script in this process's main thread, the innermost last.

    If all calls are inside libraries, return the last one.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    calls: list[StackFrame] = []
    while frame is not None:
        calls.insert(0, StackFrame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    found = [call for call in calls if not _is_library(call)] or calls[-1:]
    # A name of a file that is not UTF-8 could not be sent to other processes.
    return tuple(call._replace(file=printable(call.file)) for call in found)


def print_stall(reason: str, folder: Path | None = None) -> None:
    """Print the stacks of a job's processes on this machine to standard error, at most once a minute in a job.

    `folder` is the job's folder; by default, it is the folder of this process's job. Without a launcher of Paceline,
    this function does nothing.
    """
    with contextlib.suppress(OSError, ValueError, PacelineError):
        folder = environment().job_dir if folder is None else folder
        if folder is None or not folder.is_dir() or not _is_due(folder):
            return
        text = format_stacks(collect([folder]))
        sys.stderr.write(f"{reason}. The processes on this machine:\n{text}\n")
        sys.stderr.flush()


def print_stall_soon(reason: str) -> None:
    """Call :func:`print_stall` in a thread. The process does not exit before the thread has ended."""
    threading.Thread(target=print_stall, args=(reason,), name="paceline-stall").start()


def _is_due(folder: Path) -> bool:
    """Return whether no process of the job has printed stacks in the last minute. If so, record the current time."""
    with open(folder / "printed", "a+") as printed:
        fcntl.flock(printed, fcntl.LOCK_EX)
        printed.seek(0)
        last = printed.read()
        if last and time.monotonic() - float(last) < _ONCE_IN_S:
            return False
        printed.truncate(0)
        printed.write(str(time.monotonic()))
        return True
