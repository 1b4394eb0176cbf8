"""The files of a job's processes: each process writes its stack when it receives a signal, and its last operations.

The launcher creates a folder, and passes it to the processes in the variable ``PACELINE_JOB_DIR``. A process writes its
stack in a signal handler of ``faulthandler``, in C. So it also writes the stack while it executes C code or waits for
the interpreter's lock.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import mmap
import os
import resource
import signal
import threading
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from paceline.decoded_types import register_type
from paceline.environment import environment
from paceline.errors import PacelineError
from paceline.observe.stuck.recorder import BUFFER_BYTES, TIMELINE_BYTES, FlightRecorder
from paceline.output_files import replacing

STACK_SIGNAL: Final = signal.SIGRTMIN + 11 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2
"""A real-time signal, because scripts use SIGUSR1 and SIGUSR2."""
_HIGHEST: Final = 1024
ABOUT: Final = "job.json"
"""The file in a job's folder that describes the job."""


class WatchedProcess(Struct, frozen=True):
    """A process that can write its stack."""

    name: str
    """Such as ``rank 3``, ``server 0`` or ``scheduler``."""
    pid: int
    start: str
    """The time of the process's start, because another process may have its id later; empty if unknown."""
    main_thread: int = 0
    """Python's number of the main thread; 0 if the process does not write its stack."""

    def path(self, folder: Path, suffix: str) -> Path:
        """Return the path of one of this process's files."""
        return folder / f"{self.name.replace(' ', '-')}.{self.pid}{suffix}"

    @property
    def rank(self) -> int | None:
        """The process's rank; None if it is not a rank."""
        role, _, number = self.name.partition(" ")
        return int(number) if role == "rank" and number.isdigit() else None

    def is_alive(self) -> bool:
        """Return whether the process still exists."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        return find_start(self.pid) == self.start and find_state(self.pid) != "Z"


def find_start(pid: int) -> str:
    """Return the time of a process's start in the system's unit; empty if the system does not have ``/proc``."""
    return _fields(pid)[19]


def find_state(pid: int) -> str:
    """Return the letter of a process's state, such as T for a stopped process; empty if it is unknown."""
    return _fields(pid)[0]


def _fields(pid: int) -> list[str]:
    """Return the fields of ``/proc/PID/stat`` after the name."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return [""] * 20


class _Own:
    """The recorder of this process."""

    def __init__(self) -> None:
        self.recorder: FlightRecorder | None = None
        self.files: list[int] = []
        self.lock = threading.Lock()


_own = _Own()


def flight_recorder() -> FlightRecorder:
    """Return the recorder of this process; the first call creates it, in the job's folder if there is one."""
    if _own.recorder is None:
        watch_rank()
        with _own.lock:
            if _own.recorder is None:
                _own.recorder = FlightRecorder(mmap.mmap(-1, BUFFER_BYTES))
    return _own.recorder


def watch_rank() -> None:
    """Let a rank of a launcher write its files. No effect in other processes, such as children of a rank."""
    try:
        variables = environment()
    except PacelineError:
        return  # the program gets the error from its own call
    folder, name = variables.job_dir, f"rank {variables.rank}"
    if folder is None or variables.rank is None or _own.recorder is not None:
        return
    found = (process for process in read_processes(folder) if process.name == name and process.main_thread)
    if not any(process.is_alive() for process in found):
        watch(name, folder)


def watch(name: str, folder: Path) -> None:
    """Let this process write its stack and its later operations to files in `folder`.

    If the files cannot be written, the process works without them.
    """
    with _own.lock:
        process = WatchedProcess(name, os.getpid(), find_start(os.getpid()), threading.main_thread().ident or 0)
        num_bytes = BUFFER_BYTES if environment().timeline_steps is None else TIMELINE_BYTES
        with contextlib.suppress(OSError), contextlib.ExitStack() as undo:
            stack, groups, events = (_open(process.path(folder, end), undo) for end in (".stack", ".groups", ".events"))
            if os.write(events, bytes(num_bytes)) < num_bytes:
                return  # a mapped file without space on the disk would kill this process
            buffer = mmap.mmap(events, num_bytes)
            write_process(folder, process)
            undo.pop_all()
            _own.recorder, _own.files = FlightRecorder(buffer, groups), [stack, groups, events]
            if getattr(signal, "SIGUSR2", None) != STACK_SIGNAL or signal.getsignal(STACK_SIGNAL) == signal.SIG_DFL:
                faulthandler.register(STACK_SIGNAL, file=stack, all_threads=True)


def unwatch() -> None:
    """Close the files of :func:`watch`, because the job ends before this process."""
    with _own.lock:
        files, _own.files = _own.files, []
        if files:
            faulthandler.register(STACK_SIGNAL, file=2, all_threads=True)  # a late signal must not kill the process
            _own.recorder = FlightRecorder(mmap.mmap(-1, BUFFER_BYTES))
        for descriptor in files:
            os.close(descriptor)


def _open(path: Path, undo: contextlib.ExitStack) -> int:
    """Open a file with a high descriptor.

    If the script closes all descriptors, its next files get the lowest ones, and must not receive stacks.
    """
    opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = _HIGHEST if most == resource.RLIM_INFINITY else min(most, _HIGHEST)
        descriptor = fcntl.fcntl(opened, fcntl.F_DUPFD_CLOEXEC, most - most // 8)
    finally:
        os.close(opened)
    undo.callback(os.close, descriptor)
    return descriptor


def read_processes(folder: Path) -> list[WatchedProcess]:
    """Return the processes in a job's folder, including those that have ended, in the order of their names."""
    found = []
    for path in folder.glob("*.json"):
        with contextlib.suppress(OSError, msgspec.DecodeError):
            if path.name != ABOUT:
                found.append(msgspec.json.decode(path.read_bytes(), type=register_type(WatchedProcess)))
    return sorted(found, key=lambda process: (process.name.split()[0], process.rank or 0, process.name))


def write_process(folder: Path, process: WatchedProcess, *, keeps_existing: bool = False) -> None:
    """Add a process to a job's folder. With `keeps_existing`, do not replace its own description."""
    path, content = process.path(folder, ".json"), msgspec.json.encode(process)
    if keeps_existing:
        temporary = path.with_suffix(".added")
        temporary.write_bytes(content)
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
        temporary.unlink()
    else:
        with replacing(path) as aside:
            aside.write_bytes(content)


def _forget() -> None:
    """Use a new recorder without files in a forked child."""
    _own.recorder, _own.files, _own.lock = None, [], threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
