"""The options of a training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Literal

from paceline.data import Columns
from paceline.data.guessing import ReadOptions
from paceline.errors import UsageError
from paceline.filters import FilterChain, parse_filters
from paceline.filters.base import RowFilter
from paceline.filters.modules import modules_of
from paceline.models.base import SparseModel
from paceline.models.proximal.rules import ProximalBlocks
from paceline.models.registry import make_model
from paceline.models.update import RuleChoice, suited_ftrl
from paceline.protocol import Member, Role
from paceline.ps import UpdateRule
from paceline.tables.bounds import MAX_PASSES
from paceline.training.schedules import RatePlan


@dataclass(frozen=True, kw_only=True)
class SnapshotPlan:
    """The interval between snapshots in `seconds` or `examples`, their directory, and the number to keep."""

    directory: str | Path
    """A directory that all servers share with this process."""
    seconds: float | None = None
    examples: int | None = None
    keep: int = 3


@dataclass(frozen=True, kw_only=True)
class ExampleWeights:
    """Weights of examples in training."""

    column: str | None = None
    """Name of the column of weights (csv, parquet and JSON lines)."""
    classes: Mapping[str, float] | str | None = None
    """Weights by label; ``balanced``: all labels have the same total weight."""
    keep_negatives: float = 1.0
    """Fraction of negatives to train on. A kept negative has weight 1/fraction."""


BETWEEN_MACHINES: Final = "key-caching"
"""The fastest exact filters at 100 Mbit/s (docs/explanation/benchmarks.md)."""


def are_on_several_machines(members: Sequence[Member]) -> bool:
    """Return whether a worker and a server run on different machines, by the reports of the members."""
    machines: dict[Role, set[str]] = {role: set() for role in Role}
    for member in members:
        if member.process is not None:
            machines[member.role].add(member.process.host.partition("/")[0])  # without the namespace
    return bool(machines[Role.SERVER] and machines[Role.WORKER]) and len(set.union(*machines.values())) > 1


@dataclass(frozen=True, kw_only=True)
class TrafficFilters:
    """Filters of pushes and pulls, as texts for :func:`paceline.filters.parse_filters`. Raises UsageError."""

    pushed: str | None = None
    """Filters of workers' pushes and pulls; None: chosen by the cluster, on one machine no filter."""
    pulled: str | None = None
    """Filters of pulled values; None: the filters of values and bytes in `pushed`."""

    def __post_init__(self) -> None:
        parse_filters(self.pushed or "")
        parse_filters(self.pulled or "")

    def suited_to(self, members: Sequence[Member]) -> TrafficFilters:
        """Return these filters, or if none are given the default for the machines of a cluster."""
        if self.pushed is not None or not are_on_several_machines(members):
            return self
        return replace(self, pushed=BETWEEN_MACHINES)

    @property
    def own_modules(self) -> list[str]:
        """The modules of users' own filters, which servers and workers import."""
        return modules_of([*parse_filters(self.pushed or "").filters, *parse_filters(self.pulled or "").filters])

    def of(self, task: str) -> tuple[str, str | None]:
        """Return both texts for a task: an evaluation uses exact filters only."""
        pushed = self.pushed or ""
        if task != "evaluate":
            return pushed, self.pulled
        chain = parse_filters(pushed)
        return str(FilterChain([kind for kind in chain.filters if kind.preserves == "exact"])), None


@dataclass(frozen=True, kw_only=True)
class EarlyStopping:
    """End a training before its last pass, and use the model of the best pass. Raises UsageError."""

    validation: Sequence[str | Path]
    """Files for the loss after every pass."""
    patience: int = 2
    """Passes without progress before the training ends."""
    min_delta: float = 0.0
    """Least decrease of the loss that counts as progress."""

    def __post_init__(self) -> None:
        if self.patience < 1:
            raise UsageError(f"--patience {self.patience}: expected at least 1 pass")
        if not 0 <= self.min_delta < math.inf:
            raise UsageError(f"--min-delta {self.min_delta:g}: expected a number of 0 or more")


@dataclass(frozen=True, kw_only=True)
class PassOptions:
    """The passes over the data. Raises UsageError."""

    order: Literal["shuffle", "file"] | None = None
    """Order of the examples in all passes except the last; None: shuffle, or the order of the resumed training."""
    stopping: EarlyStopping | None = None
    """When to end before `epochs` passes; None: never."""
    rates: RatePlan = field(default_factory=RatePlan)
    """Schedule of the learning rate. Under sequential consistency it changes between passes only."""
    blocks: ProximalBlocks | None = None
    """Delayed block proximal gradient over blocks of columns instead of minibatches; it reads the data once and needs
    sequential consistency."""
    expire_after: int | None = None
    """Drop features after this many passes (1 to 62) without an occurrence; None: never."""

    def __post_init__(self) -> None:
        if self.order not in ("shuffle", "file", None):
            raise UsageError(f"--order {self.order}: expected shuffle or file")
        if self.expire_after is not None and not 1 <= self.expire_after <= MAX_PASSES:
            raise UsageError(f"--expire-after {self.expire_after}: expected 1 to {MAX_PASSES} passes")


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """The options of a training."""

    data: Sequence[str | Path]
    """Files to train on."""
    model: SparseModel = field(default_factory=make_model)
    """The model."""
    evaluation: Sequence[str | Path] = ()
    """Files to evaluate on after training."""
    format: str | None = None
    """One of :data:`paceline.data.FORMATS`; None: detected from the content."""
    columns: Columns | None = None
    """Columns of csv, parquet and JSON lines; None: guessed from rows of all files."""
    reading: ReadOptions = field(default_factory=ReadOptions)
    """Some of the columns, and the allowed fraction of malformed rows."""
    numeric_scale: str = "auto"
    """Scale of numeric columns without scales: auto, standard, log or none."""
    epochs: int | None = None
    """Passes over the data; None: chosen on a sample."""
    batch_size: int | None = None
    """Examples per minibatch of one worker; None: chosen by the number of examples."""
    update: UpdateRule | RuleChoice = suited_ftrl
    """The servers' update rule, or a function that returns it for a learning rate and penalties."""
    adapt: Literal["no", "yes", "widely"] = "yes"
    """Whether settings are chosen on a sample of the data; ``widely`` tries a few learning rates and L1 penalties too.
    ``no``: 4 epochs, minibatches of 256, a learning rate of 0.05, unscaled values."""
    weights: ExampleWeights = ExampleWeights()
    """Weights of examples."""
    filters: TrafficFilters = TrafficFilters()
    """Filters of pushes and pulls."""
    passes: PassOptions = PassOptions()
    """Order and end of the passes, and the schedule of the learning rate."""
    save: str | Path | None = None
    """Directory for the model."""
    feature_names: bool = False
    """Whether the names of features are saved with the model."""
    cache: str | Path | None = None
    """Directory for parsed data, for later passes; None: a temporary one if there are several passes."""
    strict: bool = False
    """Whether the first malformed line ends the training."""
    snapshots: SnapshotPlan | None = None
    """When and where to take snapshots; None: never."""
    resume: str | Path | None = None
    """Directory of snapshots; the training continues from the newest complete one."""
    init_from: str | Path | None = None
    """Directory of a saved model or of snapshots with the initial weights and state."""

    def __post_init__(self) -> None:
        """Raise UsageError for `expire_after` with filters that leave rows out of pushes."""
        chain = parse_filters(self.filters.pushed or "").filters
        choosing = [str(kind.name) for kind in chain if isinstance(kind, RowFilter)]
        if self.passes.expire_after is not None and choosing:
            given = ", ".join(choosing)
            raise UsageError(
                f"--expire-after with --filters {given}: rows that these filters leave out of pushes would expire. "
                "Leave one of the options out"
            )
