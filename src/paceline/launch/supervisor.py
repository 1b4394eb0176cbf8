"""Processes that this one starts: watched, replaced when they die, and ended with all that they have started.

A child dies with its parent, however that ends: its standard input is a pipe whose other end only the parent holds, and
when the pipe ends so does the child (:func:`watch_parent`). A program that is not ours does not watch its input; a
guard does so in its place (``guard.py``): a child too, which ends the process groups that it was told of.
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

from paceline.transport.backoff import Backoff

_LEFTOVERS_S = 1.0
SHORT_LIFE_S = 5.0  # of a process that took another's place: the next one waits
FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0


class ChildProcess(Protocol):
    """What a supervisor needs of a process; ``subprocess.Popen`` has it."""

    pid: int
    stdin: IO[bytes] | None
    stdout: IO[bytes] | None

    def poll(self) -> int | None:
        """Return the status, negative for a signal; None while it lives."""

    def wait(self, timeout: float | None = None) -> int:
        """Return the status when it has ended. Raises ``subprocess.TimeoutExpired``."""

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""


Launch = Callable[[], ChildProcess]


def spawn(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a program in a session of its own, where a terminal's signals do not reach it."""
    return subprocess.Popen(command, start_new_session=True, **options)


class Child:
    """A process that a supervisor has started, or the one that took its place."""

    def __init__(self, name: str, process: ChildProcess, *, is_foreign: bool) -> None:
        self.name = name
        self.process = process
        self.is_foreign = is_foreign
        self.keeper: threading.Thread | None = None

    def is_alive(self) -> bool:
        """Return whether its process lives."""
        return self.process.poll() is None

    def status(self) -> int | None:
        """Return how it ended; None while it lives, or another process is to take its place."""
        is_kept = self.keeper is not None and self.keeper.is_alive()
        return None if is_kept else self.process.poll()

    def kill(self) -> None:
        """Kill its process."""
        self.process.send_signal(signal.SIGKILL)


class Supervisor:
    """All processes that one owner starts. May be used by several threads; :meth:`close` ends every process."""

    def __init__(self) -> None:
        self.children: list[Child] = []
        self._lock = threading.Lock()
        self._is_closing = threading.Event()
        self._guard = Guard()

    def start(self, name: str, launch: Launch, *, is_foreign: bool = False) -> Child:
        """Start a process by `launch`, in a session of its own.

        A foreign one is not ours: a guard ends it if this process is killed, and what it has started ends with it.
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
        """Start another process, by `launch`, in the place of a child's that dies; so often at most, in a thread.

        `on_replaced` is called in that thread with the new process and the status of the old one. A status of 0 is no
        death.
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
        """Return the children that live, of those whose name begins so."""
        return [child for child in list(self.children) if child.name.startswith(prefix) and child.is_alive()]

    def ended(self, prefix: str = "") -> list[tuple[str, int]]:
        """Return name and status of those that have ended for good."""
        statuses = [(child.name, child.status()) for child in list(self.children) if child.name.startswith(prefix)]
        return [(name, status) for name, status in statuses if status is not None]

    def signal(self, child: Child, number: int, *, group: bool = False) -> None:
        """Send a child a signal; with `group`, a foreign one's process group, even if only others are left in it."""
        if group and child.is_foreign:
            self._guard.signal(child.process.pid, number)
        else:
            child.process.send_signal(number)

    def stop_replacing(self) -> None:
        """Start no process any more in the place of another one."""
        with self._lock:
            self._is_closing.set()

    def close(self, grace_s: float, number: int | None = None) -> None:
        """End every process, the last first: what has not ended within `grace_s` is killed.

        Each is told by the end of its standard input; before, all are sent the signal `number`, if it is given.
        Idempotent.
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
    """Process groups of foreign programs, which another process ends if this one is killed."""

    def __init__(self) -> None:
        self._groups: set[int] = set()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the other process, unless it is there."""
        if self._process is None:
            command = [sys.executable, "-I", "-S", str(Path(__file__).with_name("guard.py"))]
            self._process = spawn(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)

    def add(self, group: int) -> None:
        """Guard a group from now on."""
        self._groups.add(group)
        self._tell(f"+{group}\n")

    def signal(self, group: int, number: int) -> bool:
        """Send a signal to a group; return whether it has anybody."""
        if group not in self._groups:
            return False
        try:
            os.killpg(group, number)
        except ProcessLookupError:
            self._groups.discard(group)
            self._tell(f"-{group}\n")
            return False
        except PermissionError:  # macOS says so of a group of zombies
            return False
        return True

    def close(self) -> None:
        """End what is left in the groups, after a moment to end by itself, and then the guard. Idempotent."""
        deadline = time.monotonic() + _LEFTOVERS_S
        while any(self.signal(group, 0) for group in list(self._groups)) and time.monotonic() < deadline:
            time.sleep(0.005)
        for group in list(self._groups):
            self.signal(group, signal.SIGKILL)
        self._groups.clear()
        if self._process is not None:
            self._tell("end\n")
            _close_pipe(self._process.stdin)
            self._process.wait()
            self._process = None

    def _tell(self, line: str) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # somebody has killed it


def watch_parent(on_gone: Callable[[], None]) -> None:
    """Call `on_gone` in a thread when standard input ends: the parent holds its other end, and is gone."""

    def watch() -> None:
        try:
            while os.read(sys.stdin.fileno(), 4096):
                pass
        except (OSError, ValueError):
            pass
        on_gone()

    threading.Thread(target=watch, name="paceline-parent-watch", daemon=True).start()


def describe_status(status: int) -> str:
    """Say how a process ended."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"was killed by {name}"


def _descendants(pids: Sequence[int]) -> list[psutil.Process]:
    """Return what processes have started: it may be in groups of its own, which a signal to theirs does not reach."""
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
        pass  # there was something to flush, and nobody to read it
