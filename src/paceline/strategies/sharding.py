"""Declare the strategy ``sharded`` and its options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from typing_extensions import override

from paceline.command_options import option
from paceline.errors import UsageError
from paceline.strategies.spec import StrategyOptions, StrategySpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingFlags:
    """The options as the user gave them, unchecked. Missing options are None."""

    panel: ClassVar = "Pipeline and sharded"

    shard: str | None = option(
        "sharded: modules whose parameters are gathered together, such as encoder.*,head (* is any one part of "
        "a name); default: blocks of lists and sequences, and other large modules."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingOptions(StrategyOptions):
    """A sharded training's valid options, created by :func:`choose_sharding`."""

    strategy: ClassVar[str] = "sharded"

    units: tuple[str, ...]
    """Names of modules whose parameters are gathered together (``*``: any part of a name); empty: choose by model."""
    shards: int
    """Number of processes that share one model."""
    data_parallel: int
    """Number of parallel groups of such processes, each with its own part of the data."""

    @property
    @override
    def num_processes(self) -> int:
        return self.shards * self.data_parallel


def choose_sharding(shard: str | None, data_parallel: int | None, processes: int) -> ShardingOptions:
    """Check the options of a sharded training on `processes`, and set the defaults. Raises UsageError."""
    num_groups = 1 if data_parallel is None else data_parallel
    if num_groups < 1 or processes % num_groups:
        raise UsageError(
            f"--data-parallel {num_groups}: expected a divisor of the {processes} processes, because each group of "
            "processes shards the model among its members"
        )
    units = () if shard is None else tuple(name.strip() for name in shard.split(","))
    if "" in units or len(set(units)) < len(units):
        raise UsageError(f"--shard {shard}: expected different module names with commas between them, such as blocks.*")
    return ShardingOptions(units=units, shards=processes // num_groups, data_parallel=num_groups)


def _choose(given: Mapping[str, Any], processes: int | None) -> StrategyOptions:
    assert processes is not None
    return choose_sharding(given.get("shard"), given.get("data_parallel"), processes)


SHARDED: Final = StrategySpec(
    name=ShardingOptions.strategy,
    meaning="one process per device, each with a part of every parameter and of the optimizer's state",
    implementation="paceline.torch.strategies.sharded.strategy:Sharded",
    flags=("shard", "data_parallel"),
    only_copies="a part of the model",
    takes_snapshots=True,
    without_flags="shards no parameters",
    choose_options=_choose,
    neutral_settings=("units", "data_parallel", "timeout"),
)
