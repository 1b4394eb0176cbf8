"""Declare the strategy ``all-reduce`` and its options for ranks that die and join."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from typing_extensions import Self, override

from paceline.command_options import option, words_of
from paceline.environment import Environment
from paceline.errors import UsageError
from paceline.strategies.spec import StrategyOptions, StrategySpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticFlags:
    """The options as the user gave them, unchecked. Missing options are None."""

    panel: ClassVar = "Failures"

    min_ranks: int | None = option(
        "all-reduce, parameter-server, hybrid: continue without ranks and nodes that die, while at least this many "
        "ranks live; paceline run also replaces them, and without this option a death ends its run."
    )
    global_batch: int | None = option(
        "With --min-ranks: number of samples in a step of all ranks together, for any number of ranks; default: the "
        "loader's batch size times the number of ranks."
    )
    balance: bool | None = option(
        "With --global-batch: faster ranks get more samples of a step; default: equal numbers.", "--balance"
    )
    drop_stragglers: float | None = option(
        "With --min-ranks: leave out a rank whose steps take more than this many times as long as those of the other "
        "ranks, until it has recovered.",
        metavar="FACTOR",
    )
    max_changes: int | None = option(
        "With --min-ranks: end the run with status 1 if the set of ranks changes more often than this; default: no "
        "limit.",
        min=0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticOptions(StrategyOptions):
    """The valid limits of an elastic training, created by :func:`choose_elastic`."""

    strategy: ClassVar[str] = "all-reduce"
    """The default strategy of an elastic training."""

    min_ranks: int
    """The training ends if fewer ranks than this are alive."""
    num_ranks: int
    """Number of ranks at the start; the launcher replaces dead ranks up to this number."""
    global_batch: int | None = None
    """Number of samples in a step of all ranks together; None for one batch of each rank."""
    balance: bool = False
    """Whether the ranks' numbers of samples in a step depend on their speeds."""
    drop_stragglers: float | None = None
    """Limit of a rank's step time, as a multiple of the other ranks' median; None without a limit."""
    max_changes: int | None = None
    """The training ends if the set of ranks changes more often than this; None without a limit."""

    @property
    @override
    def num_processes(self) -> int:
        return self.num_ranks

    @classmethod
    @override
    def of_environment(cls, environment: Environment) -> Self | None:
        if environment.strategy_options is None or environment.strategy not in ELASTIC_STRATEGIES:
            return None
        return cls.decode(environment.strategy_options)


ELASTIC_STRATEGIES: Final = ("all-reduce", "parameter-server", "hybrid")
ELASTIC_FLAGS: Final = ("min_ranks", "global_batch", "balance", "drop_stragglers", "max_changes")
NO_STRAGGLERS: Final = "not supported by strategy parameter-server. Leave it out, or choose hybrid or all-reduce"
NO_GLOBAL_BATCH: Final = "not supported with parameter servers, because they apply each rank's gradients separately"
ELASTIC_ADVICE: Final = (
    "Start the script by paceline run --min-ranks N, or set PACELINE_COORDINATOR to the address of paceline coordinator"
)


def is_elastic(variables: Environment) -> bool:
    """Return whether the environment has a coordinator, of ``paceline run`` or of ``paceline coordinator``."""
    return ElasticOptions.of_environment(variables) is not None or variables.coordinator is not None


def choose_elastic(flags: ElasticFlags, processes: int) -> ElasticOptions | None:
    """Check the flags for a start with `processes` ranks; return None without ``--min-ranks``. Raises UsageError."""
    if flags.min_ranks is None:
        words = words_of(flags)
        if words:
            raise UsageError(f"{' '.join(words[:2])}: needs --min-ranks N. Pass --min-ranks 1")
        return None
    if flags.min_ranks < 1:
        raise UsageError(f"--min-ranks {flags.min_ranks}: expected 1 or more")
    if processes < flags.min_ranks:
        raise UsageError(f"--min-ranks {flags.min_ranks}: only {processes} ranks are started. Pass a lower number")
    if flags.global_batch is not None and flags.global_batch < 1:
        raise UsageError(f"--global-batch {flags.global_batch}: expected 1 or more")
    if flags.balance and flags.global_batch is None:
        raise UsageError("--balance: the number of samples for all ranks is missing. Pass --global-batch N too")
    if flags.drop_stragglers is not None and not 1 < flags.drop_stragglers < math.inf:
        raise UsageError(f"--drop-stragglers {flags.drop_stragglers}: expected a number greater than 1")
    return ElasticOptions(
        min_ranks=flags.min_ranks,
        num_ranks=processes,
        global_batch=flags.global_batch,
        balance=bool(flags.balance),
        drop_stragglers=flags.drop_stragglers,
        max_changes=flags.max_changes,
    )


def _choose(given: Mapping[str, Any], processes: int | None) -> StrategyOptions | None:
    assert processes is not None
    return choose_elastic(ElasticFlags(**given), processes)


def choose_with_servers(given: Mapping[str, Any], processes: int | None) -> StrategyOptions | None:
    """Check the flags of an elastic training with servers, as :func:`choose_elastic` does."""
    if given.get("global_batch") is not None:
        raise UsageError(f"--global-batch {given['global_batch']}: {NO_GLOBAL_BATCH}. Leave it out")
    return _choose(given, processes)


def choose_with_parameters(given: Mapping[str, Any], processes: int | None) -> StrategyOptions | None:
    """Check the flags of an elastic training whose parameters are on servers, as :func:`choose_elastic` does."""
    if given.get("drop_stragglers") is not None:
        raise UsageError(f"--drop-stragglers {given['drop_stragglers']:g}: {NO_STRAGGLERS}")
    return choose_with_servers(given, processes)


ALL_REDUCE: Final = StrategySpec(
    name=ElasticOptions.strategy,
    meaning="one process per device, gradients averaged by all-reduce",
    implementation="paceline.torch.strategies.all_reduce:AllReduce",
    filters=("gradients",),
    takes_snapshots=True,
    elastic_implementation="paceline.torch.strategies.elastic.strategy:ElasticAllReduce",
    flags=ELASTIC_FLAGS,
    without_flags="cannot continue without a dead rank",
    choose_options=_choose,
    neutral_settings=("find_unused_parameters", "static_graph", "bucket_mb", "backend", "timeout"),
)
