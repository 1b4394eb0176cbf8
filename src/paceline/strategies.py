"""How a training loop is spread: the names of the strategies, and what each of them needs from its launcher.

Both the launcher, which knows no torch, and ``paceline.torch`` go by it.
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
"""Every strategy as the command line and ``PACELINE_STRATEGY`` spell it, with its meaning."""

_ON_SERVERS = ("parameter-server", "hybrid")
_IN_ONE_PROCESS = ("one-device", "mirrored", "central-storage")


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyChoice:
    """A strategy and its surroundings, checked. Make one with :func:`choose_strategy`."""

    name: str
    """A key of :data:`STRATEGIES`."""
    servers: int
    """Parameter servers to start; 0 where the strategy has none."""
    consistency: Consistency | None
    """The servers' consistency; None where there are no servers."""
    replicas: int | None
    """Replicas of the model in one process; None: one per device that is there, or a strategy without any."""
    server_replicas: int
    """How many servers more hold whatever a server holds; 0 where there are no servers."""
    pipeline: PipelineOptions | None = None
    """Stages and schedule of the strategy ``pipeline``."""
    sharding: ShardingOptions | None = None
    """Units and shards of the strategy ``sharded``."""


def needs_servers(name: str) -> bool:
    """Whether a strategy keeps parameters on servers."""
    return name in _ON_SERVERS


def is_one_process(name: str) -> bool:
    """Whether a strategy runs in a single process, however many devices it uses."""
    return name in _IN_ONE_PROCESS


def default_strategy(*, has_servers: bool, num_ranks: int) -> str:
    """The strategy where none was chosen: ``hybrid`` with servers, ``all-reduce`` for several ranks."""
    return "hybrid" if has_servers else "all-reduce" if num_ranks > 1 else "one-device"


def check_strategy(name: str) -> str:
    """Return the name of a strategy. Raises UsageError if there is none of this name."""
    if name not in STRATEGIES:
        raise UsageError(f"there is no strategy {name!r}: expected one of {', '.join(STRATEGIES)}")
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
    """Check a wish against what is there, and fill in what was not said.

    Without a `name` it is :func:`default_strategy`. `processes` is the number of ranks. The consistency is
    ``sequential`` for ``parameter-server`` and ``bounded:4`` for ``hybrid`` unless it is given; sequential consistency
    averages over the ranks, as all-reduce does. `replicas` are those of the model in one process, or, where there are
    servers, of what the servers hold. `pipeline` is for the strategy of that name; its `data_parallel` and `shard` are
    for ``sharded``.

    Raises UsageError for a name that is unknown and for settings that the strategy has no use for.
    """
    name = default_strategy(has_servers=bool(servers), num_ranks=processes) if name is None else check_strategy(name)
    if is_one_process(name) and processes > 1:
        raise UsageError(
            f"strategy {name} is one process, {processes} were asked for: choose all-reduce, parameter-server or "
            "hybrid for several"
        )
    flags = pipeline or PipelineFlags()
    sharding: ShardingOptions | None = None
    if name == "sharded":
        sharding = choose_sharding(shard, flags.data_parallel, processes)
        flags = replace(flags, data_parallel=None)
    elif shard is not None:
        raise UsageError(f"strategy {name} shards no parameters: leave --shard {shard} out, or choose sharded")
    if name != "pipeline" and flags.given():
        raise UsageError(f"strategy {name} cuts no model into stages: leave {' '.join(flags.given())} out")
    if replicas is not None:
        if name in ("one-device", "all-reduce", "pipeline", "sharded"):
            raise UsageError(
                f"strategy {name} has neither servers nor replicas in one process: leave --replicas {replicas} out"
            )
        least = 0 if needs_servers(name) else 1
        if replicas < least:
            raise UsageError(f"strategy {name}: {replicas} replicas were asked for: expected {least} or more")
    if not needs_servers(name):
        if servers:
            raise UsageError(f"strategy {name} has no servers, {servers} were asked for: leave --servers out")
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
        raise UsageError(f"strategy {name} keeps parameters on servers, {servers} were asked for: expected 1 or more")
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
