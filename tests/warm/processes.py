"""Start programs like ``subprocess.Popen``, but by a fork of a warm process. Start fork servers for clusters."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from tests.waiting import join

from paceline.launch.fork_server import CHILD, THREAD_VARIABLES, Forked, ForkServer

from .zygote import MODULES

PLACE = "WARM_PROCESSES_OF_TESTS"
"""The environment variable of the folder with the zygotes' sockets."""
RANKS = "WARM_RANKS_OF_TESTS"
"""The environment variable of ``paceline run`` for the kind of process that ranks are forked from.

Without it ranks are started as new processes.
"""
PROGRAMS = "tests.warm.programs"
"""The process from which all processes except workers are forked."""
RELAY = Path(__file__).with_name("relay.py")
"""The program ``python RELAY KIND PROGRAM ARGUMENT…`` for launchers of other packages."""
RELAYED_COMMAND = f"{sys.executable} {RELAY} plain -m"
"""The start of a command that forks a process for a module."""
RELAYING = f"sed 's#{sys.executable} -m#{RELAYED_COMMAND}#'"
"""The shell command that changes commands on its input: instead of new interpreters, they start forks."""
_PATIENCE_S = 300.0
_TITLE_BYTES = 4096
_fork_servers: dict[tuple[int, str], ForkServer] = {}
_lock = threading.Lock()


@contextlib.contextmanager
def zygotes() -> Iterator[None]:
    """Start the zygotes of all kinds until the end of the block. If forks are not safe, programs are spawned."""
    if sys.platform != "linux":
        yield
        return
    started = []
    with tempfile.TemporaryDirectory(prefix="warm-", dir="/tmp") as folder:
        for kind in MODULES:
            threads = dict.fromkeys(THREAD_VARIABLES, "1")
            words = ["-m", "tests.warm.zygote", kind, f"{folder}/{kind}", " " * _TITLE_BYTES]
            root = str(Path(__file__).parents[2])
            path = os.pathsep.join([os.environ.get("PYTHONPATH", root), root])
            started.append(
                subprocess.Popen(
                    [sys.executable, *words],
                    stdin=subprocess.PIPE,
                    env={**os.environ, **threads, "PYTHONPATH": path},
                    start_new_session=True,
                )
            )
        os.environ[PLACE] = folder
        try:
            yield
        finally:
            del os.environ[PLACE]
            for process in started:
                process.kill()
                process.communicate()


def are_warm() -> bool:
    """Return whether there are processes to fork from."""
    return PLACE in os.environ


def connect(kind: str, module: str) -> ForkServer:
    """Return a new fork server for processes that run a module, as soon as it has loaded its modules."""
    line = request_parent(kind, module)
    line.settimeout(_PATIENCE_S)
    assert line.recv(1), f"the process of the kind {kind} ended while it loaded its modules"
    return ForkServer(line)


def request_parent(kind: str, module: str) -> socket.socket:
    """Return a connection to a kind's process, which loads its modules and then sends one byte."""
    path = f"{os.environ[PLACE]}/{kind}"
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        line = socket.socket(socket.AF_UNIX)
        try:
            line.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            line.close()
            assert Path(path).parent.is_dir(), "the zygote has ended with its session"
            assert time.monotonic() < deadline, f"no zygote listens at {path}"
            time.sleep(0.01)
        else:
            line.sendall(module.encode() + b"\n")
            return line


def close() -> None:
    """End this process's fork servers."""
    with _lock:
        while _fork_servers:
            _fork_servers.popitem()[1].close()


@contextlib.contextmanager
def clusters_from_warm_parents() -> Iterator[None]:
    """Fork the local clusters of this process from loaded modules."""
    import pytest

    with pytest.MonkeyPatch.context() as patch:
        if are_warm():
            patch.setattr(ForkServer, "start", lambda module=CHILD: connect("plain", module))
        yield


class WarmProcess:
    """A forked program with the methods of ``subprocess.Popen`` that tests use."""

    def __init__(
        self,
        words: Sequence[str | Path],
        *,
        kind: str = "plain",
        within: Path | None = None,
        env: Mapping[str, str],
        cwd: str | Path | None = None,
        stdin: int | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
        text: bool = False,
    ) -> None:
        """Start it by the words that would follow ``python``, and the arguments that ``Popen`` has.

        `within` is the file of a namespace, of networks or mounts.
        """
        self.args = [str(word) for word in (words if within is None else ["--within", within, *words])]
        self._text = text
        self.stdin: IO[Any] | None = None
        self.stdout: IO[Any] | None = None
        self.stderr: IO[Any] | None = None
        with contextlib.ExitStack() as child_files:
            streams = [
                self._stream(number, descriptor, child_files) for number, descriptor in enumerate((stdin, stdout))
            ]
            streams.append(streams[1] if stderr == subprocess.STDOUT else self._stream(2, stderr, child_files))
            self._process: Forked | subprocess.Popen[bytes]
            if are_warm():
                folder = None if cwd is None else str(cwd)
                self._process = _fork_server(kind).fork_onto(
                    self.args, environment=env, streams=(streams[0], streams[1], streams[2]), folder=folder
                )
            else:
                stdin, stdout, stderr = streams
                self._process = subprocess.Popen(
                    [sys.executable, *self.args], env=env, cwd=cwd, stdin=stdin, stdout=stdout, stderr=stderr,
                    start_new_session=True,
                )  # fmt: skip
        self.pid = self._process.pid

    def _stream(self, number: int, descriptor: int | None, child_files: contextlib.ExitStack) -> int:
        if descriptor is None:
            return number
        if descriptor == subprocess.PIPE:
            reading, writing = os.pipe()
            child_end, parent_end = (reading, writing) if number == 0 else (writing, reading)
            stream: IO[Any] = (
                os.fdopen(parent_end, "w" if number == 0 else "r", encoding="utf-8")
                if self._text
                else (os.fdopen(parent_end, "wb" if number == 0 else "rb"))
            )
            setattr(self, ("stdin", "stdout", "stderr")[number], stream)
        elif descriptor >= 0:
            return descriptor
        else:
            assert descriptor == subprocess.DEVNULL
            child_end = os.open(os.devnull, os.O_RDWR)
        child_files.callback(os.close, child_end)
        return child_end

    @property
    def returncode(self) -> int | None:
        """The exit status of the program; None while it runs."""
        return self.poll()

    def poll(self) -> int | None:
        """Return the exit status of the program, or None while it runs."""
        return self._process.poll()

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the program. Raises ``subprocess.TimeoutExpired``."""
        return self._process.wait(timeout)

    def send_signal(self, number: int) -> None:
        """Send the program a signal unless it has ended."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kill the program unless it has ended."""
        self.send_signal(signal.SIGKILL)

    def end(self) -> None:
        """Kill the program, wait for its end and close its streams."""
        self.kill()
        self.wait()
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                stream.close()

    def communicate(self, timeout: float | None = None) -> tuple[Any, Any]:
        """Close the program's input, read both output streams to their ends, and wait for the end of the program."""
        if self.stdin is not None:
            self.stdin.close()
        outputs: list[Any] = [None, None]

        def read(number: int, pipe: IO[Any]) -> None:
            with pipe:
                outputs[number] = pipe.read()

        pipes = [(number, pipe) for number, pipe in enumerate((self.stdout, self.stderr)) if pipe and not pipe.closed]
        readers = [threading.Thread(target=read, args=ends, daemon=True) for ends in pipes]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:  # a process that the program has started may keep its output open
            join(reader)
        return outputs[0], outputs[1]


def _fork_server(kind: str) -> ForkServer:
    """Return this process's fork server of a kind. It is started once, and ends with this process."""
    with _lock:
        key = (os.getpid(), kind)
        if key not in _fork_servers:
            _fork_servers[key] = connect(kind, PROGRAMS)
        return _fork_servers[key]
