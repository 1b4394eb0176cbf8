"""Start the rank processes of ``bench collectives``: with mpirun if MPI is measured, otherwise directly."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from typing import IO, Any, Final

from paceline.bench.plan import BenchPlan
from paceline.closing import Closing
from paceline.errors import PeerError, UsageError
from paceline.launch.fork_server import module_command
from paceline.launch.supervisor import ChildProcess, Supervisor, describe_status, spawn
from paceline.temporary import TemporaryFolder
from paceline.transport import make_token

_END_S: Final = 5.0
_NOTICE_S: Final = 0.3
"""The system reports the end of a process within this time after its connection is lost."""
_LAUNCHER_VARIABLES: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables to remove. Paceline may run under a launcher, whose ranks have nothing to do with these ranks."""


class BenchRanks(Closing):
    """The ranks of a plan. Use it as a context manager: at its end, every process has ended.

    If this process is killed, the ranks end too, because their standard input ends.
    """

    def __init__(self, *, mpirun: bool) -> None:
        self._mpirun = mpirun
        self._supervisor = Supervisor()
        self._done = False
        self._scratch = TemporaryFolder.make("bench")
        self._err: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - until close()
        self._line, self._stdin = os.pipe()
        self._out, self._stdout = os.pipe()

    def start(self, plan: BenchPlan) -> None:
        """Start the processes."""
        address, scratch = f"127.0.0.1:{_free_port()}", str(self._scratch.path)
        described = json.dumps(dataclasses.asdict(plan))
        command = module_command("paceline.bench.collectives_rank", described, address, scratch)
        environment = {name: value for name, value in os.environ.items() if name not in _LAUNCHER_VARIABLES}
        environment |= {"PACELINE_TOKEN": make_token(), "TMPDIR": scratch}

        def launch(command: list[str], rank_variables: dict[str, str]) -> ChildProcess:
            environ = {**environment, **rank_variables}
            return spawn(command, stdin=self._line, stdout=self._stdout, stderr=self._err, env=environ)

        if self._mpirun:
            start = partial(launch, [*_mpirun(plan.ranks), *command], {})
            self._supervisor.start("mpirun", start, is_foreign=True)
        else:
            for rank in range(plan.ranks):
                rank_variables = {"RANK": str(rank), "WORLD_SIZE": str(plan.ranks)}
                self._supervisor.start(f"rank {rank}", partial(launch, command, rank_variables))
        self._close_rank_ends()  # so that reading ends when the last rank ends

    def messages(self) -> Iterator[dict[str, Any]]:
        """Yield the ranks' reports. Raises UsageError or PeerError if they fail."""
        with open(self._out, encoding="utf-8", errors="replace", closefd=False) as lines:
            for line in lines:
                if not line.startswith("{"):
                    continue  # a line printed by a library
                message: dict[str, Any] = json.loads(line)
                if "error" in message:
                    if message["usage"]:
                        raise UsageError(message["error"])
                    raise PeerError(self._killed() or message["error"])
                if "done" in message:
                    self._done = True
                    return
                yield message
        raise PeerError(f"the ranks ended before the benchmark was complete{self._last_words()}")

    def close(self) -> None:
        """End every process. Idempotent."""
        # mpirun must clean up its ranks. Directly started ranks can be killed, because they have nothing to clean up.
        end_signal = None if self._done else signal.SIGTERM if self._mpirun else signal.SIGKILL
        self._supervisor.close(_END_S, end_signal)
        if not self._err.closed:
            self._err.close()
            self._close_rank_ends()
            os.close(self._stdin)
            os.close(self._out)
            self._scratch.close()

    def _close_rank_ends(self) -> None:
        """Close the ranks' ends of the pipes."""
        for end in (self._line, self._stdout):
            if end >= 0:
                os.close(end)
        self._line = self._stdout = -1

    def _killed(self) -> str:
        """Return a message if a directly started rank was killed. This explains the errors of the other ranks."""
        deadline = time.monotonic() + _NOTICE_S
        while not self._mpirun and time.monotonic() < deadline:
            for name, status in self._supervisor.ended():
                if status < 0:
                    return f"{name} {describe_status(status)}; the other ranks cannot continue without it"
            time.sleep(0.01)
        return ""

    def _last_words(self) -> str:
        """Return the exit status of the first failed rank, and the last line of output."""
        failure = ""
        for child in self._supervisor.children:
            status = child.process.wait()
            if status and not failure:
                failure = f": {child.name} {describe_status(status)}"
        self._err.seek(0)
        lines = self._err.read().decode(errors="replace").splitlines()
        output = [line.strip() for line in lines if line.strip(" -*=")]
        return f"{failure}; the last output: {output[-1]}" if output else failure


def _mpirun(num_ranks: int) -> list[str]:
    command = ["mpirun", "-n", str(num_ranks), "--oversubscribe", "--bind-to", "none"]
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        command.append("--allow-run-as-root")
    return command


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
