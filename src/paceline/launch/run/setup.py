"""Plan this launcher's part of a run: its ranks and servers, their addresses and their token."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.environment import environment, num_cores
from paceline.errors import AddressError, UsageError
from paceline.launch.engines.mpi import read_mpi_placement
from paceline.launch.engines.placement import Placement
from paceline.launch.engines.slurm import read_placement
from paceline.launch.run.node import wait_host, with_variables
from paceline.launch.run.options import RunOptions
from paceline.launch.run.plan import (
    ClusterFile,
    Layout,
    lay_out_node,
    lay_out_worker,
    read_cluster_file,
    servers_of_node,
)
from paceline.launch.share import Share
from paceline.meeting.credentials import job_token
from paceline.meeting.rendezvous import is_loopback, own_host, port_of_job
from paceline.strategies import STRATEGIES, ElasticOptions, StrategyChoice, choose_strategy, needs_servers
from paceline.transport import TLS, Address
from paceline.transport.addresses import LOOPBACK, bind_tcp
from paceline.transport.security.authentication import MAKE_TOKEN, check_or_make_token, check_token

PATIENCE_S = 300.0
"""Time limit for the start of all machines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
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
    num_cores: int
    """Number of cores for all ranks on this machine."""


def find_placement(options: RunOptions) -> Placement | None:
    """Return this launcher's placement by an engine, mpirun or srun, unless the options set it. Raises UsageError."""
    if options.cluster or options.master_addr or options.node_rank is not None:
        return None
    if options.nnodes is not None and options.job is None:
        return None
    # Under Slurm, mpirun itself uses srun to start one process per node, so Slurm's variables would be wrong.
    variables = environment()
    placement = Placement.of_environment(variables) or read_mpi_placement(variables) or read_placement(os.environ)
    if placement is None or placement.can_grow or options.job is not None:
        return placement
    return None if placement.num_launchers == 1 else placement


def plan_node(options: RunOptions, placement: Placement | None = None) -> Setup:
    """Plan one of `--nnodes` nodes or, with a `placement`, one launcher of a step."""
    tls = _find_tls(options)
    if placement is None:
        for name, value in (("--job", options.job), ("--index", options.index)):
            if value is not None:
                raise UsageError(
                    f"{name} {value} is for --cluster FILE, mpirun and srun. Pass --cluster too, or leave {name} out"
                )
        options = with_variables(options)
        layout = _lay_out_node(options)
    else:
        layout = _lay_out_launcher(options, placement)
    choice = _choose(options, layout.world_size)
    num_first_nodes = layout.world_size // len(layout.ranks)
    can_grow = placement is None or placement.can_grow
    layout = replace(layout, world_size=_find_max_ranks(options, choice, layout, can_grow=can_grow))
    if not layout.master_port:
        layout = _with_free_port(layout)
    elif layout.node == 0 and options.job != "server":
        _check_free(_bindable(Address("tcp", layout.master_addr, layout.master_port)), "--master-port or MASTER_PORT")
    nnodes = layout.world_size // len(layout.ranks)
    token = environment().token
    if nnodes == 1 and placement is None:
        token = check_or_make_token(token, "PACELINE_TOKEN")
    elif placement is not None and token is None:
        token = job_token(placement.job)
    else:
        token = _need_token(f"the ranks of {nnodes} nodes")
    share = None
    if choice.consistency is not None and (nnodes > 1 or placement is not None):
        share = _share_of_node(options, choice, layout, num_first_nodes, placement)
    elif options.job == "server":
        raise UsageError(f"--job server: strategy {choice.name} has no servers")
    return Setup(
        layout=None if options.job == "server" else layout,
        choice=choice,
        token=token,
        tls=tls,
        num_ranks=layout.world_size,
        share=share,
        num_cores=num_cores() if placement is None else placement.num_cores or num_cores(),
    )


def _lay_out_node(options: RunOptions) -> Layout:
    nnodes = 1 if options.nnodes is None else options.nnodes
    return lay_out_node(
        nproc_per_node=_num_processes(options, nnodes),
        nnodes=nnodes,
        node_rank=options.node_rank or 0,
        master_addr=options.master_addr,
        master_port=options.master_port,
        max_ranks=_max_ranks_of(options),
    )


def _max_ranks_of(options: RunOptions) -> int | None:
    return None if options.flags.elastic.min_ranks is None else options.max_ranks


def _find_max_ranks(options: RunOptions, choice: StrategyChoice, layout: Layout, *, can_grow: bool) -> int:
    """Return the largest number of ranks. If `can_grow`, more nodes may join an elastic training. Raises UsageError."""
    if options.max_ranks is None:
        return layout.world_size
    if not isinstance(choice.options, ElasticOptions):
        raise UsageError(f"--max-ranks {options.max_ranks}: needs --min-ranks N. Pass --min-ranks 1")
    if options.max_ranks < layout.world_size:
        raise UsageError(
            f"--max-ranks {options.max_ranks}: {layout.world_size} ranks are started. Pass a higher number"
        )
    if not can_grow:
        raise UsageError(
            f"--max-ranks {options.max_ranks}: the number of nodes is fixed. More nodes may join only on Ray, in a Job "
            "of Kubernetes (--kind job), or if you start paceline run on each node yourself. Leave it out"
        )
    return options.max_ranks


def _lay_out_launcher(options: RunOptions, placement: Placement) -> Layout:
    """Return the layout of a launcher in a step; for a launcher of servers, the layout of the first launcher."""
    has_ranks = options.job != "server"
    nnodes = placement.num_launchers if has_ranks else options.nnodes or 1
    # Servers and ranks may be two steps of one job. Both steps then compute the same port from the job.
    name = placement.job if options.job is not None else f"{placement.job}/{placement.step}"
    layout = lay_out_node(
        nproc_per_node=_num_processes(options, nnodes),
        nnodes=nnodes,
        node_rank=placement.launcher if has_ranks else 0,
        master_addr=placement.address,
        master_port=options.master_port or port_of_job(name),
        max_ranks=_max_ranks_of(options) if placement.can_grow else None,
    )
    num_ranks = len(layout.ranks)
    if placement.num_ranks is not None:
        index = placement.launcher if has_ranks else 0
        first, num_ranks = sum(placement.num_ranks[:index]), placement.num_ranks[index]
        layout = replace(layout, ranks=tuple(range(first, first + num_ranks)), world_size=sum(placement.num_ranks))
        layout = replace(layout, node_sizes=placement.num_ranks)
    first = placement.local_launcher * num_ranks
    return replace(
        layout,
        local_ranks=tuple(range(first, first + num_ranks)),
        local_world_size=placement.num_local_launchers * num_ranks,
    )


def _choose(options: RunOptions, num_ranks: int) -> StrategyChoice:
    return choose_strategy(
        options.strategy,
        processes=num_ranks,
        servers=options.servers,
        consistency=options.consistency,
        replicas=options.replicas,
        flags=options.flags,
    )


def _share_of_node(
    options: RunOptions, choice: StrategyChoice, layout: Layout, nnodes: int, placement: Placement | None
) -> Share:
    scheduler = Address("tcp", layout.master_addr, layout.master_port + 1)
    if options.job == "worker":  # the step with --job server runs the scheduler and all servers
        return Share(scheduler=scheduler.netloc, runs_scheduler=False, servers={}, patience_s=PATIENCE_S)
    if placement is None:
        launcher, num_launchers = layout.node, nnodes
    else:
        launcher, num_launchers = placement.launcher, placement.num_launchers
    host = wait_host(layout.master_addr, PATIENCE_S)
    bind = Address("tcp", host, scheduler.port)
    if launcher == 0:
        _check_free(bind, "the scheduler, at --master-port + 1")
    own_address = Address("tcp", host, 0).netloc
    return Share(
        scheduler=scheduler.netloc,
        runs_scheduler=launcher == 0,
        servers=dict.fromkeys(servers_of_node(choice.servers, num_launchers, launcher), own_address),
        bind=bind.netloc,
        patience_s=PATIENCE_S,
    )


def _num_processes(options: RunOptions, nnodes: int) -> int:
    """Return a node's number of processes: as requested, else the node's part of the strategy's number, else 1."""
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


def plan_cluster(options: RunOptions) -> Setup:
    tls = _find_tls(options)
    assert options.cluster is not None
    for name in ("nproc_per_node", "nnodes", "node_rank", "master_addr", "master_port", "servers", "max_ranks"):
        if getattr(options, name) is not None:
            raise UsageError(f"--cluster FILE contains the processes' addresses. Leave --{name.replace('_', '-')} out")
    cluster = read_cluster_file(options.cluster)
    job, index = cluster.check_task(options.job, options.index)
    num_servers = len(cluster.servers)
    servers = num_servers or (0 if needs_servers(options.strategy) else None)
    choice = _choose(replace(options, servers=servers), len(cluster.workers))
    token = _need_token(f"the processes of {options.cluster}")
    layout = None
    if job == "worker":
        layout = lay_out_worker(cluster, index)
        if index == 0 and len(cluster.workers) > 1:
            _check_free(_bindable(cluster.workers[0]), f"worker 0 of {options.cluster}")
    share = None
    if num_servers:
        share = _share_of(cluster, job, index, str(options.cluster))
    return Setup(
        layout=layout,
        choice=choice,
        token=token,
        tls=tls,
        num_ranks=len(cluster.workers),
        share=share,
        num_cores=num_cores(),
    )


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
        patience_s=PATIENCE_S,
    )


def coordinator_address(layout: Layout, *, offset: int = 0) -> Address:
    """Return the address of an elastic training's coordinator; on node 0, the address to bind.

    `offset` is added to the port, for another service of node 0.
    """
    address = Address("tcp", layout.master_addr, layout.master_port + offset)
    return address if layout.node else _bindable(address)


def _bindable(place: Address) -> Address:
    """Return the address to bind for a public address. On its host, the host's name may resolve to loopback."""
    return Address("tcp", own_host(place.host), place.port)


def _find_tls(options: RunOptions) -> TLS | None:
    """Return the TLS settings. Raises UsageError if they are invalid."""
    tls = options.tls.load()
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
        raise UsageError(f"node 0 is {layout.master_addr}: pass --master-port too, a free port of this machine")
    with socket.socket(socket.AF_INET6 if ":" in layout.master_addr else socket.AF_INET) as probe:
        probe.bind((layout.master_addr, 0))
        port = int(probe.getsockname()[1])
    return replace(layout, master_port=port)


@dataclass(frozen=True, slots=True)
class RolePlan:
    """The numbers of processes in a run that an engine starts."""

    ranks_per_node: int
    servers: int
    nodes: int
    is_elastic: bool
    """Whether the ranks of other nodes continue if a node is lost."""
    more_nodes: int
    """Number of nodes that may join later."""


def plan_roles(options: RunOptions, num_ranks: Sequence[int] | None = None, *, can_grow: bool = False) -> RolePlan:
    """Check the options of a run that an engine starts, and return its numbers of processes. Raises UsageError.

    `num_ranks` has the number of ranks of each node, if the user gives them. With `can_grow`, the engine can add nodes
    to a run.
    """
    for name in ("cluster", "node_rank", "master_addr", "job", "index"):
        if getattr(options, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            engine = f"--on {options.engine.on}" if options.engine.hosts is None else "--hosts"
            raise UsageError(f"{engine}: the engine places the processes. Leave {flag} out")
    layout = _lay_out_node(replace(options, master_addr=LOOPBACK))
    num_nodes = options.nnodes or 1
    choice = _choose(options, layout.world_size if num_ranks is None else sum(num_ranks))
    max_ranks = _find_max_ranks(options, choice, layout, can_grow=can_grow)
    return RolePlan(
        ranks_per_node=len(layout.ranks),
        servers=choice.servers,
        nodes=num_nodes,
        is_elastic=isinstance(choice.options, ElasticOptions) and max_ranks >= 2 * len(layout.ranks),
        more_nodes=max_ranks // len(layout.ranks) - num_nodes if can_grow else 0,
    )
