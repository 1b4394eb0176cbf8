"""List all strategies, and the flags of ``paceline run`` for individual strategies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from paceline.command_options import given_values
from paceline.errors import UsageError
from paceline.strategies.pipeline import PIPELINE, PipelineFlags
from paceline.strategies.sharding import SHARDED, ShardingFlags
from paceline.strategies.spec import StrategySpec

_TORCH: Final = "paceline.torch.strategies"

STRATEGIES: Final[dict[str, StrategySpec]] = {
    spec.name: spec
    for spec in (
        StrategySpec(
            name="one-device",
            meaning="one process, one device",
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
        StrategySpec(
            name="all-reduce",
            meaning="one process per device, gradients averaged by all-reduce",
            implementation=f"{_TORCH}.all_reduce:AllReduce",
            filters=("gradients",),
            neutral_settings=("find_unused_parameters", "static_graph", "bucket_mb", "backend", "timeout"),
        ),
        StrategySpec(
            name="parameter-server",
            meaning="one process per device, parameters and their updates on servers",
            implementation=f"{_TORCH}.server.parameter_server:ParameterServer",
            consistency="sequential",
            filters=("tables",),
            neutral_settings=("unused", "bucket_mb", "overlap", "timeout"),
        ),
        StrategySpec(
            name="hybrid",
            meaning="embeddings on servers, all other parameters by all-reduce",
            implementation=f"{_TORCH}.hybrid:Hybrid",
            consistency="bounded:4",
            filters=("gradients", "tables"),
        ),
        PIPELINE,
        SHARDED,
    )
}
"""Every strategy by its name."""

NEUTRAL_SETTINGS: Final = frozenset(name for spec in STRATEGIES.values() for name in spec.neutral_settings)
"""Arguments of the strategies' classes that do not change the result."""


@dataclass(frozen=True, kw_only=True)
class StrategyFlags:
    """The given options for individual strategies, unchecked. Missing options are None. One field per strategy."""

    pipeline: PipelineFlags = PipelineFlags()
    sharding: ShardingFlags = ShardingFlags()

    def given(self) -> dict[str, Any]:
        return given_values(self)


def check_strategy(name: str) -> StrategySpec:
    if name not in STRATEGIES:
        raise UsageError(f"strategy={name!r}: expected one of {', '.join(STRATEGIES)}")
    return STRATEGIES[name]


def default_strategy(*, has_servers: bool, num_ranks: int) -> str:
    """Return ``hybrid`` with servers, otherwise ``all-reduce`` for several ranks or ``one-device``."""
    return "hybrid" if has_servers else "all-reduce" if num_ranks > 1 else "one-device"


def needs_servers(name: str | None) -> bool:
    """Return whether a strategy stores parameters on servers; False for a missing or unknown name."""
    return name in STRATEGIES and STRATEGIES[name].has_servers
