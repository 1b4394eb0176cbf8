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
    """The directory of snapshots, the interval between them in `seconds` or `examples`, and the number to keep."""

    directory: str | Path
    """A directory shared by all servers and this process."""
    seconds: float | None = None
    examples: int | None = None
    keep: int = 3


@dataclass(frozen=True, kw_only=True)
class ExampleWeights:
    """Weights of examples in training."""

    column: str | None = None
    """Name of the column of weights (csv, parquet and JSON lines)."""
    classes: Mapping[str, float] | str | None = None
    """Weights by label; ``balanced`` gives all labels the same total weight."""
    keep_negatives: float = 1.0
    """Fraction of negatives to train on. Each of them has weight 1/fraction."""


BETWEEN_MACHINES: Final = "key-caching"
"""The fastest lossless filters at 100 Mbit/s (docs/explanation/benchmarks.md)."""


def are_on_several_machines(members: Sequence[Member]) -> bool:
    """Return whether the workers and servers among `members` run on more than one machine."""
    machines: dict[Role, set[str]] = {role: set() for role in Role}
    for member in members:
        if member.process is not None:
            machines[member.role].add(member.process.host.partition("/")[0])  # omit the namespace
    return bool(machines[Role.SERVER] and machines[Role.WORKER]) and len(set.union(*machines.values())) > 1


@dataclass(frozen=True, kw_only=True)
class TrafficFilters:
    """Texts of filters for :func:`paceline.filters.parse_filters`. Raises UsageError."""

    pushed: str | None = None
    """Filters of pushes and pulls. None: no filter on one machine, and :data:`BETWEEN_MACHINES` on several."""
    pulled: str | None = None
    """Filters of pulled values. None: the filters in `pushed` that change values or bytes."""

    def __post_init__(self) -> None:
        parse_filters(self.pushed or "")
        parse_filters(self.pulled or "")

    def suited_to(self, members: Sequence[Member]) -> TrafficFilters:
        """Return these filters. If no filters were given, return the default for a cluster with these members."""
        if self.pushed is not None or not are_on_several_machines(members):
            return self
        return replace(self, pushed=BETWEEN_MACHINES)

    @property
    def own_modules(self) -> list[str]:
        return modules_of([*parse_filters(self.pushed or "").filters, *parse_filters(self.pulled or "").filters])

    def of(self, task: str) -> tuple[str, str | None]:
        """Return both texts for a task. An evaluation uses only lossless filters."""
        pushed = self.pushed or ""
        if task != "evaluate":
            return pushed, self.pulled
        chain = parse_filters(pushed)
        return str(FilterChain([kind for kind in chain.filters if kind.preserves == "exact"])), None


@dataclass(frozen=True, kw_only=True)
class EarlyStopping:
    """Options for ending a training early and keeping the best pass's model. Raises UsageError."""

    validation: Sequence[str | Path]
    """Files for measuring the loss after every pass."""
    patience: int = 2
    """The training ends after this number of passes without progress."""
    min_delta: float = 0.0
    """Smallest decrease of the loss that counts as progress."""

    def __post_init__(self) -> None:
        if self.patience < 1:
            raise UsageError(f"--patience {self.patience}: expected at least 1 pass")
        if not 0 <= self.min_delta < math.inf:
            raise UsageError(f"--min-delta {self.min_delta:g}: expected a number of 0 or more")


@dataclass(frozen=True, kw_only=True)
class PassOptions:
    """The passes over the data. Raises UsageError."""

    order: Literal["shuffle", "file"] | None = None
    """Order of the examples in all passes but the last. None: shuffle, or the resumed training's order."""
    stopping: EarlyStopping | None = None
    """Rule for ending before `epochs` passes; None: no early end."""
    rates: RatePlan = field(default_factory=RatePlan)
    """Schedule of the learning rate. Under sequential consistency the rate changes only between passes."""
    blocks: ProximalBlocks | None = None
    """Train by delayed block proximal gradient instead of minibatches. This needs sequential consistency."""
    expire_after: int | None = None
    """Drop features that have not occurred for this number of passes (1 to 62). None: never."""

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
    """The columns to read, and the allowed fraction of malformed rows."""
    numeric_scale: str = "auto"
    """How to scale numeric columns that have no scales: one of :data:`paceline.data.NUMERIC_SCALES`, or quantile:N."""
    epochs: int | None = None
    """Passes over the data; None: chosen by trials on a sample."""
    batch_size: int | None = None
    """Examples per minibatch of one worker; None: chosen by the number of examples."""
    update: UpdateRule | RuleChoice = suited_ftrl
    """The servers' update rule, or a function that returns it, given a learning rate and penalties."""
    adapt: Literal["no", "yes", "widely"] = "yes"
    """Whether settings are chosen on a sample of the data; ``widely`` also tries several learning rates and L1
    penalties. ``no`` means 4 epochs, minibatches of 256, a learning rate of 0.05 and unscaled values."""
    weights: ExampleWeights = ExampleWeights()
    """Weights of examples."""
    filters: TrafficFilters = TrafficFilters()
    """Filters of pushes and pulls."""
    passes: PassOptions = PassOptions()
    """Order and stopping of the passes, and the schedule of the learning rate."""
    save: str | Path | None = None
    """Directory for the model."""
    feature_names: bool = False
    """Whether the names of features are saved with the model."""
    cache: str | Path | None = None
    """Directory that caches parsed data for later passes; None: a temporary one if there are several passes."""
    strict: bool = False
    """Whether the first malformed line ends the training."""
    snapshots: SnapshotPlan | None = None
    """Interval and directory of snapshots; None: no snapshots."""
    resume: str | Path | None = None
    """Directory of snapshots; the training continues from the newest complete snapshot."""
    init_from: str | Path | None = None
    """Directory of a saved model or of snapshots with the initial weights and state."""

    def __post_init__(self) -> None:
        """Raise UsageError for `expire_after` together with filters that omit rows from pushes."""
        chain = parse_filters(self.filters.pushed or "").filters
        choosing = [str(kind.name) for kind in chain if isinstance(kind, RowFilter)]
        if self.passes.expire_after is not None and choosing:
            given = ", ".join(choosing)
            raise UsageError(
                f"--expire-after with --filters {given}: these filters omit rows from pushes, so these rows would "
                "expire. Leave one of the options out"
            )
