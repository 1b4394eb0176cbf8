"""Declare the strategy ``all-reduce`` and its options for ranks that die and join."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from typing_extensions import override

from paceline.command_options import option
from paceline.errors import UsageError
from paceline.strategies.spec import StrategyOptions, StrategySpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticFlags:
    """The given options, unchecked. Missing options are None."""

    panel: ClassVar = "Failures"

    min_ranks: int | None = option(
        "all-reduce: continue without ranks that die, and replace them, while at least this many live; default: a "
        "death ends the run."
    )
    global_batch: int | None = option(
        "With --min-ranks: number of samples in a step of all ranks together, for any number of ranks; default: the "
        "loader's batch size times the number of ranks."
    )
    drop_stragglers: float | None = option(
        "With --min-ranks: leave out a rank whose steps take more than this many times as long as those of the other "
        "ranks, until it has recovered.",
        metavar="FACTOR",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticOptions(StrategyOptions):
    """The valid limits of an elastic training, created by :func:`choose_elastic`."""

    strategy: ClassVar[str] = "all-reduce"

    min_ranks: int
    """The training ends if fewer ranks live."""
    num_ranks: int
    """Number of ranks at the start; the launcher replaces dead ranks up to this number."""
    global_batch: int | None = None
    """Number of samples in a step of all ranks together; None for one batch of each rank."""
    drop_stragglers: float | None = None
    """Limit of a rank's step time, in medians of the other ranks; None without a limit."""

    @property
    @override
    def num_processes(self) -> int:
        return self.num_ranks


def choose_elastic(
    min_ranks: int | None, processes: int, *, global_batch: int | None = None, drop_stragglers: float | None = None
) -> ElasticOptions | None:
    """Check the options for a start with `processes` ranks; return None without `min_ranks`. Raises UsageError."""
    if min_ranks is None:
        for name, value in (("--global-batch", global_batch), ("--drop-stragglers", drop_stragglers)):
            if value is not None:
                raise UsageError(f"{name} {value}: needs --min-ranks N. Pass --min-ranks 1")
        return None
    if min_ranks < 1:
        raise UsageError(f"--min-ranks {min_ranks}: expected 1 or more")
    if processes < min_ranks:
        raise UsageError(f"--nproc-per-node {processes}: expected at least --min-ranks {min_ranks}")
    if global_batch is not None and global_batch < 1:
        raise UsageError(f"--global-batch {global_batch}: expected 1 or more")
    if drop_stragglers is not None and not 1 < drop_stragglers < math.inf:
        raise UsageError(f"--drop-stragglers {drop_stragglers}: expected a number greater than 1")
    return ElasticOptions(
        min_ranks=min_ranks, num_ranks=processes, global_batch=global_batch, drop_stragglers=drop_stragglers
    )


def _choose(given: Mapping[str, Any], processes: int | None) -> StrategyOptions | None:
    assert processes is not None
    return choose_elastic(
        given.get("min_ranks"),
        processes,
        global_batch=given.get("global_batch"),
        drop_stragglers=given.get("drop_stragglers"),
    )


ALL_REDUCE: Final = StrategySpec(
    name=ElasticOptions.strategy,
    meaning="one process per device, gradients averaged by all-reduce",
    implementation="paceline.torch.strategies.all_reduce:AllReduce",
    filters=("gradients",),
    flags=("min_ranks", "global_batch", "drop_stragglers"),
    without_flags="cannot continue without a dead rank",
    choose_options=_choose,
    neutral_settings=("find_unused_parameters", "static_graph", "bucket_mb", "backend", "timeout"),
)
