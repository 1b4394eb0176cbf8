"""Run one node of a run in a worker of Dask or Ray: start ``paceline run``, and end it when it is not needed."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from paceline.launch.engines.placement import Placement
from paceline.launch.engines.ssh_host import GRACE_S
from paceline.launch.fork_server import THREAD_VARIABLES, module_command
from paceline.launch.functions.rank import PROGRAM, RANK_MODULE, REPORT_SUFFIX
from paceline.launch.supervisor import Supervisor, spawn
from paceline.temporary import TemporaryFolder

_POLL_S: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionCall:
    """A pickled call of a function on every rank of a run.

    The representation hides the token, because Dask and Ray log the arguments of calls.
    """

    num_ranks: int
    """Number of ranks on each node."""
    is_elastic: bool
    """Whether the run continues if any node except the first one is lost."""
    num_more: int
    """Number of further nodes that may join."""
    words: tuple[str, ...]
    """Options of ``paceline run``, without the number of nodes."""
    program: bytes = field(repr=False)
    """The pickled function with its arguments."""
    token: str = field(repr=False)
    job: str
    """Identifier of the run."""


def run_node(
    call: FunctionCall, placement: Placement, num_cores: int, is_needed: Callable[[], bool]
) -> tuple[int, dict[int, bytes]]:
    """Run the ranks of a node while `is_needed`. Return the exit status, and the ranks' reports in the order of time.

    The ranks share `num_cores` cores.
    """
    variables = {
        # Dask and Ray set these variables to 1.
        **dict.fromkeys(THREAD_VARIABLES, str(max(num_cores // call.num_ranks, 1))),
        **placement.variables(),
        "PACELINE_TOKEN": call.token,
    }
    command = module_command("paceline", "run", *call.words, "--module", RANK_MODULE)
    return run_program(command, call.program, variables, is_needed=is_needed)


def run_program(
    command: Sequence[str],
    program: bytes,
    variables: Mapping[str, str],
    *,
    is_needed: Callable[[], bool] = lambda: True,
    shared: Path | None = None,
) -> tuple[int, dict[int, bytes]]:
    """Run a launcher of ranks, whose `command` ends with :data:`RANK_MODULE`; return as :func:`run_node` does.

    `program` is the pickled function with its arguments. It is stored in a new folder in `shared`, which all machines
    of the run must have, by default in the folder for temporary files.
    """
    supervisor = Supervisor()
    with TemporaryFolder.make("function", shared) as folder:
        (folder.path / PROGRAM).write_bytes(pickle.dumps((sys.path, program)))
        launch = partial(spawn, [*command, str(folder.path)], env={**os.environ, **variables}, stdin=subprocess.DEVNULL)
        try:
            child = supervisor.start("paceline run", launch, is_foreign=True)
            while child.is_alive() and is_needed():
                time.sleep(_POLL_S)
        finally:
            supervisor.close(GRACE_S, signal.SIGTERM)
        files = sorted(folder.path.glob(f"*{REPORT_SUFFIX}"), key=lambda file: file.stat().st_mtime_ns)
        return child.process.wait(), {int(file.stem): file.read_bytes() for file in files}
