"""What a training is asked to do."""

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
    """How often snapshots are taken (every so many `seconds` or `examples`), where they lie, and how many are kept."""

    directory: str | Path
    """A directory that all servers and this process share."""
    seconds: float | None = None
    examples: int | None = None
    keep: int = 3


@dataclass(frozen=True, kw_only=True)
class ExampleWeights:
    """How often examples count in training."""

    column: str | None = None
    """Of csv, parquet and JSON lines: the name of the column that says it."""
    classes: Mapping[str, float] | str | None = None
    """Of the examples of a label; ``balanced``: so that all labels count as much together."""
    keep_negatives: float = 1.0
    """The share of the negatives that is trained on; each counts as often as would bring their number back."""


BETWEEN_MACHINES: Final = "key-caching"
"""Filters that change no bit, and are the quickest at 100 Mbit/s (docs/explanation/benchmarks.md)."""


def are_on_several_machines(members: Sequence[Member]) -> bool:
    """Return whether a worker and a server of a cluster run on different machines, as far as they have told."""
    machines: dict[Role, set[str]] = {role: set() for role in Role}
    for member in members:
        if member.process is not None:
            machines[member.role].add(member.process.host.partition("/")[0])  # without the namespace
    return bool(machines[Role.SERVER] and machines[Role.WORKER]) and len(set.union(*machines.values())) > 1


@dataclass(frozen=True, kw_only=True)
class TrafficFilters:
    """What pushes and pulls go behind, as :func:`paceline.filters.parse_filters` reads it. Raises UsageError."""

    pushed: str | None = None
    """Of workers' pushes and pulls; None: what pays for itself, which is nothing on one machine."""
    pulled: str | None = None
    """Of pulled values; None: the same, as far as they are for values and bytes."""

    def __post_init__(self) -> None:
        parse_filters(self.pushed or "")
        parse_filters(self.pulled or "")

    def suited_to(self, members: Sequence[Member]) -> TrafficFilters:
        """Return these, or where nothing is said those that suit the machines of a cluster."""
        if self.pushed is not None or not are_on_several_machines(members):
            return self
        return replace(self, pushed=BETWEEN_MACHINES)

    @property
    def own_modules(self) -> list[str]:
        """The modules of users' own filters, which servers and workers have to import."""
        return modules_of([*parse_filters(self.pushed or "").filters, *parse_filters(self.pulled or "").filters])

    def of(self, task: str) -> tuple[str, str | None]:
        """Return both for a task: an evaluation is of the weights as they are."""
        pushed = self.pushed or ""
        if task != "evaluate":
            return pushed, self.pulled
        chain = parse_filters(pushed)
        return str(FilterChain([each for each in chain.filters if each.preserves == "exact"])), None


@dataclass(frozen=True, kw_only=True)
class EarlyStopping:
    """When a training ends before its last pass, and that the model is the best pass's. Raises UsageError."""

    validation: Sequence[str | Path]
    """Files whose loss is taken after every pass."""
    patience: int = 2
    """After so many passes that were no better than the best one the training ends."""
    min_delta: float = 0.0
    """By how much the loss must be less for a pass to be better."""

    def __post_init__(self) -> None:
        if self.patience < 1:
            raise UsageError(f"--patience {self.patience}: expected at least 1 pass")
        if not 0 <= self.min_delta < math.inf:
            raise UsageError(f"--min-delta {self.min_delta:g}: expected a number from 0 up")


@dataclass(frozen=True, kw_only=True)
class PassOptions:
    """How passes over the data differ, and when they end."""

    order: Literal["shuffle", "file"] | None = None
    """Of the examples in all passes except the last; None: shuffle, or as before `resume`. Raises UsageError."""
    stopping: EarlyStopping | None = None
    """Whether the training ends when passes make nothing better; `epochs` are its most passes then."""
    rates: RatePlan = field(default_factory=RatePlan)
    """What share of the learning rate steps have. Under sequential consistency it changes between passes only."""
    blocks: ProximalBlocks | None = None
    """Whether passes are over blocks of columns instead, by delayed block proximal gradient, and how; they read the
    data once, and need sequential consistency."""
    expire_after: int | None = None
    """After a pass, features that were not seen for so many passes lose their rows; None: none does. Raises UsageError
    unless it is 1 to 62."""

    def __post_init__(self) -> None:
        if self.order not in ("shuffle", "file", None):
            raise UsageError(f"--order {self.order}: there is no such order; choose shuffle or file")
        if self.expire_after is not None and not 1 <= self.expire_after <= MAX_PASSES:
            raise UsageError(f"--expire-after {self.expire_after}: expected 1 to {MAX_PASSES} passes")


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """What to train, and how."""

    data: Sequence[str | Path]
    """Files to train on."""
    model: SparseModel = field(default_factory=make_model)
    """What is trained."""
    evaluation: Sequence[str | Path] = ()
    """Files to evaluate on after training."""
    format: str | None = None
    """One of :data:`paceline.data.FORMATS`; None: guessed from the content."""
    columns: Columns | None = None
    """Of csv, parquet and JSON lines; None: guessed from rows spread over the files."""
    reading: ReadOptions = field(default_factory=ReadOptions)
    """How the data is read: the columns where not all are given, and how many malformed rows are allowed."""
    numeric_scale: str = "auto"
    """How numeric columns are scaled that have no scales yet: auto, standard, log or none."""
    epochs: int | None = None
    """Passes over the data; None: as many as suit a sample of it."""
    batch_size: int | None = None
    """Examples per minibatch of one worker; None: what suits their number."""
    update: UpdateRule | RuleChoice = suited_ftrl
    """How servers update weights; or a function that returns it, given a learning rate and an L1 penalty."""
    adapt: Literal["no", "yes", "widely"] = "yes"
    """Whether a sample of the data is looked at first, and, ``widely``, a few learning rates and L1 penalties are tried
    on it. If not, all data is treated alike: 4 epochs, minibatches of 256, a learning rate of 0.05, values as they
    are."""
    weights: ExampleWeights = ExampleWeights()
    """How often examples count."""
    filters: TrafficFilters = TrafficFilters()
    """What pushes and pulls go behind."""
    passes: PassOptions = PassOptions()
    """How rates change from pass to pass, and when the passes end."""
    save: str | Path | None = None
    """Directory for the model."""
    feature_names: bool = False
    """Whether the names of features are kept beside the model."""
    cache: str | Path | None = None
    """Directory that keeps parsed data for later passes; None: a temporary one, if there are several passes."""
    strict: bool = False
    """Whether the first malformed line ends the training."""
    snapshots: SnapshotPlan | None = None
    """Whether, when and where snapshots are taken."""
    resume: str | Path | None = None
    """Directory of snapshots, whose newest whole one is gone on from."""
    init_from: str | Path | None = None
    """Directory of a saved model, or of snapshots, with whose weights and state the training begins."""

    def __post_init__(self) -> None:
        """Raises UsageError for filters by which servers do not see what is pushed."""
        chain = parse_filters(self.filters.pushed or "").filters
        choosing = [str(each.name) for each in chain if isinstance(each, RowFilter)]
        if self.passes.expire_after is not None and choosing:
            given = ", ".join(choosing)
            raise UsageError(
                f"--expire-after with --filters {given}: rows that these leave out of pushes would seem unseen; "
                "leave one out"
            )
