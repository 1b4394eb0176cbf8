"""Run a script as a job of an engine: describe or start its roles, and follow them."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

from paceline.command_options import words_of
from paceline.errors import UsageError
from paceline.launch.engines.engine import RunRole
from paceline.launch.engines.options import EngineFlags
from paceline.launch.engines.slurm import Slurm
from paceline.launch.run.options import RunOptions
from paceline.launch.run.run import check_script
from paceline.launch.run.setup import plan_roles

_ENGINES = {"slurm": Slurm}
_POLL_S = 0.5


def run_on_engine(options: RunOptions) -> int:
    """Run a script on the engine of `--on`; return its status. Raises UsageError."""
    flags = options.engine
    assert flags.on is not None
    if flags.on not in _ENGINES:
        raise UsageError(f"--on {flags.on}: expected one of {', '.join(_ENGINES)}")
    check_script(options)
    assert options.script is not None
    engine = _ENGINES[flags.on](flags, Path(options.script).stem)
    roles = roles_of(options)
    if flags.dry_run:
        print(engine.describe(roles), end="")
        return 0
    with engine:
        engine.start(roles)
        while (ended := engine.poll()) is None:
            time.sleep(_POLL_S)
    if ended.reason is not None:
        print(f"paceline run: {ended.reason}", file=sys.stderr)
    return ended.status


def roles_of(options: RunOptions) -> list[RunRole]:
    """Return the roles of a run, the ranks last. Raises UsageError for options that no node could use."""
    num_ranks, num_servers, nnodes = plan_roles(options)
    inner = replace(options, engine=EngineFlags(), nnodes=None)
    assert options.script is not None
    script = (options.script, *(options.arguments or ()))
    threads = 1 if options.threads is None else options.threads
    if threads < 1:
        raise UsageError(f"--threads {threads}: expected 1 or more")
    command = (sys.executable, "-m", "paceline", "run")
    if not num_servers:
        words = words_of(inner)
        return [
            RunRole(name="ranks", command=(*command, *words, *script), num_nodes=nnodes, num_cpus=num_ranks * threads)
        ]
    servers = words_of(replace(inner, job="server", nnodes=nnodes, log_dir=None, module=False))
    ranks = words_of(replace(inner, job="worker"))
    num_hosts = min(num_servers, nnodes)
    return [
        RunRole(
            name="servers", command=(*command, *servers), num_nodes=num_hosts, num_cpus=-(-num_servers // num_hosts)
        ),
        RunRole(name="ranks", command=(*command, *ranks, *script), num_nodes=nnodes, num_cpus=num_ranks * threads),
    ]
