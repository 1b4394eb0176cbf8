"""The rank processes of ``bench collectives``: started by mpirun where it is to be measured, else by ourselves."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from types import TracebackType
from typing import IO, Any, Final

import psutil

from paceline.bench.plan import Plan
from paceline.errors import PeerError, UsageError
from paceline.launch.local import describe_status
from paceline.transport import make_token

_END_S: Final = 5.0
_NOTICE_S: Final = 0.3
"""A rank sees that another's connection is gone before the system says that its process is."""
_TOLD_BY_LAUNCHERS: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Ours may run under a launcher of its own, whose ranks these are not."""


class RankProcesses:
    """The ranks of a plan. Use it as a context manager; at its end every process has ended.

    If this process is killed they end by themselves, as their standard input does.
    """

    def __init__(self, plan: Plan, *, mpirun: bool) -> None:
        self._scratch = tempfile.mkdtemp(prefix="paceline-")
        address = f"127.0.0.1:{_free_port()}"
        self._command = [sys.executable, "-m", "paceline.bench.collectives_rank"]
        self._command += [json.dumps(dataclasses.asdict(plan)), address, self._scratch]
        self._environment = {name: value for name, value in os.environ.items() if name not in _TOLD_BY_LAUNCHERS}
        self._environment |= {"PACELINE_TOKEN": make_token(), "TMPDIR": self._scratch}
        self._err: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - until close()
        self._mpirun = mpirun
        self._children: list[subprocess.Popen[bytes]] = []
        self._done = False
        stdin, self._stdin = os.pipe()
        self._out, stdout = os.pipe()
        try:
            if mpirun:
                self._start_mpirun(plan.ranks, stdin, stdout)
            else:
                for rank in range(plan.ranks):
                    self._start(self._command, stdin, stdout, {"RANK": str(rank), "WORLD_SIZE": str(plan.ranks)})
        except BaseException:
            self.close()
            raise
        finally:
            os.close(stdin)
            os.close(stdout)

    def messages(self) -> Iterator[dict[str, Any]]:
        """Yield what the ranks report, to the end. Raises UsageError or PeerError if they fail."""
        with open(self._out, encoding="utf-8", errors="replace", closefd=False) as lines:
            for line in lines:
                if not line.startswith("{"):
                    continue  # some library's remark
                message: dict[str, Any] = json.loads(line)
                if "error" in message:
                    if message["usage"]:
                        raise UsageError(message["error"])
                    raise PeerError(self._killed() or message["error"])
                if "done" in message:
                    self._done = True
                    return
                yield message
        raise PeerError(f"the ranks ended before they were done{self._last_words()}")

    def close(self) -> None:
        """End every process. Idempotent."""
        deadline = time.monotonic() + _END_S
        started = [process for child in self._children for process in _with_descendants(child)]
        for child in self._children:
            if not self._done:
                # mpirun cleans up after its ranks; our own have nothing to clean.
                child.terminate() if self._mpirun else child.kill()
            try:
                child.wait(max(deadline - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                pass
        for process in started:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                pass
        for child in self._children:
            child.wait()
        if not self._err.closed:
            self._children = []
            self._err.close()
            os.close(self._stdin)
            os.close(self._out)
            shutil.rmtree(self._scratch, ignore_errors=True)

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start_mpirun(self, num_ranks: int, stdin: int, stdout: int) -> None:
        options = ["-n", str(num_ranks), "--oversubscribe", "--bind-to", "none"]
        if hasattr(os, "geteuid") and os.geteuid() == 0:
            options.append("--allow-run-as-root")
        self._start(["mpirun", *options, *self._command], stdin, stdout, {})

    def _start(self, command: list[str], stdin: int, stdout: int, told: dict[str, str]) -> None:
        child = subprocess.Popen(
            command,
            stdin=stdin,
            stdout=stdout,
            stderr=self._err,
            env={**self._environment, **told},
            start_new_session=True,  # Ctrl-C is ours to handle
        )
        self._children.append(child)

    def _killed(self) -> str:
        """Say which of the ranks that we started was killed; that tells more than what the others make of it."""
        deadline = time.monotonic() + _NOTICE_S
        while not self._mpirun and time.monotonic() < deadline:
            for rank, child in enumerate(self._children):
                status = child.poll()
                if status is not None and status < 0:
                    return f"rank {rank} {describe_status(status)}; the others cannot go on without it"
            time.sleep(0.01)
        return ""

    def _last_words(self) -> str:
        """Say how the first that failed has ended, and what was said last."""
        told = ""
        for rank, child in enumerate(self._children):
            status = child.wait()
            if status and not told:
                told = f": {'mpirun' if self._mpirun else f'rank {rank}'} {describe_status(status)}"
        self._err.seek(0)
        lines = self._err.read().decode(errors="replace").splitlines()
        said = [line.strip() for line in lines if line.strip(" -*=")]
        return f"{told}; the last that was said: {said[-1]}" if said else told


def _with_descendants(child: subprocess.Popen[bytes]) -> list[psutil.Process]:
    # mpirun makes every rank the head of a process group of its own, so a signal to mpirun's does not reach them.
    try:
        process = psutil.Process(child.pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
