"""Request the stacks of processes, and read them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from paceline.observe.stuck.processes import STACK_SIGNAL, WatchedProcess, find_state, read_processes
from paceline.observe.stuck.recorder import RecordedEvent, RecordedGroup, read_events, read_groups

_PATIENCE_S: Final = 2.0
_PAUSE_S: Final = 0.02
_THREAD: Final = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+).*\(most recent call first\):$")
_FRAME: Final = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')


class StackFrame(NamedTuple):
    """A function call of a thread."""

    file: str
    line: int
    function: str
    source: str = ""
    """The line of the file, if the process is on another machine."""


class ProcessState(NamedTuple):
    """The stacks and the last operations of a process."""

    process: WatchedProcess
    threads: dict[int, tuple[StackFrame, ...]]
    """By the number of the thread, the innermost call last."""
    problem: str
    """The reason for a missing stack; empty if there is a stack."""
    events: list[RecordedEvent]
    groups: dict[int, RecordedGroup]
    time_ns: int = 0
    """The time of the collection, in nanoseconds since 1970 by the clock of the process's machine."""

    @property
    def main_stack(self) -> tuple[StackFrame, ...]:
        return self.threads.get(self.process.main_thread, ())


def collect(folders: Sequence[Path]) -> list[ProcessState]:
    """Return the state of each living process in the jobs' folders. Takes about two seconds for each folder at most."""
    return [state for folder in folders for state in _collect_folder(folder)]


def _collect_folder(folder: Path) -> list[ProcessState]:
    processes = [process for process in read_processes(folder) if process.is_alive()]
    with contextlib.suppress(FileNotFoundError), open(folder / "lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another command may request the stacks too
        problems = {process.pid: _request_stack(process, folder) for process in processes}
        texts = _read_stacks([process for process in processes if not problems[process.pid]], folder)
        return [_state(process, folder, problems[process.pid], texts.get(process.pid, "")) for process in processes]
    return []  # the job has ended


def _request_stack(process: WatchedProcess, folder: Path) -> str:
    """Send the signal; return the reason if the process cannot write its stack."""
    if find_state(process.pid) in ("T", "t"):
        return "it is stopped (SIGSTOP, or a debugger)"
    if not process.main_thread:
        return "it has not imported torch or paceline.collectives yet"
    if not _handles_signal(process.pid):
        return f"it executes another program, or its script has removed the handler of signal {STACK_SIGNAL:d}"
    try:
        os.truncate(process.path(folder, ".stack"), 0)
        os.kill(process.pid, STACK_SIGNAL)
    except OSError as error:
        return f"the request failed ({error.strerror})"
    return ""


def _handles_signal(pid: int) -> bool:
    """Return whether a process has a handler for the signal, which would otherwise kill it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True
    found = re.search(r"^SigCgt:\s*([0-9a-f]+)", status, re.MULTILINE)
    return found is None or bool(int(found[1], 16) >> (STACK_SIGNAL - 1) & 1)


def _read_stacks(processes: Sequence[WatchedProcess], folder: Path) -> dict[int, str]:
    """Return the text of each process, complete or as far as it was written in time."""
    texts: dict[int, str] = {process.pid: "" for process in processes}
    pending, deadline = list(processes), time.monotonic() + _PATIENCE_S
    while pending and time.monotonic() < deadline:
        time.sleep(_PAUSE_S)
        for process in pending.copy():
            with contextlib.suppress(OSError):
                text = process.path(folder, ".stack").read_text(errors="replace")
                # The text has no end mark. The main thread is usually the last.
                if text == texts[process.pid] and (process.main_thread in parse_stacks(text) or _is_cut(text)):
                    pending.remove(process)
                texts[process.pid] = text
    return texts


def _is_cut(text: str) -> bool:
    """Return whether a text of ``faulthandler`` has only the newest 100 threads, without the main thread."""
    return text.endswith("\n...\n")


def _state(process: WatchedProcess, folder: Path, problem: str, text: str) -> ProcessState:
    threads = parse_stacks(text)
    if not problem and process.main_thread not in threads:
        problem = f"it did not answer within {_PATIENCE_S:g} s (process {process.pid})"
        if _is_cut(text):
            problem = f"it has more than {len(threads)} threads, so Python writes no stack of the main thread"
    events, groups = read_recorder(process, folder)
    return ProcessState(process, threads, problem, events, groups, time.time_ns())


def read_recorder(
    process: WatchedProcess, folder: Path, start_ns: int = 0, end_ns: int = 0
) -> tuple[list[RecordedEvent], dict[int, RecordedGroup]]:
    """Return the last operations and the groups of a process, which may have ended. See :func:`read_events`."""
    events, groups = (_read(process.path(folder, suffix)) for suffix in (".events", ".groups"))
    return read_events(events, start_ns, end_ns), read_groups(groups)


def _read(path: Path) -> bytes:
    """Return the content of a file; nothing if it does not exist, because the job may end at any time."""
    with contextlib.suppress(FileNotFoundError):
        return path.read_bytes()
    return b""


def parse_stacks(text: str) -> dict[int, tuple[StackFrame, ...]]:
    """Return the stacks in a text of ``faulthandler``, by the number of the thread, the innermost call last."""
    threads: dict[int, list[StackFrame]] = {}
    frames: list[StackFrame] = []
    for line in text.splitlines():
        if found := _THREAD.match(line):
            frames = threads[int(found[1], 16)] = []
        elif found := _FRAME.match(line):
            number = 0 if found[2] == "???" else int(found[2])
            frames.insert(0, StackFrame(found[1], number, found[3]))
    return {thread: tuple(frames) for thread, frames in threads.items()}
