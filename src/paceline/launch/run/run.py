"""``paceline run``: start a script as the ranks of a strategy, with its servers, and wait until it ends.

This module does not import torch; ``paceline.torch.strategy()`` reads the ranks' environments.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.environment import environment, num_cores
from paceline.errors import AddressError, UsageError
from paceline.filters import parse_filters
from paceline.filters.gradients import gradient_filters
from paceline.filters.modules import with_modules
from paceline.launch.local import Share, wait_cluster
from paceline.launch.run.blame import Tracebacks
from paceline.launch.run.elastic import ElasticRun
from paceline.launch.run.loop import RunLoop, Signals
from paceline.launch.run.node import wait_host, with_variables
from paceline.launch.run.options import RunOptions
from paceline.launch.run.plan import (
    ClusterFile,
    Layout,
    RankPlan,
    command_of,
    lay_out_node,
    lay_out_worker,
    plan_ranks,
    read_cluster_file,
    servers_of_node,
)
from paceline.launch.run.processes import Rank, RankProcesses
from paceline.launch.run.servers import RunServers
from paceline.launch.run.streams import Screen, check_log_dir
from paceline.meeting.rendezvous import is_loopback, own_host
from paceline.protocol import Accept, parse_stale_policy
from paceline.ps import messages
from paceline.ps.client.filtered import filters_of_dense_tables
from paceline.strategies import STRATEGIES, ElasticOptions, StrategyChoice, StrategySpec, choose_strategy, needs_servers
from paceline.tables.memory.limit import MemoryLimit
from paceline.transport import TLS, Address, SocketTransport, make_token
from paceline.transport.addresses import bind_tcp
from paceline.transport.security.authentication import MAKE_TOKEN, check_token

_PATIENCE_S = 300.0
_OPTIONS_OF_RUN = {"--nproc-per-node", "--nproc_per_node", "--nnodes"}  # scripts rarely have options with these names
_DATA_SUFFIXES = {".csv", ".gz", ".jsonl", ".npy", ".npz", ".parquet", ".svm", ".tsv", ".txt", ".vw", ".zst"}
_MOST_SCRIPT_BYTES = 16 << 20
_HEARTBEAT_TIMEOUT_S = 30.0
"""Timeout for stopped or disconnected processes.

It is long, because a rank may be busy; broken connections reveal killed processes.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Setup:
    """The checked options of a run."""

    layout: Layout | None
    """The ranks of this launcher; None for a server of a static cluster."""
    choice: StrategyChoice
    token: str
    tls: TLS | None
    num_ranks: int
    """Number of ranks on all machines."""
    share: Share | None
    """This launcher's part of a cluster that several machines share; None: the whole cluster."""


def run_script(options: RunOptions) -> int:
    """Run a script; return its status. Raises UsageError (before any process starts), PeerError (if one fails)."""
    memory_limit = options.memory.parse()
    _check_script(options)
    if options.threads is not None and options.threads < 1:
        raise UsageError(f"--threads {options.threads}: expected 1 or more")
    setup = _plan_cluster(options) if options.cluster is not None else _plan_node(options)
    stale = str(Accept() if options.stale is None else parse_stale_policy(options.stale))
    choice = setup.choice
    if isinstance(choice.options, ElasticOptions):
        _check_elastic(options)
    filters, pull_filters = _find_filters(options, choice.spec)
    settings: messages.ClusterSettings | None = None
    if choice.consistency is not None:
        settings = options.pushes.make_settings(
            num_servers=choice.servers,
            num_workers=setup.num_ranks,
            consistency=str(choice.consistency),
            stale=stale,
            replicas=choice.server_replicas,
            heartbeat_timeout_s=options.heartbeat_timeout or _HEARTBEAT_TIMEOUT_S,
        )
    else:
        _check_no_servers(options, memory_limit, choice.name)
    if memory_limit is not None and memory_limit.warning is not None:
        print(f"paceline run: {memory_limit.warning}", file=sys.stderr)
    if options.log_dir is not None:
        check_log_dir(options.log_dir)
    with contextlib.ExitStack() as stack:
        servers: RunServers | None = None
        scheduler: str | None = None
        if settings is not None:
            if setup.share is not None and not setup.share.runs_scheduler and not setup.share.servers:
                scheduler = f"tcp://{setup.share.scheduler}"
                wait_cluster(SocketTransport(setup.token, tls=setup.tls), scheduler, _PATIENCE_S)
            else:
                servers = stack.enter_context(
                    RunServers.start(
                        settings,
                        memory_limit=memory_limit,
                        token=setup.token,
                        tls=setup.tls,
                        share=setup.share,
                        filter_modules=options.filter_modules.names(options.filters, options.pull_filters),
                    )
                )
                scheduler = servers.scheduler
        if setup.layout is None:
            assert servers is not None
            assert setup.share is not None
            print(f"paceline run: server {options.index} is ready at {setup.share.scheduler}", file=sys.stderr)
            servers.serve()
            return 0
        status = _run_ranks(options, setup, setup.layout, filters, pull_filters, scheduler, servers)
        if status == 0 and servers is not None:
            servers.wait_workers()
        return status


def _find_filters(options: RunOptions, strategy: StrategySpec) -> tuple[str | None, str | None]:
    """Return the ranks' filters and their filters of pulled rows, with the modules to import. Raises UsageError."""
    pushed, pulled = options.filters or "", options.pull_filters
    options.filter_modules.load(options.filters, options.pull_filters)
    chain = parse_filters(pushed)
    if pulled is not None:
        parse_filters(pulled)
        if not strategy.has_servers:
            raise UsageError(f"--pull-filters {pulled}: {strategy.name} has no embeddings on servers. Leave it out")
    if chain and strategy.filters == ("tables",):
        filters_of_dense_tables(pushed)
    elif chain and strategy.filters == ("gradients",):
        gradient_filters(pushed)
    elif chain and not strategy.filters:
        reason = "is one process" if strategy.is_one_process else "exchanges no gradients that filters apply to"
        raise UsageError(f"--filters {pushed}: strategy {strategy.name} {reason}. Leave it out")
    return with_modules(pushed) if chain else None, None if pulled is None else with_modules(pulled)


def _run_ranks(
    options: RunOptions,
    setup: _Setup,
    layout: Layout,
    filters: str | None,
    pull_filters: str | None,
    scheduler: str | None,
    servers: RunServers | None,
) -> int:
    assert options.script is not None
    plans = plan_ranks(
        layout,
        setup.choice,
        os.environ,
        token=setup.token,
        tls=setup.tls,
        scheduler=scheduler,
        filters=filters,
        pull_filters=pull_filters,
        threads=options.threads,
        cores=num_cores(),
    )
    elastic_options = setup.choice.options if isinstance(setup.choice.options, ElasticOptions) else None
    command = command_of(sys.executable, options.script, options.arguments or (), is_module=options.module)
    is_alone = layout.world_size == 1
    screen, tracebacks = Screen(labelled=not is_alone), Tracebacks()
    with contextlib.ExitStack() as stack:
        processes = RankProcesses()
        stack.callback(processes.close)
        with Signals(processes) as signals:
            # A single rank inherits the standard streams, which may be a terminal.
            captured = not is_alone or options.log_dir is not None or elastic_options is not None

            def start(*plans: RankPlan) -> Rank:
                processes.start(command, plans, screen, tracebacks, captured=captured, log_dir=options.log_dir)
                return processes.ranks[-1]

            elastic: ElasticRun | None = None
            if elastic_options is None:
                start(*plans)
            else:
                address = Address("tcp", layout.master_addr, layout.master_port)
                elastic = ElasticRun(elastic_options, plans, start, address=address, token=setup.token, tls=setup.tls)
                stack.callback(elastic.close)
                elastic.start_all()
            if signals.first is not None:  # the signal arrived before all ranks were started
                processes.signal(signals.first, groups=True)
            loop = RunLoop(
                processes,
                screen,
                tracebacks,
                world_size=layout.world_size,
                log_dir=options.log_dir,
                find_lost_server=next((found.failure for found in (servers, elastic) if found), lambda: None),
                elastic=elastic,
            )
            return loop.run(signals)


# Checks before the start of any process.


def _check_script(options: RunOptions) -> None:
    script = options.script
    if script is None:
        if options.job == "server" and options.cluster is not None:
            return
        raise UsageError("no script. Pass its path, as in paceline run [options] SCRIPT [arguments of the script]")
    if options.job == "server":
        raise UsageError(f"--job server runs no script. Leave {script} out")
    if options.module:
        _check_module(script)
    elif not Path(script).exists():
        raise UsageError(f"no script {script}. Pass options of 'paceline run' before the script and its own after it")
    elif Path(script).is_dir() and not (Path(script) / "__main__.py").exists():
        raise UsageError(f"{script} is a folder without a __main__.py. Pass a script")
    elif not _is_python(Path(script)):
        raise UsageError(f"{script} is not a Python script: pass a script, or use 'paceline train' for data")
    for name in _OPTIONS_OF_RUN.intersection(options.arguments or ()):
        print(
            f"paceline run: {name} after {script} is an argument of the script. Pass options of 'paceline run' before "
            "the script",
            file=sys.stderr,
        )


def _is_python(script: Path) -> bool:
    """Return False for a file of data, by its ending, and for text with an invalid syntax unless it ends in ``.py``."""
    if script.suffix.startswith(".py") or script.is_dir() or zipfile.is_zipfile(script):
        return script.suffix not in _DATA_SUFFIXES
    if script.suffix in _DATA_SUFFIXES or script.stat().st_size > _MOST_SCRIPT_BYTES:
        return False
    try:
        compile(script.read_bytes(), str(script), "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    return True


def _check_elastic(options: RunOptions) -> None:
    for name, value in (("--nnodes", options.nnodes), ("--cluster", options.cluster), ("--filters", options.filters)):
        if value is not None and value not in (1, "none"):
            raise UsageError(f"{name} {value}: not supported with --min-ranks. Leave it out")


def _check_no_servers(options: RunOptions, memory_limit: MemoryLimit | None, strategy: str) -> None:
    given = {
        "--stale": options.stale,
        "--min-replicas": options.pushes.min_replicas,
        "--non-finite": options.pushes.non_finite,
        "--memory-limit": None if memory_limit is None else memory_limit.num_bytes,
        "--heartbeat-timeout": options.heartbeat_timeout,
    }
    for name, value in given.items():
        if value is not None:
            shown = f"{value:g}" if isinstance(value, float) else value
            raise UsageError(f"strategy {strategy} has no servers. Leave {name} {shown} out")


def _check_module(name: str) -> None:
    """Find a module like ``python -m``, but without running the packages that contain it. Raises UsageError."""
    places: list[str] | None = None
    if all(part.isidentifier() for part in name.split(".")):
        before, sys.path[:] = list(sys.path), [os.getcwd(), *sys.path]
        try:
            found = None
            for depth in range(1, name.count(".") + 2):
                part = ".".join(name.split(".")[:depth])
                specs = (finder.find_spec(part, places) for finder in sys.meta_path if hasattr(finder, "find_spec"))
                found = next((spec for spec in specs if spec is not None), None)
                if found is None:
                    break
                places = None if found.submodule_search_locations is None else list(found.submodule_search_locations)
                if places is None and depth <= name.count("."):
                    found = None
                    break
            if found is not None:
                return
        finally:
            sys.path[:] = before
    raise UsageError(f"no module {name}. Pass a module that Python can import from this folder, such as package.module")


def _plan_node(options: RunOptions) -> _Setup:
    tls = _find_tls(options)
    for name, value in (("--job", options.job), ("--index", options.index)):
        if value is not None:
            raise UsageError(f"{name} {value} is for --cluster FILE. Pass --cluster too, or leave {name} out")
    options = with_variables(options)
    nnodes = 1 if options.nnodes is None else options.nnodes
    layout = lay_out_node(
        nproc_per_node=_num_processes(options, nnodes),
        nnodes=nnodes,
        node_rank=options.node_rank or 0,
        master_addr=options.master_addr,
        master_port=options.master_port,
    )
    choice = choose_strategy(
        options.strategy,
        processes=layout.world_size,
        servers=options.servers,
        consistency=options.consistency,
        replicas=options.replicas,
        flags=options.flags,
    )
    if not layout.master_port:
        layout = _with_free_port(layout)
    elif layout.node == 0:
        _check_free(_bindable(Address("tcp", layout.master_addr, layout.master_port)), "--master-port")
    if nnodes == 1:
        token = environment().token
        token = make_token() if token is None else check_token(token, "PACELINE_TOKEN")
        return _Setup(layout=layout, choice=choice, token=token, tls=tls, num_ranks=layout.world_size, share=None)
    token = _need_token(f"the ranks of {nnodes} nodes")
    share = None
    if choice.consistency is not None:
        scheduler = Address("tcp", layout.master_addr, layout.master_port + 1)
        host = wait_host(layout.master_addr, _PATIENCE_S)
        own_address = Address("tcp", host, 0).netloc
        bind = Address("tcp", host, scheduler.port)
        if layout.node == 0:
            _check_free(bind, "the scheduler, at --master-port + 1")
        share = Share(
            scheduler=scheduler.netloc,
            runs_scheduler=layout.node == 0,
            servers=dict.fromkeys(servers_of_node(choice.servers, nnodes, layout.node), own_address),
            bind=bind.netloc,
            patience_s=_PATIENCE_S,
        )
    return _Setup(layout=layout, choice=choice, token=token, tls=tls, num_ranks=layout.world_size, share=share)


def _num_processes(options: RunOptions, nnodes: int) -> int:
    """Return the number of processes of a node: the requested number, else a share of the strategy's, else 1."""
    if options.nproc_per_node is not None:
        return options.nproc_per_node
    spec = STRATEGIES.get(options.strategy or "")
    if spec is None or spec.choose_options is None or not spec.flags_set_processes:
        return 1
    chosen = spec.choose_options(options.flags.given(), None)
    assert chosen is not None
    needed = chosen.num_processes
    if needed % nnodes:
        raise UsageError(
            f"{needed} processes of a {spec.name} cannot be divided equally among {nnodes} nodes. Choose other --stages"
        )
    return needed // nnodes


def _plan_cluster(options: RunOptions) -> _Setup:
    tls = _find_tls(options)
    assert options.cluster is not None
    for name in ("nproc_per_node", "nnodes", "node_rank", "master_addr", "master_port", "servers"):
        if getattr(options, name) is not None:
            raise UsageError(f"--cluster FILE contains the processes' addresses. Leave --{name.replace('_', '-')} out")
    cluster = read_cluster_file(options.cluster)
    job, index = cluster.check_task(options.job, options.index)
    num_servers = len(cluster.servers)
    choice = choose_strategy(
        options.strategy,
        processes=len(cluster.workers),
        servers=num_servers or (0 if needs_servers(options.strategy) else None),
        consistency=options.consistency,
        replicas=options.replicas,
        flags=options.flags,
    )
    token = _need_token(f"the processes of {options.cluster}")
    layout = None
    if job == "worker":
        layout = lay_out_worker(cluster, index)
        if index == 0 and len(cluster.workers) > 1:
            _check_free(_bindable(cluster.workers[0]), f"worker 0 of {options.cluster}")
    share = None
    if num_servers:
        share = _share_of(cluster, job, index, str(options.cluster))
    return _Setup(layout=layout, choice=choice, token=token, tls=tls, num_ranks=len(cluster.workers), share=share)


def _share_of(cluster: ClusterFile, job: str, index: int, name: str) -> Share:
    first = cluster.servers[0]
    servers: dict[int, str] = {}
    if job == "server":
        bind = _bindable(cluster.servers[index])
        _check_free(bind, f"server {index} of {name}")
        # The scheduler uses the first server's address, and the first server uses a free port.
        servers[index] = Address("tcp", bind.host, 0 if index == 0 else bind.port).netloc
    return Share(
        scheduler=first.netloc,
        runs_scheduler=job == "server" and index == 0,
        servers=servers,
        bind=_bindable(first).netloc if job == "server" and index == 0 else "",
        patience_s=_PATIENCE_S,
    )


def _bindable(place: Address) -> Address:
    """Return the address to bind for a public address, because a host's own name may resolve to loopback."""
    return Address("tcp", own_host(place.host), place.port)


def _find_tls(options: RunOptions) -> TLS | None:
    """Return the TLS settings from the options, else from the environment. Raises UsageError if they are invalid."""
    settings = environment()
    tls = options.tls.load() or TLS.of_files(settings.tls_cert, settings.tls_key, settings.tls_ca)
    if tls is not None:
        tls.server_context()
        tls.client_context()
    return tls


def _need_token(user: str) -> str:
    token = environment().token
    if token is None:
        raise UsageError(
            f"no token for {user}. Set PACELINE_TOKEN to the same secret on all machines (create it: {MAKE_TOKEN})"
        )
    return check_token(token, "PACELINE_TOKEN")


def _check_free(place: Address, purpose: str) -> None:
    """Raise UsageError if the address cannot be bound."""
    try:
        for listening in bind_tcp(place):
            listening.close()
    except AddressError as error:
        reason = str(error).partition("; ")[0]
        raise UsageError(f"{purpose}: {reason}. Choose a free address") from None


def _with_free_port(layout: Layout) -> Layout:
    if not is_loopback(layout.master_addr):
        raise UsageError(f"--master-addr {layout.master_addr}: pass --master-port too, a free port of this machine")
    with socket.socket(socket.AF_INET6 if ":" in layout.master_addr else socket.AF_INET) as probe:
        probe.bind((layout.master_addr, 0))
        port = int(probe.getsockname()[1])
    return replace(layout, master_port=port)
