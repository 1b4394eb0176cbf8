"""Plan the ranks that ``paceline run`` starts on this machine, and read the file of a static cluster.

The file, ``{"server": ["host:port", …], "worker": ["host:port", …]}``, has the format of ``cluster`` in TensorFlow's
TF_CONFIG. Each process gets its job and its index as options. Pure, except for the file and the name of this host.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.errors import AddressError, UsageError
from paceline.launch.flags import RENDEZVOUS_PORT
from paceline.strategies import MOST_PROCESSES, StrategyChoice
from paceline.transport import TLS, Address
from paceline.transport.addresses import LOOPBACK

# Variables from another launcher, or from an outer run, do not apply to the ranks.
_FOREIGN = ("TORCHELASTIC_", "GROUP_", "ROLE_")
_OWN = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "PACELINE_TLS_CERT", "PACELINE_TLS_KEY", "PACELINE_TLS_CA",
    "PACELINE_ROLE", "PACELINE_SCHEDULER", "PACELINE_TOKEN", "PACELINE_STRATEGY", "PACELINE_REPLICAS",
    "PACELINE_FILTERS", "PACELINE_PULL_FILTERS", "PACELINE_STRATEGY_OPTIONS",
    "PACELINE_INCARNATION", "PACELINE_PLACEMENT",
)  # fmt: skip


JOBS = ("server", "worker")
_WANTED = 'expected {"server": ["host:port", ...], "worker": ["host:port", ...]}'
_ELSEWHERE = {
    "ps": 'TensorFlow\'s "ps" is "server" here',
    "chief": 'TensorFlow\'s "chief" is the first "worker" here',
    "master": 'TensorFlow\'s "master" is the first "worker" here',
    "cluster": 'pass the object under "cluster", without "task"',
    "task": "pass the task as --job and --index",
}


@dataclass(frozen=True, slots=True)
class ClusterFile:
    """The checked addresses of all processes."""

    servers: tuple[Address, ...]
    """The servers' addresses; the scheduler listens at the first address."""
    workers: tuple[Address, ...]
    """The workers' addresses. All ranks connect to the first address. The ports of the others are not used."""

    def check_task(self, job: str | None, index: int | None) -> tuple[str, int]:
        """Return job and index after checking that the cluster has this process. Raises UsageError."""
        if job is None or index is None:
            raise UsageError("--cluster: pass --job server|worker and --index N too, for this process")
        if job not in JOBS:
            raise UsageError(f"--job {job}: expected one of {', '.join(JOBS)}")
        count = len(self.servers if job == "server" else self.workers)
        if not 0 <= index < count:
            hint = f"expected a number from 0 to {count - 1}" if count else "add its addresses to the file"
            raise UsageError(f"--job {job} --index {index}: the cluster has {count} of that job, {hint}")
        return job, index


def read_cluster_file(path: Path) -> ClusterFile:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a text file"
        raise UsageError(f"--cluster {path}: cannot read it: {reason}") from None
    return parse_cluster(text, str(path))


def parse_cluster(text: str, name: str) -> ClusterFile:
    """Parse and check the description of a cluster in JSON. Errors call it `name`. Raises UsageError."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{name} is not valid JSON ({error}): {_WANTED}") from None
    if not isinstance(found, dict):
        raise UsageError(f"{name} holds {type(found).__name__}: {_WANTED}")
    for key in found:
        if key not in JOBS:
            raise UsageError(f"{name} has a job {key!r}: {_ELSEWHERE.get(key, _WANTED)}")
    servers, workers = (_addresses(found.get(job, []), job, name) for job in JOBS)
    if not workers:
        raise UsageError(f'{name} has no worker: {_WANTED}; "server" may be missing')
    everywhere: dict[str, str] = {}
    for job, places in (("server", servers), ("worker", workers)):
        for index, place in enumerate(places):
            task = f"{job} {index}"
            other = everywhere.setdefault(place.netloc, task)
            if other != task:
                raise UsageError(
                    f"{name} has the address {place.netloc} twice, for {other} and {task}. Use different addresses"
                )
    return ClusterFile(servers, workers)


def _addresses(found: Any, job: str, name: str) -> tuple[Address, ...]:
    if not isinstance(found, Sequence) or isinstance(found, str):
        raise UsageError(f"{name} has {found!r} for {job!r}, expected a list of addresses: {_WANTED}")
    return tuple(_address(address, f"{job} {index}", name) for index, address in enumerate(found))


def _address(found: Any, task: str, name: str) -> Address:
    try:
        place = Address.parse(found) if isinstance(found, str) else None
    except AddressError:
        place = None
    if place is None or place.scheme != "tcp" or not place.port:
        raise UsageError(f"{name} has {found!r} for {task}: expected host:port with a port from 1 to 65535")
    return place


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The ranks of this launcher, and the address to which all ranks connect at their start."""

    ranks: tuple[int, ...]
    local_ranks: tuple[int, ...]
    """The local number of each rank on this host, in the order of `ranks`."""
    world_size: int
    local_world_size: int
    node: int
    """Number of this launcher among all launchers (torchrun's ``GROUP_RANK``)."""
    node_sizes: tuple[int, ...] = ()
    """Number of ranks of each launcher; empty if all launchers have the same number."""
    master_addr: str
    master_port: int
    """The port; 0 means a free port, chosen later."""

    def with_ranks(self, num_ranks: int) -> Layout:
        """Return the layout of one node with another number of ranks."""
        ranks = tuple(range(num_ranks))
        return replace(self, ranks=ranks, local_ranks=ranks, world_size=num_ranks, local_world_size=num_ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """One process to start: its rank and its complete environment."""

    rank: int
    environment: dict[str, str]
    log_prefix: str
    """The beginning of the names of the rank's log files, which end with ``stdout`` and ``stderr``."""


def lay_out_node(
    *,
    nproc_per_node: int,
    nnodes: int,
    node_rank: int,
    master_addr: str | None,
    master_port: int | None,
    max_ranks: int | None = None,
) -> Layout:
    """Return the ranks of a node. Further nodes, up to `max_ranks` ranks, may join an elastic training."""
    for name, value in (("--nproc-per-node", nproc_per_node), ("--nnodes", nnodes)):
        if value < 1:
            raise UsageError(f"{name} {value}: expected 1 or more")
        if value > MOST_PROCESSES:
            raise UsageError(f"{name} {value}: expected at most {MOST_PROCESSES:,}")
    most = nnodes if max_ranks is None else max(max_ranks // nproc_per_node, nnodes)
    if not 0 <= node_rank < most:
        raise UsageError(
            f"--node-rank {node_rank}: there are {most} nodes, expected a number from 0 to {most - 1} (with "
            "PET_NNODES: PET_NODE_RANK)"
        )
    if most > nnodes == 1 and not master_addr:
        raise UsageError(
            f"--max-ranks {max_ranks}: more nodes may join, so --master-addr, this node's address, is missing. "
            f"Pass --master-addr or, for ranks on this machine only, --nproc-per-node {max_ranks} without --max-ranks"
        )
    if most > 1 and not master_addr:
        raise UsageError(f"{most} nodes: pass --master-addr, node 0's address (with PET_NNODES: PET_MASTER_ADDR)")
    if master_port is None:
        master_port = 0 if most == 1 else RENDEZVOUS_PORT
    elif not 1 <= master_port <= 65534:
        raise UsageError(f"--master-port {master_port}: expected a port from 1 to 65534")
    first = node_rank * nproc_per_node
    return Layout(
        ranks=tuple(range(first, first + nproc_per_node)),
        local_ranks=tuple(range(nproc_per_node)),
        world_size=nnodes * nproc_per_node,
        local_world_size=nproc_per_node,
        node=node_rank,
        master_addr=master_addr or LOOPBACK,
        master_port=master_port,
    )


def lay_out_worker(cluster: ClusterFile, index: int) -> Layout:
    """Return the layout of worker `index` in a cluster file. All ranks connect to worker 0 at their start."""
    host = cluster.workers[index].host
    neighbours = [i for i, place in enumerate(cluster.workers) if place.host == host]
    first = cluster.workers[0]
    return Layout(
        ranks=(index,),
        local_ranks=(neighbours.index(index),),
        world_size=len(cluster.workers),
        local_world_size=len(neighbours),
        node=index,
        master_addr=first.host,
        master_port=first.port,
    )


def servers_of_node(servers: int, nnodes: int, node_rank: int) -> tuple[int, ...]:
    """Return the numbers of the servers that a node starts, assigned round robin. Nodes that join later start none."""
    return tuple(range(node_rank, servers, nnodes)) if node_rank < nnodes else ()


def plan_ranks(
    layout: Layout,
    choice: StrategyChoice,
    inherited: Mapping[str, str],
    *,
    token: str,
    scheduler: str | None,
    threads: int | None,
    cores: int,
    tls: TLS | None = None,
    filters: str | None = None,
    pull_filters: str | None = None,
) -> list[RankPlan]:
    """Return the ranks of this launcher with their environments.

    `threads` is OMP_NUM_THREADS. If it is None, the user's variable is used. Without the variable, several ranks
    divide the cores.
    """
    inherited_variables = {
        name: value for name, value in inherited.items() if not name.startswith(_FOREIGN) and name not in _OWN
    }
    variables = {
        **inherited_variables,
        "WORLD_SIZE": str(layout.world_size),
        "LOCAL_WORLD_SIZE": str(layout.local_world_size),
        "GROUP_RANK": str(layout.node),
        "MASTER_ADDR": layout.master_addr,
        "MASTER_PORT": str(layout.master_port),
        "PACELINE_ROLE": "worker",
        "PACELINE_TOKEN": token,
        **choice.variables(),
    }
    if filters:
        variables["PACELINE_FILTERS"] = filters
    if pull_filters is not None:
        variables["PACELINE_PULL_FILTERS"] = pull_filters
    if scheduler is not None:
        variables["PACELINE_SCHEDULER"] = scheduler
    if tls is not None:  # absolute paths, because a script may change the current folder
        files = {"CERT": tls.cert, "KEY": tls.key, "CA": tls.ca}
        variables |= {f"PACELINE_TLS_{name}": os.path.abspath(file) for name, file in files.items() if file is not None}
    if threads is not None:
        variables["OMP_NUM_THREADS"] = str(threads)
    elif layout.local_world_size > 1 and not inherited.get("OMP_NUM_THREADS"):
        variables["OMP_NUM_THREADS"] = str(max(cores // layout.local_world_size, 1))
    is_horovod, width = bool(inherited.get("HOROVOD_CONTROLLER")), len(str(layout.world_size - 1))
    plans: list[RankPlan] = []
    for rank, local in zip(layout.ranks, layout.local_ranks, strict=True):
        numbers = {"RANK": str(rank), "LOCAL_RANK": str(local)}
        if is_horovod:
            numbers |= _horovod_numbers(layout, rank, local)
        log_prefix = f"rank.{rank:0{width}}/" if is_horovod else f"rank{rank}."
        plans.append(RankPlan(rank=rank, environment={**variables, **numbers}, log_prefix=log_prefix))
    return plans


def _horovod_numbers(layout: Layout, rank: int, local: int) -> dict[str, str]:
    """Return the variables that horovodrun sets."""
    sizes = layout.node_sizes or (len(layout.ranks),) * (layout.world_size // len(layout.ranks))
    numbers = {
        "RANK": rank,
        "SIZE": layout.world_size,
        "LOCAL_RANK": local,
        "LOCAL_SIZE": layout.local_world_size,
        "CROSS_RANK": sum(size > local for size in sizes[: layout.node]),
        "CROSS_SIZE": sum(size > local for size in sizes),
    }
    variables = {f"HOROVOD_{name}": str(number) for name, number in numbers.items()}
    return {**variables, "HOROVOD_HOSTNAME": platform.node()}


def command_of(python: str, script: str, arguments: Sequence[str], *, is_module: bool) -> list[str]:
    """Return the command of every rank. Its output is unbuffered, so that each line is shown immediately."""
    return [python, "-u", *(["-m"] if is_module else []), script, *arguments]
