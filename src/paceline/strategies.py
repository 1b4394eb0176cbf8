"""Define the names of the strategies and the requirements of each on its launcher.

Used by the launcher, which does not import torch, and by ``paceline.torch``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from paceline.errors import UsageError
from paceline.pipeline_options import PipelineFlags, PipelineOptions, choose_pipeline
from paceline.protocol.consistency import Consistency, Sequential, parse_consistency
from paceline.sharding_options import ShardingOptions, choose_sharding

STRATEGIES: dict[str, str] = {
    "one-device": "one process, one device",
    "mirrored": "one process, a replica of the model on each of several devices",
    "central-storage": "one process, the variables in one place, replicas on several devices",
    "all-reduce": "one process per device, gradients averaged by all-reduce",
    "parameter-server": "one process per device, parameters and their updates on servers",
    "hybrid": "embeddings on servers, all other parameters by all-reduce",
    "pipeline": "the model's layers over several processes, batches through them in microbatches",
    "sharded": "one process per device, each with a part of every parameter and of the optimizer's state",
}
"""Every strategy in the format of the command line and ``PACELINE_STRATEGY``, with its meaning."""

_ON_SERVERS = ("parameter-server", "hybrid")
_IN_ONE_PROCESS = ("one-device", "mirrored", "central-storage")


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyChoice:
    """A valid strategy with its settings, created by :func:`choose_strategy`."""

    name: str
    """A key of :data:`STRATEGIES`."""
    servers: int
    """Number of parameter servers to start; 0 for strategies without servers."""
    consistency: Consistency | None
    """The servers' consistency; None without servers."""
    replicas: int | None
    """Replicas of the model in one process; None: one per device, or a strategy without replicas."""
    server_replicas: int
    """Number of additional servers that store each server's data; 0 without servers."""
    pipeline: PipelineOptions | None = None
    """Stages and schedule of the strategy ``pipeline``."""
    sharding: ShardingOptions | None = None
    """Units and shards of the strategy ``sharded``."""


def needs_servers(name: str) -> bool:
    """Return whether a strategy stores parameters on servers."""
    return name in _ON_SERVERS


def is_one_process(name: str) -> bool:
    """Return whether a strategy runs in a single process, on any number of devices."""
    return name in _IN_ONE_PROCESS


def default_strategy(*, has_servers: bool, num_ranks: int) -> str:
    """Return the default strategy: ``hybrid`` with servers, ``all-reduce`` for several ranks."""
    return "hybrid" if has_servers else "all-reduce" if num_ranks > 1 else "one-device"


def check_strategy(name: str) -> str:
    """Return the name of a strategy. Raises UsageError for an unknown name."""
    if name not in STRATEGIES:
        raise UsageError(f"got strategy {name!r}: expected one of {', '.join(STRATEGIES)}")
    return name


def choose_strategy(
    name: str | None,
    *,
    processes: int,
    servers: int | None = None,
    consistency: str | None = None,
    replicas: int | None = None,
    pipeline: PipelineFlags | None = None,
    shard: str | None = None,
) -> StrategyChoice:
    """Check the settings of a strategy, and set the defaults of missing ones.

    The default of `name` is :func:`default_strategy`. `processes` is the number of ranks. The default consistency is
    ``sequential`` for ``parameter-server`` and ``bounded:4`` for ``hybrid``; sequential consistency averages over the
    ranks, like all-reduce. `replicas` is the number of replicas of the model in one process, or, for strategies with
    servers, of the servers' data. `pipeline` is for the strategy ``pipeline``; its `data_parallel` and `shard` are for
    ``sharded``.

    Raises UsageError for an unknown name and for settings that the strategy does not use.
    """
    name = default_strategy(has_servers=bool(servers), num_ranks=processes) if name is None else check_strategy(name)
    if is_one_process(name) and processes > 1:
        raise UsageError(
            f"strategy {name} is one process, got {processes} processes: choose all-reduce, parameter-server or hybrid "
            "for several"
        )
    flags = pipeline or PipelineFlags()
    sharding: ShardingOptions | None = None
    if name == "sharded":
        sharding = choose_sharding(shard, flags.data_parallel, processes)
        flags = replace(flags, data_parallel=None)
    elif shard is not None:
        raise UsageError(f"strategy {name} shards no parameters: leave --shard {shard} out, or choose sharded")
    if name != "pipeline" and flags.given():
        raise UsageError(f"strategy {name} has no pipeline stages: leave {' '.join(flags.given())} out")
    if replicas is not None:
        if name in ("one-device", "all-reduce", "pipeline", "sharded"):
            raise UsageError(
                f"strategy {name} has neither servers nor replicas in one process: leave --replicas {replicas} out"
            )
        least = 0 if needs_servers(name) else 1
        if replicas < least:
            raise UsageError(f"strategy {name}: got {replicas} replicas, expected {least} or more")
    if not needs_servers(name):
        if servers:
            raise UsageError(f"strategy {name} has no servers, got {servers}: leave --servers out")
        if consistency is not None:
            raise UsageError(f"strategy {name} has no servers: leave --consistency {consistency} out")
        return StrategyChoice(
            name=name,
            servers=0,
            consistency=None,
            replicas=replicas,
            server_replicas=0,
            pipeline=choose_pipeline(flags, processes) if name == "pipeline" else None,
            sharding=sharding,
        )
    if servers is not None and servers < 1:
        raise UsageError(f"strategy {name} stores parameters on servers, got {servers} servers: expected 1 or more")
    parsed = parse_consistency(consistency or ("sequential" if name == "parameter-server" else "bounded:4"))
    if isinstance(parsed, Sequential) and consistency in (None, "sequential"):
        parsed = Sequential(aggregate="mean")
    return StrategyChoice(
        name=name,
        servers=1 if servers is None else servers,
        consistency=parsed,
        replicas=None,
        server_replicas=replicas or 0,
    )
