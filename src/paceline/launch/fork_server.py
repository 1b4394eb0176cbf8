"""Fork children from a process that has already imported and loaded everything they need.

A new interpreter needs a second to import NumPy and Numba and to load the kernels. A fork of a process that has already
loaded them takes milliseconds. The fork server (:mod:`paceline.launch.warm_parent`) has one thread and no other task.
Some systems cannot fork (Windows) or fork unsafely (macOS). A fork is also unsafe if the fork server has several
threads or has imported torch. In all these cases children are started as new interpreters. This module imports little,
so that the fork server starts early.
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
_ANSWER_S: Final = 60.0
_POLL_S: Final = 0.05
_SLICE_S: Final = 0.5
_UNREPORTED_S: Final = 2.0  # the longest wait for an ended child's status: a stopped fork server never reports it
_LOST_STATUS: Final = 255
"""Status of a process whose fork server ended before it. The real status is unknown (as in ``multiprocessing``)."""
_TITLE_BYTES: Final = 4096
THREAD_VARIABLES: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_ONE_THREAD: Final = dict.fromkeys(THREAD_VARIABLES, "1")
"""Variables for the fork server: a fork has no BLAS threads, and the children do not need them."""
# glibc uses huge pages for its heap. Random lookups in a table of 10^7 rows then take a tenth less time.
MALLOC: Final = {
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=33554432:"
    "glibc.malloc.trim_threshold=268435456"
}

# Remove the current folder ('') from sys.path, because a user's select.py there would hide Python's. Then add this
# package's folder, which may be the current folder.
_RUN_MODULE: Final = (
    "import sys; sys.path[:] = [*filter(None, sys.path), {root!r}]; "
    "import runpy; runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of this package, independent of modules in the current folder."""
    root = str(Path(__file__).parents[2])
    return [sys.executable, "-c", _RUN_MODULE.format(root=root), module, *arguments]


class ForkError(Exception):
    """A process cannot be forked, for the given reason. Spawn it instead."""


class Forked:
    """A process forked by the fork server, with the interface of ``subprocess.Popen``."""

    stdin: IO[bytes] | None = None
    stdout: IO[bytes] | None = None

    def __init__(self, pid: int, statuses: int) -> None:
        self.pid = pid
        self._identity = _identity(pid)
        self._statuses = statuses  # a pipe on which the fork server reports the status
        self._status: int | None = None
        self._is_orphan = False
        self._ended_s: float | None = None
        self._lock = threading.Lock()
        weakref.finalize(self, os.close, statuses)

    def poll(self) -> int | None:
        return self._poll_status(0.0)

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            status = self._poll_status(None if deadline is None else max(deadline - time.monotonic(), 0.0))
            if status is not None:
                return status
            if deadline is not None and time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            if self._is_orphan:
                time.sleep(_POLL_S)

    def send_signal(self, number: int) -> None:
        if self.poll() is None and _is_running(self._identity):  # otherwise another process may have this pid by now
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def _poll_status(self, timeout_s: float | None) -> int | None:
        """Return the status if it arrives within `timeout_s`; stop waiting if the fork server has ended."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        poller = select.poll()
        poller.register(self._statuses, select.POLLIN)
        while self._status is None and not self._is_orphan:
            left_s = _SLICE_S if deadline is None else max(min(deadline - time.monotonic(), _SLICE_S), 0.0)
            if poller.poll(1000.0 * left_s):
                break
            if self._has_ended_unreported():
                return _LOST_STATUS
            if deadline is not None and time.monotonic() >= deadline:
                return None
        with self._lock:
            if self._status is None and not self._is_orphan:
                status = os.read(self._statuses, 16)
                self._status = int(status) if status else None
                self._is_orphan = not status
            if self._is_orphan and not _is_running(self._identity):
                self._status = _LOST_STATUS
        return self._status

    def _has_ended_unreported(self) -> bool:
        """Return whether the process has ended, and the fork server has not reported the status in time."""
        if _is_running(self._identity):
            return False
        time_s = time.monotonic()
        self._ended_s = time_s if self._ended_s is None else self._ended_s
        return time_s - self._ended_s >= _UNREPORTED_S


class Killable(Protocol):
    """A process that can be killed, such as ``subprocess.Popen``."""

    def kill(self) -> None:
        """Kill the process."""

    def wait(self) -> int:
        """Wait for the end of the process and return its status."""


class ForkServer:
    """Starts a process that forks children, which run `main` of a module. Use it as a context manager, or close it.

    If the fork server ends, its children continue until their parent ends, but their exit status is then unknown.
    """

    def __init__(self, line: socket.socket | None, process: Killable | None = None) -> None:
        """`line` is a socket to the process that forks, or None if this system cannot fork.

        :meth:`close` kills `process`.
        """
        self._lock = threading.Lock()
        self._line = line
        self._process = process

    @classmethod
    def start(cls, module: str = CHILD) -> ForkServer:
        """Start a fork server if this system can fork. It calls `prepare` of `module` to load common modules."""
        if not hasattr(os, "fork") or sys.platform in ("darwin", "win32", "emscripten", "wasi"):
            return cls(None)
        own, remote = socket.socketpair()
        with remote, contextlib.ExitStack() as closing:
            line = fcntl.fcntl(remote.fileno(), fcntl.F_DUPFD, 3)  # not below 3, the standard streams
            closing.callback(os.close, line)
            command = module_command("paceline.launch.warm_parent", str(line), module)
            process = subprocess.Popen(
                [*command, " " * _TITLE_BYTES],  # space for longer titles of the forked processes
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**MALLOC, **os.environ, **_ONE_THREAD},
                pass_fds=[line],
                start_new_session=True,
            )
        return cls(own, process)

    def fork(self, arguments: Sequence[str], *, environment: Mapping[str, str], captured: bool) -> Forked:
        """Fork a process whose standard input (and output, if `captured`) is a pipe. Raises ForkError."""
        with contextlib.ExitStack() as child_ends, contextlib.ExitStack() as own_ends:
            stdin, own_stdin = _pipe(child_ends, own_ends, is_input=True)
            if captured:
                stdout, own_stdout = _pipe(child_ends, own_ends, is_input=False)
            else:
                stdout = os.open(os.devnull, os.O_WRONLY)
                child_ends.callback(os.close, stdout)
            streams = (stdin, stdout, _standard_error(child_ends))
            process = self.fork_onto(arguments, environment=environment, streams=streams)
            own_ends.pop_all()
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
        """Fork a process with these standard streams, in `folder` or the current folder. Raises ForkError."""
        with contextlib.ExitStack() as child_ends, contextlib.ExitStack() as own_ends:
            statuses, own_statuses = _pipe(child_ends, own_ends, is_input=False)
            request = {"arguments": list(arguments), "environment": dict(environment), "folder": folder or _folder()}
            pid = self._request(request, [*streams, statuses])
            own_ends.pop_all()
        return Forked(pid, own_statuses)

    def close(self) -> None:
        with self._lock:
            if self._line is not None:
                self._line.close()
                self._line = None
            if self._process is not None:
                self._process.kill()  # kill the process, because it may still be loading modules
                self._process.wait()
                self._process = None

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _request(self, request: dict[str, Any], descriptors: list[int]) -> int:
        with self._lock:
            if self._line is None:
                raise ForkError("this system does not fork processes safely")
            self._line.settimeout(_ANSWER_S)
            text = json.dumps(request).encode()
            try:
                socket.send_fds(self._line, [struct.pack("<I", len(text))], descriptors)
                self._line.sendall(text)
                answer = self._line.recv(4096)
            except BaseException as error:
                self._line.close()  # otherwise a late reply would be read as the reply to the next request
                self._line = None
                if self._process is not None:
                    # The caller now starts the child in another way, so the fork server must not fork it too.
                    self._process.kill()
                if not isinstance(error, OSError):
                    raise
                raise ForkError(f"the fork server does not answer: {error}") from None
        found = json.loads(answer) if answer else {"refused": "the fork server has ended"}
        if "refused" in found:
            raise ForkError(found["refused"])
        return int(found["pid"])


def _pipe(child_ends: contextlib.ExitStack, own_ends: contextlib.ExitStack, *, is_input: bool) -> tuple[int, int]:
    reading, writing = os.pipe()
    child_end, own_end = (reading, writing) if is_input else (writing, reading)
    child_ends.callback(os.close, child_end)
    own_ends.callback(os.close, own_end)
    return child_end, own_end


def _standard_error(closing: contextlib.ExitStack) -> int:
    try:
        os.fstat(2)
    except OSError:  # standard error is closed, as in a daemon
        number = os.open(os.devnull, os.O_WRONLY)
        closing.callback(os.close, number)
        return number
    return 2


def _folder() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # the current folder was removed
        return None


def _identity(pid: int) -> psutil.Process | None:
    """Return a handle that distinguishes a process from later ones with the same id; None if the process has ended."""
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
