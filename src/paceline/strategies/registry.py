"""List all strategies and their own flags of ``paceline run``, and choose a strategy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from paceline.command_options import given_values
from paceline.errors import UsageError
from paceline.strategies.elastic import (
    ALL_REDUCE,
    ELASTIC_FLAGS,
    ElasticFlags,
    choose_with_parameters,
    choose_with_servers,
)
from paceline.strategies.pipeline import PIPELINE, PipelineFlags
from paceline.strategies.sharding import SHARDED, ShardingFlags
from paceline.strategies.spec import StrategyOptions, StrategySpec

_TORCH: Final = "paceline.torch.strategies"
MOST_PROCESSES: Final = 1_000_000
"""The largest number of nodes, of ranks on a node, and of servers. A larger number is a mistake."""

STRATEGIES: Final[dict[str, StrategySpec]] = {
    spec.name: spec
    for spec in (
        StrategySpec(
            name="one-device",
            meaning="one process, one device",
            takes_snapshots=True,
            implementation=f"{_TORCH}.one_device:OneDevice",
            is_one_process=True,
        ),
        StrategySpec(
            name="mirrored",
            meaning="one process, a replica of the model on each of several devices",
            implementation=f"{_TORCH}.replicas.mirrored:Mirrored",
            is_one_process=True,
            has_replicas=True,
            neutral_settings=("devices",),
        ),
        StrategySpec(
            name="central-storage",
            meaning="one process, the variables in one place, replicas on several devices",
            implementation=f"{_TORCH}.replicas.central_storage:CentralStorage",
            is_one_process=True,
            has_replicas=True,
            neutral_settings=("devices", "storage"),
        ),
        ALL_REDUCE,
        StrategySpec(
            name="parameter-server",
            meaning="one process per device, parameters and their updates on servers",
            implementation=f"{_TORCH}.server.parameter_server:ParameterServer",
            elastic_implementation=f"{_TORCH}.elastic.parameter_server:ElasticParameterServer",
            consistency="sequential",
            filters=("tables",),
            flags=ELASTIC_FLAGS,
            without_flags=ALL_REDUCE.without_flags,
            choose_options=choose_with_parameters,
            neutral_settings=("unused", "bucket_mb", "overlap", "timeout"),
        ),
        StrategySpec(
            name="hybrid",
            meaning="embeddings on servers, all other parameters by all-reduce",
            implementation=f"{_TORCH}.hybrid:Hybrid",
            elastic_implementation=f"{_TORCH}.elastic.hybrid:ElasticHybrid",
            consistency="bounded:4",
            filters=("gradients", "tables"),
            flags=ELASTIC_FLAGS,
            without_flags=ALL_REDUCE.without_flags,
            choose_options=choose_with_servers,
        ),
        PIPELINE,
        SHARDED,
    )
}
"""Every strategy by its name."""

NEUTRAL_SETTINGS: Final = frozenset(name for spec in STRATEGIES.values() for name in spec.neutral_settings)
"""Names of arguments of the strategies' classes that do not change the result of a training."""


@dataclass(frozen=True, kw_only=True)
class StrategyFlags:
    """The options of individual strategies as the user gave them, unchecked. Missing options are None."""

    pipeline: PipelineFlags = PipelineFlags()
    sharding: ShardingFlags = ShardingFlags()
    elastic: ElasticFlags = ElasticFlags()

    def given(self) -> dict[str, Any]:
        return given_values(self)


def check_strategy(name: str, source: str = "strategy") -> StrategySpec:
    """Return the strategy `name`. Raises UsageError, with the argument or variable `source`, if it is unknown."""
    if name not in STRATEGIES:
        raise UsageError(f"{source}={name!r}: expected one of {', '.join(STRATEGIES)}")
    return STRATEGIES[name]


def default_strategy(*, has_servers: bool, num_ranks: int) -> str:
    """Return ``hybrid`` with servers, ``all-reduce`` for several ranks without servers, else ``one-device``."""
    return "hybrid" if has_servers else "all-reduce" if num_ranks > 1 else "one-device"


def needs_servers(name: str | None) -> bool:
    """Return whether the strategy `name` stores parameters on servers; False for None or an unknown name."""
    return name in STRATEGIES and STRATEGIES[name].has_servers


if TYPE_CHECKING:
    from paceline.protocol import Consistency


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyChoice:
    """A valid strategy with its settings, created by :func:`choose_strategy`."""

    spec: StrategySpec
    servers: int
    """Number of parameter servers to start; 0 for strategies without servers."""
    consistency: Consistency | None
    """The servers' consistency; None without servers."""
    replicas: int | None
    """Number of replicas of the model in one process; None for one per device, or for a strategy without replicas."""
    server_replicas: int
    """Number of additional servers that store a copy of each server's data; 0 without servers."""
    options: StrategyOptions | None = None
    """The strategy's own options; None if the strategy has no options."""

    @property
    def name(self) -> str:
        """A key of :data:`STRATEGIES`."""
        return self.spec.name

    def variables(self) -> dict[str, str]:
        """Return the environment variables by which the ranks receive the choice."""
        variables = {"PACELINE_STRATEGY": self.name}
        if self.replicas is not None:
            variables["PACELINE_REPLICAS"] = str(self.replicas)
        if self.options is not None:
            variables["PACELINE_STRATEGY_OPTIONS"] = self.options.encode()
        return variables


def choose_strategy(
    name: str | None,
    *,
    processes: int,
    servers: int | None = None,
    consistency: str | None = None,
    replicas: int | None = None,
    flags: StrategyFlags | None = None,
) -> StrategyChoice:
    """Check the settings of a strategy, and set the defaults of missing settings.

    The default of `name` is :func:`default_strategy`. `processes` is the number of ranks. Sequential consistency
    averages gradients over the ranks, like all-reduce. `replicas` counts the replicas of the model in one process or,
    for strategies with servers, the replicas of the servers' data.

    Raises UsageError for an unknown name and for settings that the strategy does not use.
    """
    given = {} if flags is None else flags.given()
    num_ranks = max(processes, 2) if "min_ranks" in given else processes  # one rank, with which others may train later
    spec = check_strategy(name or default_strategy(has_servers=bool(servers), num_ranks=num_ranks))
    name = spec.name
    if spec.is_one_process and processes > 1:
        raise UsageError(
            f"strategy {name} runs in one process, got {processes} processes. For several, choose all-reduce, "
            "parameter-server or hybrid"
        )
    _check_flags(spec, given)
    options = None if spec.choose_options is None else spec.choose_options(given, processes)
    if replicas is not None:
        if not spec.has_replicas and not spec.has_servers:
            raise UsageError(
                f"strategy {name} has neither servers nor replicas in one process. Leave --replicas {replicas} out"
            )
        least = 0 if spec.has_servers else 1
        if replicas < least:
            raise UsageError(f"strategy {name}: got {replicas} replicas, expected {least} or more")
    if spec.consistency is None:
        if servers:
            raise UsageError(f"strategy {name} has no servers, got {servers}. Leave --servers out")
        if consistency is not None:
            raise UsageError(f"strategy {name} has no servers. Leave --consistency {consistency} out")
        return StrategyChoice(
            spec=spec, servers=0, consistency=None, replicas=replicas, server_replicas=0, options=options
        )
    if servers is not None and servers < 1:
        raise UsageError(f"strategy {name} stores parameters on servers, got {servers} servers: expected 1 or more")
    if servers is not None and servers > MOST_PROCESSES:
        raise UsageError(f"--servers {servers}: expected at most {MOST_PROCESSES:,}")
    from paceline.protocol.consistency import Sequential, parse_consistency  # imported here, because the import is slow

    parsed = parse_consistency(consistency or spec.consistency)
    if isinstance(parsed, Sequential) and consistency in (None, "sequential"):
        parsed = Sequential(aggregate="mean")
    return StrategyChoice(
        spec=spec,
        servers=1 if servers is None else servers,
        consistency=parsed,
        replicas=None,
        server_replicas=replicas or 0,
        options=options,
    )


def _check_flags(spec: StrategySpec, given: dict[str, Any]) -> None:
    """Raise UsageError if options of other strategies are given."""
    for other in STRATEGIES.values():
        wrong = [name for name in other.flags if name in given and name not in spec.flags]
        if wrong:
            shown = " ".join(
                f"--{name.replace('_', '-')}" + ("" if given[name] is True else f" {given[name]}") for name in wrong
            )
            reason, instead = other.without_flags, ""
            if "min_ranks" in wrong and spec.only_copies:
                reason += f", because each rank has the only copy of {spec.only_copies}"
                instead = " and call strategy.save() and strategy.load()"
                if spec.takes_snapshots:
                    instead = " and pass --snapshot-dir DIR, so that the next start continues from the last snapshot"
            raise UsageError(f"strategy {spec.name} {reason}. Leave {shown} out{instead}, or choose {other.name}")
