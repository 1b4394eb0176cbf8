"""``paceline run``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import options

CONTEXT = {
    "allow_interspersed_args": False,  # what follows the script is the script's
    "token_normalize_func": lambda name: name.replace("_", "-") if name.startswith("-") or "_" in name else name,
}
"""torchrun takes --nproc_per_node as well as --nproc-per-node, and so does this."""


def run(
    script: Annotated[str | None, typer.Argument(help="Script to run (with -m: module).", show_default=False)] = None,
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Arguments of the script, passed on as they are.", show_default=False)
    ] = None,
    strategy: Annotated[
        str | None,
        typer.Option(
            help="one-device, mirrored, central-storage, all-reduce, parameter-server, hybrid, pipeline or sharded; "
            "default: hybrid with --servers, else all-reduce for several processes, else one-device."
        ),
    ] = None,
    nproc_per_node: Annotated[int | None, typer.Option(help="Processes (ranks) on this machine; default 1.")] = None,
    stages: Annotated[
        int | None,
        typer.Option(help="pipeline: processes that the model's layers are cut over, one or two stages each."),
    ] = None,
    data_parallel: Annotated[
        int | None,
        typer.Option(
            help="pipeline, sharded: pipelines, or groups that shard the model, side by side, each with its part of "
            "the data; default 1."
        ),
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            help="pipeline: gpipe, 1f1b, interleaved, looped-bfs, interleaved-zero-bubble, zbv, dualpipev or auto "
            "(default: what is predicted to be fastest)."
        ),
    ] = None,
    microbatches: Annotated[
        str | None, typer.Option(help="pipeline: parts that a batch is cut into, or auto (default).")
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(help="pipeline: modules that begin a stage: layers.4,layers.8; default: by measured times."),
    ] = None,
    stage_memory: Annotated[
        str | None,
        typer.Option(help="pipeline: what a process may take for parameters, optimizer and activations: 4G, 500M."),
    ] = None,
    shard: Annotated[
        str | None,
        typer.Option(
            help="sharded: modules whose parameters are gathered at once: encoder.*,head (* is any one part of a "
            "name); default: blocks of lists and sequences, and large modules beside them."
        ),
    ] = None,
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module, as python -m takes it.")] = False,
    servers: Annotated[
        int | None, typer.Option(help="Parameter servers of the strategies that have them; default 1.")
    ] = None,
    consistency: Annotated[
        str | None,
        typer.Option(
            help="Of servers: sequential (parameter-server's default), bounded:N (bounded:4 is hybrid's) or eventual."
        ),
    ] = None,
    stale: Annotated[
        str | None, typer.Option(help="Stale gradients: accept (default), drop:N or compensate:STRENGTH.")
    ] = None,
    replicas: Annotated[
        int | None,
        typer.Option(
            help="parameter-server, hybrid: how many servers may die without loss, copies of what each holds; default "
            "0. mirrored, central-storage: replicas in the process; default one per device."
        ),
    ] = None,
    min_replicas: options.OptionalMinReplicas = None,
    non_finite: options.NonFinite = None,
    memory_limit: options.MemoryLimitSize = None,
    spill_dir: options.SpillDir = None,
    heartbeat_timeout: Annotated[
        float | None,
        typer.Option(
            min=0.5,
            help="Where there are servers: a process that gives no sign of life for so many seconds counts as dead; "
            "default 30.",
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(help="OMP_NUM_THREADS of each rank; default: the cores shared out, unless it is set already."),
    ] = None,
    log_dir: Annotated[
        Path | None, typer.Option(help="Folder for each rank's whole output: rank0.stdout, rank0.stderr, ...")
    ] = None,
    nnodes: Annotated[int | None, typer.Option(help="Machines that each run this command; default 1.")] = None,
    node_rank: Annotated[int | None, typer.Option(help="Which of them this is, from 0; default 0.")] = None,
    master_addr: Annotated[
        str | None, typer.Option(help="Address of node 0, where ranks meet; default 127.0.0.1 for one node.")
    ] = None,
    master_port: Annotated[
        int | None, typer.Option(help="Port to meet at; default a free one for one node, else 29500.")
    ] = None,
    cluster: Annotated[
        Path | None, typer.Option(help='Static cluster: file {"server": ["host:port", ...], "worker": [...]}.')
    ] = None,
    job: Annotated[str | None, typer.Option(help="--cluster: what this process is: server or worker.")] = None,
    index: Annotated[int | None, typer.Option(help="--cluster: which of that job, from 0.")] = None,
    filters: Annotated[
        str | None,
        typer.Option(
            help="Filters for what processes exchange: gradients quantize:4, to other ranks also top-k:0.01; rows of "
            "embeddings on servers key-caching,quantize:8,zstd; or none."
        ),
    ] = None,
    pull_filters: Annotated[
        str | None, typer.Option(help="Filters for rows pulled from servers; default: as --filters.")
    ] = None,
    filter_module: options.FilterModules = None,
    tls_cert: options.TLSCert = None,
    tls_key: options.TLSKey = None,
    tls_ca: options.TLSCa = None,
) -> None:
    """Run a PyTorch script under a strategy: on processes of this machine, or of several.

    Example: paceline run --strategy all-reduce --nproc-per-node 4 train.py --epochs 3

    Example: paceline run --strategy pipeline --stages 2 train.py

    Example: paceline run --strategy sharded --nproc-per-node 4 train.py

    Example: paceline run --strategy parameter-server --servers 2 --consistency bounded:4 --nproc-per-node 4 train.py
    """
    from paceline.launch import RunOptions, run_script
    from paceline.pipeline_options import PipelineFlags
    from paceline.tables.memory.limit import MemoryLimit

    status = run_script(
        RunOptions(
            script=script,
            arguments=tuple(arguments or ()),
            is_module=module,
            nproc_per_node=nproc_per_node,
            nnodes=nnodes,
            node_rank=node_rank,
            master_addr=master_addr,
            master_port=master_port,
            strategy=strategy,
            pipeline=PipelineFlags(
                stages=stages,
                data_parallel=data_parallel,
                schedule=schedule,
                microbatches=microbatches,
                split=split,
                stage_memory=stage_memory,
            ),
            shard=shard,
            servers=servers,
            consistency=consistency,
            stale=stale,
            replicas=replicas,
            min_replicas=min_replicas,
            non_finite=non_finite,
            memory_limit=MemoryLimit.parse(memory_limit, spill_dir),
            heartbeat_timeout_s=heartbeat_timeout,
            threads=threads,
            log_dir=log_dir,
            cluster=cluster,
            job=job,
            index=index,
            filters=filters,
            pull_filters=pull_filters,
            filter_modules=filter_module or (),
            tls=options.find_tls(tls_cert, tls_key, tls_ca),
        )
    )
    raise typer.Exit(status)
