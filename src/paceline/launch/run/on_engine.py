"""Run a script on an engine: print a description of its roles, or start them and wait for their end."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

from paceline.command_options import words_of
from paceline.errors import UsageError
from paceline.launch.engines.engine import RunEngine, RunRole, report
from paceline.launch.engines.kubernetes import Kubernetes
from paceline.launch.engines.options import EngineFlags
from paceline.launch.engines.slurm import Slurm
from paceline.launch.engines.ssh import Ssh, parse_hosts
from paceline.launch.run.options import RunOptions
from paceline.launch.run.run import check_script
from paceline.launch.run.setup import plan_roles

_ENGINES = ("slurm", "kubernetes", "ray")


def run_on_engine(options: RunOptions) -> int:
    """Run a script on the engine of `--on`, or on `--hosts`; return its status. Raises UsageError."""
    flags = options.engine
    if flags.hosts is None:
        if flags.on not in _ENGINES:
            raise UsageError(f"--on {flags.on}: expected one of {', '.join(_ENGINES)}")
        flags.check_only(flags.on)
        if flags.ssh_option:
            raise UsageError(f"--ssh-option {flags.ssh_option[0]} is for --hosts. Leave it out with --on {flags.on}")
    check_script(options, is_here=flags.on != "kubernetes")
    assert options.script is not None
    roles = roles_of(options)
    engine: RunEngine
    if flags.hosts is not None:
        engine = Ssh(flags)
    elif flags.on == "kubernetes":
        engine = Kubernetes(flags)
    elif flags.on == "ray":
        engine = _ray_engine(flags)
    else:
        engine = Slurm(flags, Path(options.script).stem)
    if flags.dry_run:
        print(engine.describe(roles), end="")
        return 0
    with engine:
        engine.start(roles)
        while (ended := engine.poll()) is None:
            pass
    if ended.reason is not None:
        report(ended.reason)
    return ended.status


def _ray_engine(flags: EngineFlags) -> RunEngine:
    try:
        from paceline.launch.engines.ray import Ray  # here, because Ray may be missing, and its import takes a second
    except ImportError as error:
        raise UsageError(f"--on ray: {error}") from None
    return Ray(flags)


def roles_of(options: RunOptions) -> list[RunRole]:
    """Return the roles of a run, the ranks last. Raises UsageError for options that cannot work on any node."""
    counts = None
    if options.engine.hosts is not None:
        options, counts = _on_hosts(options, options.engine.hosts)
    elif options.engine.on == "ray" and options.threads is None:  # Ray reserves one core for each thread
        options = replace(options, threads=1)
    is_kubernetes = options.engine.on == "kubernetes"
    can_grow = options.engine.on == "ray" or (is_kubernetes and options.engine.pods.kind == "job")
    plan = plan_roles(options, counts, can_grow=can_grow)
    nnodes, num_servers = plan.nodes, plan.servers
    inner = replace(options, engine=EngineFlags(), nnodes=None)
    assert options.script is not None
    script = (options.script, *(options.arguments or ()))
    num_cpus = plan.ranks_per_node * (1 if options.threads is None else options.threads)
    if is_kubernetes:  # use the image's Python; each pod also runs a part of the servers
        words = words_of(replace(options, engine=EngineFlags()))
        command = ("paceline", "run", *words, *script)
        return [RunRole(name="ranks", command=command, num_nodes=nnodes, num_cpus=num_cpus, is_elastic=plan.is_elastic)]
    command = (sys.executable, "-m", "paceline", "run")
    words = words_of(replace(inner, job="worker") if num_servers else inner)
    ranks = RunRole(
        name="ranks",
        command=(*command, *words, *script),
        num_nodes=nnodes,
        num_cpus=num_cpus,
        files=() if options.module or (options.no_python and os.sep not in options.script) else (options.script,),
        is_elastic=plan.is_elastic,
        num_more=plan.more_nodes,
    )
    if not num_servers:
        return [ranks]
    inner = replace(inner, log_dir=None, module=False, no_python=False, max_ranks=None)  # options of the ranks only
    words = words_of(replace(inner, job="server", nnodes=nnodes))
    num_hosts = min(num_servers, nnodes)
    num_cpus = -(-num_servers // num_hosts)
    return [RunRole(name="servers", command=(*command, *words), num_nodes=num_hosts, num_cpus=num_cpus), ranks]


def _on_hosts(options: RunOptions, text: str) -> tuple[RunOptions, tuple[int, ...] | None]:
    """Return the options with the number of hosts as `nnodes`, and the number of ranks on each host, if given."""
    hosts = parse_hosts(text)
    if others := words_of(replace(options.engine, hosts=None, ssh_option=None, dry_run=False)):
        raise UsageError(f"{others[0]} is for --on, not for --hosts {text}. Leave {others[0]} out")
    if options.nnodes is not None:
        raise UsageError(f"--nodes {options.nnodes}: --hosts {text} has the number of nodes. Leave --nodes out")
    if hosts.num_ranks is not None and options.nproc_per_node is not None:
        raise UsageError(
            f"--nproc-per-node {options.nproc_per_node}: --hosts {text} has the numbers of ranks. Leave one of them out"
        )
    if hosts.num_ranks is not None:
        options = replace(options, nproc_per_node=max(hosts.num_ranks))
    return replace(options, nnodes=len(hosts.names)), hosts.num_ranks
