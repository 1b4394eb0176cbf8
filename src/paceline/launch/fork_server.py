"""Children that are forked from one process, which has imported and loaded once what they all need.

An interpreter that imports NumPy and Numba and loads the kernels takes a second; a fork of one that has takes
milliseconds. The fork server (:mod:`paceline.launch.warm_parent`) runs nothing else and has one thread. Where a fork is
not safe (no ``os.fork``, macOS, a thread or torch in the fork server), it is not there or refuses, and children are
started afresh. Imports little, so that it can be started first.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    import psutil

CHILD: Final = "paceline.launch.child"
"""What processes of local clusters run."""
_ANSWER_S: Final = 60.0
_LOOK_S: Final = 0.05
_SLICE_S: Final = 0.5
_UNTOLD_S: Final = 2.0  # after the end of a process whose status the fork server, which may be stopped, does not tell
_LOST_STATUS: Final = 255
"""Of a process that ended after the fork server, which alone is told: as ``multiprocessing`` has it."""
_TITLE_BYTES: Final = 4096
_ONE_THREAD: Final = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""Threads do not live through a fork; and what is forked has no use for those of BLAS."""
# glibc then backs its heap with huge pages: random look-ups in a table of 10^7 rows take a tenth less.
MALLOC: Final = {
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=33554432:"
    "glibc.malloc.trim_threshold=268435456"
}

# The current folder is the user's, whose select.py is not the one that is imported; this package may be found by it.
_RUN_MODULE: Final = (
    "import sys; sys.path[:] = [*filter(None, sys.path), {root!r}]; "
    "import runpy; runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command of a process that runs a module of this package, whatever lies in the current folder."""
    root = str(Path(__file__).parents[2])
    return [sys.executable, "-c", _RUN_MODULE.format(root=root), module, *arguments]


class ForkError(Exception):
    """A process cannot be forked, for the reason given: it has to be started afresh."""


class Forked:
    """A process that the fork server has forked; it has what ``subprocess.Popen`` has for own children."""

    stdin: IO[bytes] | None = None
    stdout: IO[bytes] | None = None

    def __init__(self, pid: int, statuses: int) -> None:
        self.pid = pid
        self._identity = _identity(pid)
        self._statuses = statuses  # a pipe, by which the fork server tells the status
        self._status: int | None = None
        self._is_orphan = False
        self._ended_s: float | None = None
        self._lock = threading.Lock()
        weakref.finalize(self, os.close, statuses)

    def poll(self) -> int | None:
        """Return the status, negative for a signal; None while it lives."""
        return self._look(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Return the status when it has ended. Raises ``subprocess.TimeoutExpired``."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            status = self._look(None if deadline is None else max(deadline - time.monotonic(), 0.0))
            if status is not None:
                return status
            if deadline is not None and time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            if self._is_orphan:
                time.sleep(_LOOK_S)

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None and _is_running(self._identity):  # or another process may have its number by now
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def _look(self, timeout_s: float | None) -> int | None:
        """Return the status if it is known within so many seconds, or earlier if the fork server is gone."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        poller = select.poll()
        poller.register(self._statuses, select.POLLIN)
        while self._status is None and not self._is_orphan:
            left_s = _SLICE_S if deadline is None else max(min(deadline - time.monotonic(), _SLICE_S), 0.0)
            if poller.poll(1000.0 * left_s):
                break
            if self._has_ended_untold():
                return _LOST_STATUS
            if deadline is not None and time.monotonic() >= deadline:
                return None
        with self._lock:
            if self._status is None and not self._is_orphan:
                told = os.read(self._statuses, 16)
                self._status = int(told) if told else None
                self._is_orphan = not told
            if self._is_orphan and not _is_running(self._identity):
                self._status = _LOST_STATUS
        return self._status

    def _has_ended_untold(self) -> bool:
        """Return whether it has ended, and too long ago for the fork server to tell how."""
        if _is_running(self._identity):
            return False
        now_s = time.monotonic()
        self._ended_s = now_s if self._ended_s is None else self._ended_s
        return now_s - self._ended_s >= _UNTOLD_S


class Killable(Protocol):
    """A process that can be ended; ``subprocess.Popen`` is one."""

    def kill(self) -> None:
        """End it."""

    def wait(self) -> int:
        """Return its status when it has ended."""


class ForkServer:
    """A process that forks others, which run the `main` of one module. Use it as a context manager, or close it.

    What it has forked does not end with it, but by its own parent's watch; its status is then not known.
    """

    def __init__(self, line: socket.socket | None, process: Killable | None = None) -> None:
        """Make one of the socket at whose other end a warm parent serves, in `process` if that ends with it.

        Without a socket, nothing can be forked.
        """
        self._lock = threading.Lock()
        self._line = line
        self._process = process

    @classmethod
    def start(cls, module: str = CHILD) -> ForkServer:
        """Start it, where processes can be forked; it begins at once to load what the `prepare` of `module` does."""
        if not hasattr(os, "fork") or sys.platform in ("darwin", "win32", "emscripten", "wasi"):
            return cls(None)
        ours, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as closing:
            line = fcntl.fcntl(theirs.fileno(), fcntl.F_DUPFD, 3)  # below are standard streams, closed here or not
            closing.callback(os.close, line)
            command = module_command("paceline.launch.warm_parent", str(line), module)
            process = subprocess.Popen(
                [*command, " " * _TITLE_BYTES],  # room for what its forks are to be called
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**MALLOC, **os.environ, **_ONE_THREAD},
                pass_fds=[line],
                start_new_session=True,
            )
        return cls(ours, process)

    def fork(self, arguments: Sequence[str], *, environment: Mapping[str, str], captured: bool) -> Forked:
        """Fork a process with these arguments, in a session of its own; its standard input is a pipe.

        So is standard output if it is `captured`, else that goes nowhere. Raises ForkError.
        """
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
            stdin, own_stdin = _pipe(theirs, ours, ours_writes=True)
            if captured:
                stdout, own_stdout = _pipe(theirs, ours, ours_writes=False)
            else:
                stdout = os.open(os.devnull, os.O_WRONLY)
                theirs.callback(os.close, stdout)
            streams = (stdin, stdout, _standard_error(theirs))
            process = self.fork_onto(arguments, environment=environment, streams=streams)
            ours.pop_all()
        process.stdin = os.fdopen(own_stdin, "wb")
        process.stdout = os.fdopen(own_stdout, "rb") if captured else None
        return process

    def fork_onto(
        self,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str],
        streams: tuple[int, int, int],
        folder: str | None = None,
    ) -> Forked:
        """Fork a process with these standard streams, in `folder`, or the current one. Raises ForkError."""
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
            statuses, own_statuses = _pipe(theirs, ours, ours_writes=False)
            asked = {"arguments": list(arguments), "environment": dict(environment), "folder": folder or _folder()}
            pid = self._ask(asked, [*streams, statuses])
            ours.pop_all()
        return Forked(pid, own_statuses)

    def close(self) -> None:
        """End it. Idempotent."""
        with self._lock:
            if self._line is not None:
                self._line.close()
                self._line = None
            if self._process is not None:
                self._process.kill()  # it may be loading still
                self._process.wait()
                self._process = None

    def __enter__(self) -> ForkServer:
        """Return itself; it ends with the block."""
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _ask(self, asked: dict[str, Any], descriptors: list[int]) -> int:
        with self._lock:
            if self._line is None:
                raise ForkError("this system does not fork processes safely")
            self._line.settimeout(_ANSWER_S)
            text = json.dumps(asked).encode()
            try:
                socket.send_fds(self._line, [struct.pack("<I", len(text))], descriptors)
                self._line.sendall(text)
                answer = self._line.recv(4096)
            except BaseException as error:
                self._line.close()  # an answer that is late would be taken for the next one's
                self._line = None
                if self._process is not None:
                    self._process.kill()  # or it would fork the process later, beside the one that is started afresh
                if not isinstance(error, OSError):
                    raise
                raise ForkError(f"the fork server does not answer: {error}") from None
        found = json.loads(answer) if answer else {"refused": "the fork server is gone"}
        if "refused" in found:
            raise ForkError(found["refused"])
        return int(found["pid"])


def _pipe(theirs: contextlib.ExitStack, ours: contextlib.ExitStack, *, ours_writes: bool) -> tuple[int, int]:
    """Return their end and ours of a new pipe."""
    reading, writing = os.pipe()
    their_end, our_end = (reading, writing) if ours_writes else (writing, reading)
    theirs.callback(os.close, their_end)
    ours.callback(os.close, our_end)
    return their_end, our_end


def _standard_error(closing: contextlib.ExitStack) -> int:
    try:
        os.fstat(2)
    except OSError:  # as of a daemon
        number = os.open(os.devnull, os.O_WRONLY)
        closing.callback(os.close, number)
        return number
    return 2


def _folder() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return None


def _identity(pid: int) -> psutil.Process | None:
    """Return what tells a process from a later one with its number; None if it has ended."""
    import psutil

    try:
        return psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None


def _is_running(process: psutil.Process | None) -> bool:
    import psutil

    try:
        return process is not None and process.is_running() and bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
