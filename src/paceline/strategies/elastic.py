"""Declare the strategy ``all-reduce`` and its options for ranks that die and join."""

from __future__ import annotations

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
        "all-reduce: continue without ranks that die, and replace them, while at least this many live; default 1 with "
        "--max-ranks, else a death ends the run."
    )
    max_ranks: int | None = option(
        "all-reduce: largest number of ranks at a time; default with --min-ranks: --nproc-per-node."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticOptions(StrategyOptions):
    """The valid limits of an elastic training, created by :func:`choose_elastic`."""

    strategy: ClassVar[str] = "all-reduce"

    min_ranks: int
    """The training ends if fewer ranks live."""
    max_ranks: int
    """Largest number of ranks at a time."""
    initial_ranks: int
    """Number of ranks at the start; the launcher replaces dead ranks up to this number."""

    @property
    @override
    def num_processes(self) -> int:
        return self.initial_ranks


def choose_elastic(min_ranks: int | None, max_ranks: int | None, processes: int) -> ElasticOptions | None:
    """Check the limits for a start with `processes`, and set the defaults; None without limits. Raises UsageError."""
    if min_ranks is None and max_ranks is None:
        return None
    least = 1 if min_ranks is None else min_ranks
    most = max(processes, least) if max_ranks is None else max_ranks
    if least < 1:
        raise UsageError(f"--min-ranks {least}: expected 1 or more")
    if most < least:
        raise UsageError(f"--min-ranks {least} --max-ranks {most}: expected --max-ranks to be at least --min-ranks")
    if not least <= processes <= most:
        raise UsageError(
            f"--nproc-per-node {processes}: expected a number from --min-ranks {least} to --max-ranks {most}"
        )
    return ElasticOptions(min_ranks=least, max_ranks=most, initial_ranks=processes)


def _choose(given: Mapping[str, Any], processes: int | None) -> StrategyOptions | None:
    assert processes is not None
    return choose_elastic(given.get("min_ranks"), given.get("max_ranks"), processes)


ALL_REDUCE: Final = StrategySpec(
    name=ElasticOptions.strategy,
    meaning="one process per device, gradients averaged by all-reduce",
    implementation="paceline.torch.strategies.all_reduce:AllReduce",
    filters=("gradients",),
    flags=("min_ranks", "max_ranks"),
    without_flags="cannot continue without a dead rank",
    choose_options=_choose,
    neutral_settings=("find_unused_parameters", "static_graph", "bucket_mb", "backend", "timeout"),
)
