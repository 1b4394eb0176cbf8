"""Start, watch, replace and end child processes, including their own children.

A child always ends when its parent ends, even if the parent is killed. The child's standard input is a pipe from the
parent, and the child ends when the pipe closes (:func:`watch_parent`). A foreign program does not watch its input.
Therefore another child, the guard (``guard.py``), ends the process groups of foreign programs.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

import psutil

from paceline.observe.stuck.jobs import current_job
from paceline.transport.backoff import Backoff

_LEFTOVERS_S = 1.0
SHORT_LIFE_S = 5.0  # if a replacement dies within this time, the next replacement starts after a pause
FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0


class ChildProcess(Protocol):
    """The part of the interface of ``subprocess.Popen`` that a supervisor needs."""

    pid: int
    stdin: IO[bytes] | None
    stdout: IO[bytes] | None

    def poll(self) -> int | None:
        """Return the status, negative for a signal; None while the process lives."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the process and return its status. Raises ``subprocess.TimeoutExpired``."""

    def send_signal(self, number: int) -> None:
        """Send a signal to the process, unless the process has ended."""


Launch = Callable[[], ChildProcess]


def spawn(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a program in its own session, so that a terminal's signals do not reach it."""
    return subprocess.Popen(command, start_new_session=True, **options)


class Child:
    """A supervised process, or its current replacement."""

    def __init__(self, name: str, process: ChildProcess, *, is_foreign: bool) -> None:
        self.name = name
        self.process = process
        self.is_foreign = is_foreign
        self.keeper: threading.Thread | None = None

    def is_alive(self) -> bool:
        return self.process.poll() is None

    def status(self) -> int | None:
        """Return the exit status; None while the process lives or waits for its replacement."""
        is_kept = self.keeper is not None and self.keeper.is_alive()
        return None if is_kept else self.process.poll()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)


class Supervisor:
    """All child processes of one owner. Thread-safe; :meth:`close` ends every process."""

    def __init__(self) -> None:
        self.children: list[Child] = []
        self._lock = threading.Lock()
        self._is_closing = threading.Event()
        self._guard = Guard()

    def start(self, name: str, launch: Launch, *, is_foreign: bool = False) -> Child:
        """Start a process with `launch`, which must put it into its own session.

        A foreign program is not part of Paceline. If this process is killed, the guard ends it and its children.
        """
        if is_foreign:
            self._guard.start()
        process = launch()
        if is_foreign:
            self._guard.add(process.pid)
        child = Child(name, process, is_foreign=is_foreign)
        self.children.append(child)
        return child

    def keep(
        self, child: Child, launch: Launch, *, most: int, on_replaced: Callable[[ChildProcess, int], None]
    ) -> None:
        """In a thread, replace a child that dies with another process from `launch`, at most `most` times.

        The thread calls `on_replaced` with the new process and the status of the old process. A child that ends with
        status 0 is not replaced.
        """

        def watch() -> None:
            backoff, since = Backoff(FIRST_PAUSE_S, _LONGEST_PAUSE_S), -math.inf
            for _ in range(most):
                status = child.process.wait()
                if status == 0:
                    return
                has_lived = time.monotonic() - since >= SHORT_LIFE_S
                if has_lived:
                    backoff.reset()
                if self._is_closing.wait(0.0 if has_lived else backoff.next_s()):
                    return
                with self._lock:
                    if self._is_closing.is_set():
                        return
                    since = time.monotonic()
                    _close_pipe(child.process.stdin)
                    _close_pipe(child.process.stdout)
                    child.process = launch()
                on_replaced(child.process, status)
            child.process.wait()

        child.keeper = threading.Thread(target=watch, name=f"paceline-{child.name}-watch", daemon=True)
        child.keeper.start()

    def living(self, prefix: str = "") -> list[Child]:
        return [child for child in list(self.children) if child.name.startswith(prefix) and child.is_alive()]

    def ended(self, prefix: str = "") -> list[tuple[str, int]]:
        """Return name and status of the children that have ended without a replacement."""
        statuses = [(child.name, child.status()) for child in list(self.children) if child.name.startswith(prefix)]
        return [(name, status) for name, status in statuses if status is not None]

    def signal(self, child: Child, number: int, *, group: bool = False) -> None:
        """Send a signal to a child. With `group`, send it to a foreign program's group, even if the program ended."""
        if group and child.is_foreign:
            self._guard.signal(child.process.pid, number)
        else:
            child.process.send_signal(number)

    def stop_replacing(self) -> None:
        """Stop replacing dead processes."""
        with self._lock:
            self._is_closing.set()

    def close(self, grace_s: float, number: int | None = None) -> None:
        """End every process, the last first; kill processes that live longer than `grace_s` seconds. Idempotent.

        The method closes each process's standard input, which requests its end. If `number` is given, it first sends
        this signal to all processes.
        """
        self.stop_replacing()
        started = _descendants([child.process.pid for child in self.living() if child.is_foreign])
        if number is not None:
            for child in self.living():
                self.signal(child, number, group=True)
        deadline = time.monotonic() + grace_s
        for child in reversed(self.children):
            _close_pipe(child.process.stdin)
            try:
                child.process.wait(max(deadline - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                if child.is_foreign:
                    child.process.send_signal(signal.SIGSTOP)  # so that it starts no more processes
                    started += _descendants([child.process.pid])
                self.signal(child, signal.SIGKILL, group=True)
                child.kill()
                child.process.wait()
            _close_pipe(child.process.stdout)
        for process in started:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                pass
        for child in self.children:
            if child.keeper is not None:
                child.keeper.join()
        self.children = []
        self._guard.close()


class Guard:
    """The process groups of foreign programs, and a guard process that ends them if this process is killed."""

    def __init__(self) -> None:
        self._groups: set[int] = set()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        if self._process is None:
            job = current_job()
            folders = [] if job is None else [str(job.folder)]
            command = [sys.executable, "-I", "-S", str(Path(__file__).with_name("guard.py")), *folders]
            self._process = spawn(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)

    def add(self, group: int) -> None:
        self._groups.add(group)
        self._send(f"+{group}\n")

    def signal(self, group: int, number: int) -> bool:
        """Send a signal to a group; return whether the group has processes."""
        if group not in self._groups:
            return False
        try:
            os.killpg(group, number)
        except ProcessLookupError:
            self._groups.discard(group)
            self._send(f"-{group}\n")
            return False
        except PermissionError:  # macOS raises this error for a group of zombies
            return False
        return True

    def close(self) -> None:
        """Kill the groups' processes after a grace period, then end the guard. Idempotent."""
        deadline = time.monotonic() + _LEFTOVERS_S
        while any(self.signal(group, 0) for group in list(self._groups)) and time.monotonic() < deadline:
            time.sleep(0.005)
        for group in list(self._groups):
            self.signal(group, signal.SIGKILL)
        self._groups.clear()
        if self._process is not None:
            self._send("end\n")
            _close_pipe(self._process.stdin)
            self._process.wait()
            self._process = None

    def _send(self, line: str) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the guard was killed


def watch_parent(on_end: Callable[[], None]) -> None:
    """Call `on_end` in a thread when standard input ends, which means that the parent has ended."""

    def watch() -> None:
        try:
            while os.read(sys.stdin.fileno(), 4096):
                pass
        except (OSError, ValueError):
            pass
        on_end()

    threading.Thread(target=watch, name="paceline-parent-watch", daemon=True).start()


def read_line() -> str:
    """Read exactly one line from standard input; empty if the parent has ended."""
    line = b""
    while not line.endswith(b"\n"):
        more = os.read(sys.stdin.fileno(), 1)
        if not more:
            return ""
        line += more
    return line.decode().strip()


def describe_status(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"was killed by {name}"


def _descendants(pids: Sequence[int]) -> list[psutil.Process]:
    """Return the processes' descendants. Signals to a process group do not reach descendants in other groups."""
    found = []
    for pid in pids:
        try:
            found += psutil.Process(pid).children(recursive=True)
        except psutil.NoSuchProcess:
            continue
    return found


def _close_pipe(pipe: IO[bytes] | None) -> None:
    try:
        if pipe is not None:
            pipe.close()
    except BrokenPipeError:
        pass  # the reader has ended before it read all data
