"""The part of a run on a Dask worker: a task that starts ``paceline run``, and ends it if the task is cancelled."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
from distributed import get_worker
from distributed.worker import WORKER_ANY_RUNNING

from paceline.dask.rank import PROGRAM, REPORT_SUFFIX
from paceline.launch.engines.engine import Placement
from paceline.launch.engines.ssh_host import GRACE_S
from paceline.launch.fork_server import THREAD_VARIABLES, module_command
from paceline.launch.supervisor import Supervisor, spawn

_POLL_S: Final = 0.05

_running: set[str] = set()
"""Keys of the tasks that run in this process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRequest:
    """A node of a run. The representation hides the token, because Dask writes arguments of tasks to logs."""

    placement: Placement
    num_ranks: int
    words: tuple[str, ...]
    """Options of ``paceline run``."""
    program: bytes = field(repr=False)
    """The pickled function with its arguments."""
    token: str = field(repr=False)


def run_node(request: NodeRequest) -> tuple[int, dict[int, bytes]]:
    """Run the ranks of a node as a Dask task. Return the exit status, and the ranks' reports in the order of time."""
    worker = get_worker()
    key = str(worker.get_current_task())
    task = worker.state.tasks[key]
    threads = max(worker.state.nthreads // request.num_ranks, 1)
    environment = {
        **os.environ,
        **dict.fromkeys(THREAD_VARIABLES, str(threads)),  # Dask sets them to 1, because its tasks run in threads
        "PACELINE_PLACEMENT": msgspec.json.encode(request.placement).decode(),
        "PACELINE_TOKEN": request.token,
    }
    supervisor = Supervisor()
    _running.add(key)
    try:
        with tempfile.TemporaryDirectory(prefix="paceline-", dir=worker.local_directory) as folder:
            Path(folder, PROGRAM).write_bytes(pickle.dumps((sys.path, request.program)))
            command = module_command("paceline", "run", *request.words, "--module", "paceline.dask.rank", folder)
            launch = partial(spawn, command, env=environment, stdin=subprocess.DEVNULL)
            try:
                child = supervisor.start("paceline run", launch, is_foreign=True)
                # Dask cannot end a running function. It marks the task if the client cancels it or has disconnected.
                while child.is_alive() and task.state == "executing" and worker.status in WORKER_ANY_RUNNING:
                    time.sleep(_POLL_S)
            finally:
                supervisor.close(GRACE_S, signal.SIGTERM)
            files = sorted(Path(folder).glob(f"*{REPORT_SUFFIX}"), key=lambda file: file.stat().st_mtime_ns)
            return child.process.wait(), {int(file.stem): file.read_bytes() for file in files}
    finally:
        _running.discard(key)


def running_nodes() -> list[str]:
    """Return the keys of the tasks that run in this process."""
    return list(_running)
