"""Run Paceline's commands in processes, like a user."""

from __future__ import annotations

import _thread
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from tests.waiting import join, wait_until
from tests.warm.processes import WarmProcess
from tests.warm.programs import MARK as MARK

from paceline.temporary import pattern_of, remove_abandoned

_WAIT_S = 120.0
PROMPT_S = 20.0
"""The time limit of a command on a busy machine.

A command with an unwanted wait takes 30 s or hangs.
"""


@dataclass(frozen=True)
class Finished:
    """A command that has ended."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The single object on standard output, as strict JSON."""
        return parse_json(self.out)


def parse_json(text: str) -> dict[str, Any]:
    """Parse one line of strict JSON that contains an object."""
    assert text.count("\n") == 1, text

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    found = json.loads(text, parse_constant=refuse)
    assert isinstance(found, dict)
    return found


class Running:
    """A running command."""

    def __init__(
        self,
        arguments: Sequence[str | Path],
        environment: dict[str, str],
        folder: Path,
        within: Path | None = None,
        *,
        kind: str = "plain",
        afresh: bool = False,
    ) -> None:
        self._err: list[str] = []
        words = ["-m", "paceline", *map(str, arguments)]
        pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
        self.process: subprocess.Popen[str] | WarmProcess
        if afresh:
            assert within is None
            self.process = subprocess.Popen(
                [sys.executable, *words],
                stdin=nothing, stdout=pipe, stderr=pipe, env=environment, cwd=folder, start_new_session=True, text=True,
            )  # fmt: skip
        else:
            self.process = WarmProcess(
                words, kind=kind, within=within, stdin=nothing, stdout=pipe, stderr=pipe, env=environment, cwd=folder,
                text=True,
            )  # fmt: skip
        self._out: list[str] = []
        self._changed = threading.Condition()
        self._readers = [
            threading.Thread(target=self._read, args=(self.process.stdout, self._out), daemon=True),
            threading.Thread(target=self._read, args=(self.process.stderr, self._err), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, pipe: Any, lines: list[str]) -> None:
        for line in pipe:
            with self._changed:
                lines.append(line)
                self._changed.notify_all()
        pipe.close()
        with self._changed:
            self._changed.notify_all()

    def wait_line(self, text: str) -> str:
        """Wait until standard output or standard error has a line that contains `text`; return the line."""

        def find() -> str | None:
            return next((line for line in [*self._out, *self._err] if text in line), None)

        def over() -> bool:
            return find() is not None or not any(reader.is_alive() for reader in self._readers)

        with self._changed:
            deadline = time.monotonic() + _WAIT_S
            while not over() and time.monotonic() < deadline:
                self._changed.wait(0.1)
            found = find()
        assert found is not None, f"no {text!r} in {self._out} {self._err}, status {self.process.poll()}"
        return found

    def wait_trains(self) -> None:
        """Wait until a training with ``--progressive`` has printed the first losses."""
        self.wait_line("since last")

    def children(self, role: str) -> list[psutil.Process]:
        """Return the processes of a role by rank. The command or its fork server has started them."""
        found = []
        for child in psutil.Process(self.process.pid).children(recursive=True):
            try:
                options = json.loads(child.cmdline()[-1])
            except (psutil.Error, IndexError, ValueError):
                continue  # the process has ended, or is starting
            if isinstance(options, dict) and options["role"] == role:
                found.append((options.get("rank", 0), child))
        return [child for _, child in sorted(found, key=lambda entry: entry[0])]

    def wait(self, timeout_s: float = _WAIT_S) -> Finished:
        """Wait for the end of the command."""
        try:
            status = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"still running after {timeout_s} s: {self._out} {self._err}") from None
        self._read_rest()
        return Finished(status, "".join(self._out), "".join(self._err))

    def _read_rest(self) -> None:
        for reader in self._readers:
            reader.join(PROMPT_S)
            assert not reader.is_alive(), f"a process that the command started still runs: {self._out} {self._err}"

    def signal(self, number: int) -> None:
        """Send the command a signal."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """Kill the command if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._read_rest()


@dataclass(frozen=True)
class Commands:
    """Runs Paceline's commands in the session's temporary folder."""

    environment: dict[str, str]
    folder: Path
    started: list[Running]
    kind: str = "plain"
    """The process from which commands are forked."""
    afresh: bool = False
    """Whether commands start a new interpreter, instead of a fork of a process with loaded modules."""

    def start(self, *arguments: str | Path, within: Path | None = None) -> Running:
        """Start a command; `within` is the file of a namespace."""
        running = Running(arguments, self.environment, self.folder, within, kind=self.kind, afresh=self.afresh)
        self.started.append(running)
        return running

    def run(self, *arguments: str | Path) -> Finished:
        """Run a command to its end."""
        return self.start(*arguments).wait()

    def succeed(self, *arguments: str | Path) -> Finished:
        """Run a command that must succeed."""
        finished = self.run(*arguments)
        assert finished.status == 0, finished
        return finished


def read_outputs(processes: Sequence[subprocess.Popen[str]], timeout_s: float = 2 * _WAIT_S) -> list[str]:
    """Wait for the end of processes; return their outputs. Kill them at the timeout."""
    try:
        return [process.communicate(timeout=timeout_s)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def our_processes(mark: str) -> list[psutil.Process]:
    """Return the processes with this session's mark in their environment."""
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(psutil.Error, OSError):
            if _has_mark(pid, mark) and (process := psutil.Process(pid)).status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _has_mark(pid: int, mark: str) -> bool:
    variables = Path(f"/proc/{pid}/environ")
    if variables.exists():  # psutil would need five times as long, and tests wait for the end of processes
        return f"{MARK}={mark}".encode() in variables.read_bytes()
    return bool(psutil.Process(pid).environ().get(MARK) == mark)


def wait_functions_ended(mark: str) -> None:
    """Wait until no process of a run that calls a function is left, and check that its files can be removed."""

    def left() -> list[list[str]]:
        found = []
        for process in our_processes(mark):
            with contextlib.suppress(psutil.Error):
                found.append(process.cmdline())
        # The path of the interpreter may contain the name of the package too, in a clone.
        return [words for words in found if any("paceline" in word for word in words[1:])]

    wait_until(lambda: not left(), "processes are left", 10)
    folder = Path(tempfile.gettempdir())
    remove_abandoned(folder)  # of workers that the test has killed
    assert not [name for name in os.listdir(folder) if re.fullmatch(pattern_of("function"), name)]


def wait_ranks(folder: Path, num_ranks: int) -> None:
    """Wait until the functions of :func:`make_endless` run."""
    wait_until(lambda: len(list(folder.iterdir())) == num_ranks, "the ranks have not started")


def make_endless(folder: Path) -> Callable[[], None]:
    """Return a function that creates a file in the folder, and does not end. It is nested, so pickled by value."""

    def live() -> None:
        Path(folder, os.environ["RANK"]).touch()
        time.sleep(1000)

    return live


def make_push() -> Callable[[], list[float]]:
    """Return a function in which each rank pushes -1 to two values. It returns the values of servers with SGD."""

    def push() -> list[float]:
        import numpy

        import paceline
        import paceline.collectives

        with paceline.collectives.init() as group, paceline.connect() as cluster:
            table = cluster.dense_table("weights", size=2, update=paceline.SGD(lr=1.0))
            table.push(-numpy.ones(2, numpy.float32)).wait()
            group.barrier()
            values: list[float] = table.pull().tolist()
            return values

    return push


@contextlib.contextmanager
def interrupting(is_ready: Callable[[], None]) -> Iterator[None]:
    """Interrupt the block, as Ctrl-C does, after `is_ready` has returned in a thread."""

    def interrupt() -> None:
        is_ready()
        _thread.interrupt_main()

    thread = threading.Thread(target=interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread.start()
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    join(thread)
