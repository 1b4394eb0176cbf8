"""The options of ``paceline run``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paceline.command_options import argument, in_panel, option
from paceline.launch.engines.options import EngineFlags
from paceline.launch.flags import (
    RENDEZVOUS_PORT,
    FilterModuleFlags,
    MemoryFlags,
    ObserveFlags,
    PushFlags,
    TimelineFlags,
    TLSFlags,
)
from paceline.strategies import STRATEGIES, StrategyFlags

AUTO = "auto"
"""The name with which ``paceline run`` chooses the strategy."""
_COMMON, _SERVERS, _FAILURES, _MACHINES = "Common options", "Servers and traffic", "Failures", "Several machines"


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options as the user gave them, unchecked; None for missing options. ``paceline run --help`` explains them."""

    script: str | None = argument("Script to run (with -m: module).", show_default=False)
    arguments: list[str] | None = argument("Arguments of the script, passed unchanged.", show_default=False)
    strategy: str | None = option(
        f"{', '.join(STRATEGIES)} or {AUTO} (the fastest by prediction, as in 'paceline explain'). "
        "Default: hybrid with --servers, else all-reduce for several processes or --min-ranks, else one-device.",
        panel=_COMMON,
    )
    nproc_per_node: int | None = option(
        f"Processes (ranks) on this machine; default 1, or 2 with --strategy {AUTO}.", panel=_COMMON
    )
    flags: StrategyFlags = StrategyFlags()
    module: bool = option("SCRIPT is a module, as for python -m.", "-m", "--module", default=False, panel=_COMMON)
    no_python: bool = option(
        "SCRIPT is a program, which is started without Python.", "--no-python", default=False, panel=_COMMON
    )
    servers: int | None = option("Parameter servers, for strategies that use them; default 1.", panel=_COMMON)
    consistency: str | None = option(
        "Consistency of servers: sequential (default of parameter-server), bounded:N (hybrid: bounded:4) or eventual.",
        panel=_COMMON,
    )
    stale: str | None = option("Stale gradients: accept (default), drop:N or compensate:STRENGTH.", panel=_SERVERS)
    replicas: int | None = option(
        "parameter-server, hybrid: additional copies of each server's data, so no data is lost if at most this number "
        "of servers die; default 0. mirrored, central-storage: replicas in the process; default one per device.",
        panel=_FAILURES,
    )
    pushes: PushFlags = in_panel(_FAILURES, default=PushFlags())
    memory: MemoryFlags = in_panel(_SERVERS, default=MemoryFlags())
    heartbeat_timeout: float | None = option(
        "With servers or --min-ranks: seconds without a heartbeat before a process, or a node, is declared dead; "
        "default 30.",
        min=0.5,
        panel=_FAILURES,
    )
    snapshot_dir: Path | None = option(
        "one-device, all-reduce: write checkpoints of the training to this directory, and continue from the last one.",
        panel=_FAILURES,
    )
    snapshot_every: str | None = option(
        "With --snapshot-dir: time between two checkpoints, such as 30s, 5m or 1h; default 10m.", panel=_FAILURES
    )
    threads: int | None = option(
        "OMP_NUM_THREADS of each rank; default: its share of the cores, unless the variable is set.", panel=_COMMON
    )
    log_dir: Path | None = option(
        "Folder for the complete output of each rank: rank0.stdout, rank0.stderr, ...", panel=_COMMON
    )
    flight_recorder: Path | None = option(
        "Folder for the last collectives of each rank after a failure, for torch.distributed.flight_recorder.",
        panel=_FAILURES,
    )
    timeline: TimelineFlags = in_panel(_COMMON, default=TimelineFlags())
    timeline_operators: bool = option(
        "With --timeline: run torch.profiler in these steps, to show PyTorch's operators too.",
        "--timeline-operators",
        default=False,
        panel=_COMMON,
    )
    nnodes: int | None = option(
        "Number of machines that each run this command, or of nodes with --on; default 1.",
        "--nnodes",
        "--nodes",
        panel=_MACHINES,
    )
    node_rank: int | None = option("Number of this machine, from 0; default 0.", panel=_MACHINES)
    master_addr: str | None = option(
        "Address of node 0, where the ranks meet; default 127.0.0.1 for one node.", panel=_MACHINES
    )
    master_port: int | None = option(
        f"Port where the ranks meet; default: a free port for one node, else {RENDEZVOUS_PORT}.", panel=_MACHINES
    )
    cluster: Path | None = option(
        'Static cluster: file {"server": ["host:port", ...], "worker": [...]}.', panel=_MACHINES
    )
    max_ranks: int | None = option(
        "With --min-ranks: more nodes than --nnodes may join, up to this many ranks on all nodes; default: no more.",
        panel=_MACHINES,
    )
    engine: EngineFlags = EngineFlags()
    job: str | None = option(
        "--cluster, or separate steps of srun: the job of this process, server or worker.", panel=_MACHINES
    )
    index: int | None = option("--cluster: number of this process within its job, from 0.", panel=_MACHINES)
    filters: str | None = option(
        "Filters of messages between processes: gradients quantize:4, between ranks also top-k:0.01; rows of "
        "embeddings on servers key-caching,quantize:8,zstd; or none.",
        panel=_SERVERS,
    )
    pull_filters: str | None = option("Filters for rows pulled from servers; default: as --filters.", panel=_SERVERS)
    filter_modules: FilterModuleFlags = in_panel(_SERVERS, default=FilterModuleFlags())
    """Servers import all these modules. Ranks import the modules named in `filters` and `pull_filters`."""
    observe: ObserveFlags = ObserveFlags()
    tls: TLSFlags = in_panel(_MACHINES, default=TLSFlags())
    """TLS for servers, and for ranks on several machines. By default, the environment has the settings."""

    def snapshot_variables(self) -> dict[str, str]:
        """Return the ranks' variables for snapshots."""
        given = {"PACELINE_SNAPSHOT_DIR": self.snapshot_dir, "PACELINE_SNAPSHOT_EVERY": self.snapshot_every}
        return {name: str(value) for name, value in given.items() if value is not None}
