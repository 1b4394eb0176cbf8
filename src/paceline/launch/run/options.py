"""The options of ``paceline run``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paceline.command_options import argument, option
from paceline.launch.flags import FilterModuleFlags, MemoryFlags, PushFlags, TLSFlags
from paceline.strategies import STRATEGIES, StrategyFlags


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The given options, unchecked; None for missing ones. Names and meanings are those of the command line."""

    script: str | None = argument("Script to run (with -m: module).", show_default=False)
    arguments: list[str] | None = argument("Arguments of the script, passed on as they are.", show_default=False)
    strategy: str | None = option(
        f"{', '.join([*STRATEGIES][:-1])} or {[*STRATEGIES][-1]}; "
        "default: hybrid with --servers, else all-reduce for several processes, else one-device."
    )
    nproc_per_node: int | None = option("Processes (ranks) on this machine; default 1.")
    flags: StrategyFlags = StrategyFlags()
    module: bool = option("SCRIPT is a module, as python -m takes it.", "-m", "--module", default=False)
    servers: int | None = option("Parameter servers of the strategies that have them; default 1.")
    consistency: str | None = option(
        "Of servers: sequential (parameter-server's default), bounded:N (bounded:4 is hybrid's) or eventual."
    )
    stale: str | None = option("Stale gradients: accept (default), drop:N or compensate:STRENGTH.")
    replicas: int | None = option(
        "parameter-server, hybrid: how many servers may die without loss, copies of what each holds; default "
        "0. mirrored, central-storage: replicas in the process; default one per device."
    )
    pushes: PushFlags = PushFlags()
    memory: MemoryFlags = MemoryFlags()
    heartbeat_timeout: float | None = option(
        "Where there are servers: a process that gives no sign of life for so many seconds counts as dead; default 30.",
        min=0.5,
    )
    threads: int | None = option(
        "OMP_NUM_THREADS of each rank; default: the cores shared out, unless it is set already."
    )
    log_dir: Path | None = option("Folder for each rank's whole output: rank0.stdout, rank0.stderr, ...")
    nnodes: int | None = option("Machines that each run this command; default 1.")
    node_rank: int | None = option("Which of them this is, from 0; default 0.")
    master_addr: str | None = option("Address of node 0, where ranks meet; default 127.0.0.1 for one node.")
    master_port: int | None = option("Port to meet at; default a free one for one node, else 29500.")
    cluster: Path | None = option('Static cluster: file {"server": ["host:port", ...], "worker": [...]}.')
    job: str | None = option("--cluster: what this process is: server or worker.")
    index: int | None = option("--cluster: which of that job, from 0.")
    filters: str | None = option(
        "Filters for what processes exchange: gradients quantize:4, to other ranks also top-k:0.01; rows of "
        "embeddings on servers key-caching,quantize:8,zstd; or none."
    )
    pull_filters: str | None = option("Filters for rows pulled from servers; default: as --filters.")
    filter_modules: FilterModuleFlags = FilterModuleFlags()
    """Servers import them all. Ranks import those of the filters in `filters` and `pull_filters`."""
    tls: TLSFlags = TLSFlags()
    """Of the servers, and of connections between ranks of several machines; without: those of the environment."""
