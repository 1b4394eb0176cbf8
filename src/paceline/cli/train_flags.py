"""The options of ``paceline train``, as given on the command line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final, Literal, cast

from paceline.command_options import in_panel, option
from paceline.errors import UsageError
from paceline.launch.flags import FilterModuleFlags, MemoryFlags, ObserveFlags, PushFlags, TimelineFlags, TLSFlags

from . import options
from .data_arguments import find_data

if TYPE_CHECKING:
    from paceline.models.base import SparseModel
    from paceline.models.proximal.rules import ProximalBlocks
    from paceline.models.update import RuleChoice
    from paceline.ps import UpdateRule
    from paceline.ps.messages import ClusterSettings
    from paceline.training.options import EarlyStopping, ExampleWeights, PassOptions, SnapshotPlan, TrafficFilters
    from paceline.training.schedules import RatePlan

MINIBATCHES: Final = "minibatches"
_COMMON, _FAILURES, _TRAFFIC = "Common options", "Snapshots and failures", "Memory and traffic"  # panels of the help


@dataclass(frozen=True, kw_only=True)
class ModelFlags:
    """The model and its hyperparameters."""

    panel: ClassVar = "Models with factors or layers"

    model: str = option(
        "lr: logistic regression; fm, ffm: (field-aware) factorization machine; deepfm, dcn: with a network "
        "over columns (PyTorch); regression: squared loss; poisson: counts; softmax: several classes.",
        default="lr",
        panel=_COMMON,
    )
    dim: int | None = option("fm, deepfm, dcn: factors per feature (8); ffm: factors per feature and column (4).")
    factor_lr: float | None = option("Learning rate of the factors; default: chosen by trials.")
    factor_l1: float | None = option("L1 penalty of the factors; default 0.")
    factor_l2: float | None = option("L2 penalty of the factors; default: chosen by trials.")
    factor_min_count: int | None = option("Occurrences after which a feature gets factors; default: chosen by trials.")
    hidden: str | None = option("deepfm, dcn: number of units of each hidden layer, such as 128,64; default 64,32.")
    cross_layers: int | None = option("dcn: number of layers that cross columns; default 2.")
    tower_lr: float | None = option("deepfm, dcn: learning rate of the layers (Adam); default: chosen by trials.")
    tower_l1: float | None = option("deepfm, dcn: L1 penalty of the layers; default 0.")
    tower_l2: float | None = option("deepfm, dcn: L2 penalty of the layers; default: chosen by trials.")
    classes: str | None = option(
        "softmax: number of classes (10: 0 to 9), or all labels, such as 1,2,5; default: the labels in a sample."
    )


@dataclass(frozen=True, kw_only=True)
class ReadFlags:
    """The format of the data, and its features."""

    panel: ClassVar = "Data"

    format: options.Format = None
    label: options.Label = in_panel(_COMMON, default=None)
    positive: options.Positive = None
    columns: options.ColumnFlags
    numeric_scale: options.NumericScale = "auto"
    interactions: str | None = option("Columns to combine into features: C1:C2,C3:*,C4:C5:C6; * is every column.")
    min_count: int | None = option("Occurrences in the first pass after which a feature is trained; default 1.")
    count_cells: int | None = option("Number of cells of the sketch that counts features; default 2^24.")


@dataclass(frozen=True, kw_only=True)
class PassFlags:
    """Passes over the data."""

    panel: ClassVar = "Training"

    epochs: int | None = option("Passes over the data; default: chosen by trials on a sample.", min=1, panel=_COMMON)
    order: str | None = option("Order of the examples in all passes except the last: shuffle (default) or file.")
    validation: list[str] | None = option(
        "Validation file. The training ends when its loss stops falling; the best pass's model is saved.",
        metavar="FILE",
        callback=find_data,
        panel="Early stopping",
    )
    patience: int | None = option(
        "Passes without progress on --validation before the training ends; default 2.", panel="Early stopping"
    )
    min_delta: float | None = option(
        "Smallest decrease of the validation loss that counts as progress; default 0.", panel="Early stopping"
    )
    expire_after: int | None = option(
        "After each pass, drop features that did not occur for this many passes (1 to 62)."
    )
    batch_size: int | None = option(
        "Examples per minibatch of one worker; default: 8 to 256, by the size of the data.", min=1
    )
    tune: bool = option(
        "First try several learning rates and L1 penalties on a sample.", "--tune", default=False, panel=_COMMON
    )

    def parse(self, rates: RatePlan, blocks: ProximalBlocks | None) -> PassOptions:
        from paceline.training.options import PassOptions

        return PassOptions(
            order=cast("Literal['shuffle', 'file'] | None", self.order),
            stopping=self._parse_stopping(),
            rates=rates,
            blocks=blocks,
            expire_after=self.expire_after,
        )

    def _parse_stopping(self) -> EarlyStopping | None:
        from paceline.training.options import EarlyStopping

        if self.validation is None:
            for name, value in (("--patience", self.patience), ("--min-delta", self.min_delta)):
                if value is not None:
                    raise UsageError(f"{name} needs a validation file: pass --validation, or leave {name} out")
            return None
        patience = 2 if self.patience is None else self.patience
        return EarlyStopping(validation=self.validation, patience=patience, min_delta=self.min_delta or 0.0)


@dataclass(frozen=True, kw_only=True)
class OwnClusterFlags:
    """The cluster that the command starts."""

    panel: ClassVar = "Cluster"

    servers: int | None = option("Server processes, which store the parameters; default 1.", min=1, panel=_COMMON)
    workers: int | None = option(
        "Number of worker processes, which read the data; default: cores minus servers.", min=1, panel=_COMMON
    )
    consistency: str | None = option(
        "sequential (reproducible, like one process), bounded:N or eventual; default bounded:4."
    )
    stale: str | None = option("Stale gradients: accept (default), drop:N or compensate:STRENGTH.")
    replicas: int | None = option(
        "Additional copies of every row: the number of servers that may die without loss; default 0.",
        min=0,
        panel=_FAILURES,
    )
    pushes: PushFlags = in_panel(_FAILURES)
    memory: MemoryFlags = in_panel(_TRAFFIC)

    def parse(self, *, heartbeat_timeout_s: float, default_consistency: str) -> ClusterSettings:
        from paceline.environment import num_cores

        servers = self.servers or 1
        return self.pushes.make_settings(
            num_servers=servers,
            num_workers=self.workers or max(num_cores() - servers, 1),
            consistency=self.consistency or default_consistency,
            stale=self.stale,
            replicas=self.replicas or 0,
            heartbeat_timeout_s=heartbeat_timeout_s,
        )


@dataclass(frozen=True, kw_only=True)
class UpdateFlags:
    """The update rule and the schedule of its learning rate."""

    panel: ClassVar = "Training"

    update: str = option("ftrl, sgd, momentum, adagrad, rmsprop, adam or adamw.", default="ftrl")
    lr: float | None = option(
        "Learning rate (FTRL: alpha); default: depends on the data (FTRL) or on --update.", panel=_COMMON
    )
    beta: float | None = option("FTRL's beta; default 1.")
    l1: float | None = option("FTRL's L1 penalty; default 1.")
    l2: float | None = option("L2 penalty (weight decay for rules other than ftrl).")
    schedule: str = option(
        "Decay of the learning rate: constant, linear, cosine, inverse-sqrt, exponential[:FACTOR], "
        "step[:PASSES[:FACTOR]]; not for --update ftrl.",
        default="constant",
    )
    warmup: float = option("Passes, or the fraction of one, in which the learning rate rises from 0.", default=0.0)

    def parse_rule(self) -> UpdateRule | RuleChoice:
        """Return the update rule; for FTRL, a function from the data's learning rate and penalties to the rule."""
        from paceline.models.update import UPDATE_NAMES, make_update

        rule = make_update(self.update, lr=self.lr, l1=self.l1, l2=self.l2, beta=self.beta)
        if self.update != UPDATE_NAMES[0]:
            return rule
        return lambda lr, l1, l2: make_update(
            self.update,
            lr=lr if self.lr is None else self.lr,
            l1=l1 if self.l1 is None else self.l1,
            l2=l2 if self.l2 is None else self.l2,
            beta=self.beta,
        )

    def parse_rates(self) -> RatePlan:
        from paceline.training.schedules import RatePlan, parse_schedule

        return RatePlan(schedule=parse_schedule(self.schedule), warmup=self.warmup)


@dataclass(frozen=True, kw_only=True)
class SolverFlags:
    """The solver and its settings."""

    panel: ClassVar = "Exact solver (--solver proximal-blocks)"

    solver: str = option(
        "minibatches, or proximal-blocks: logistic regression to the optimum of its loss with --l1 and --l2, by "
        "blocks of columns (delayed block proximal gradient). proximal-blocks keeps the data in the workers' memory.",
        default=MINIBATCHES,
    )
    max_delay: int | None = option("Number of unfinished blocks when the next block starts; default 0.", min=0)
    block_ratio: float | None = option("Number of blocks, divided by the values of an average row; default 4.")
    tolerance: float | None = option("Relative change of the objective that ends the training; default 1e-9.")
    plot: Path | None = option("HTML file for plots of the objective and the active columns by pass.")


@dataclass(frozen=True, kw_only=True)
class WeightFlags:
    """The weights of examples."""

    panel: ClassVar = "Weights of examples"

    weight: options.Weight = None
    class_weight: str | None = option(
        "Weights of the labels: 0:1,1:5, or balanced (every class has the same total weight)."
    )
    keep_negatives: float = option(
        "Fraction of negatives to train on. Each of them has weight 1/fraction.", default=1.0
    )

    def parse(self) -> ExampleWeights:
        from paceline.training.options import ExampleWeights
        from paceline.training.weighting import parse_class_weights

        classes = None if self.class_weight is None else parse_class_weights(self.class_weight)
        return ExampleWeights(column=self.weight, classes=classes, keep_negatives=self.keep_negatives)


@dataclass(frozen=True, kw_only=True)
class FilterFlags:
    """Filters for pushes and pulls."""

    panel: ClassVar = _TRAFFIC

    filters: str | None = option(
        "Filters of pushes and pulls, such as key-caching,quantize:8,compress, or none. MODULE:CLASS is your own "
        "filter. Default: key-caching for servers on other machines."
    )
    pull_filters: str | None = option("Filters of pulled values; default: the same as --filters.")
    modules: FilterModuleFlags

    def parse(self) -> TrafficFilters:
        from paceline.training.options import TrafficFilters

        return TrafficFilters(pushed=self.filters, pulled=self.pull_filters)


@dataclass(frozen=True, kw_only=True)
class SaveFlags:
    """The output files, and the initial model."""

    panel: ClassVar = _FAILURES

    save: Path | None = option("Directory to save the model in.", panel=_COMMON)
    feature_names: bool = option(
        "Save the names of features with the model.", "--feature-names", default=False, panel="Output"
    )
    cache: Path | None = option("Directory that stores parsed data for later passes and later runs.", panel=_TRAFFIC)
    snapshot_every: str | None = option(
        "Interval between snapshots of the cluster: 30s, 5m, 1h, or a number of examples."
    )
    snapshot_dir: Path | None = option(
        "Directory for snapshots, shared by all servers; default: --resume's, or SAVE-snapshots."
    )
    snapshots: int | None = option("Snapshots to keep; default 3.", min=1)
    resume: Path | None = option("Continue from the newest complete snapshot in this directory, with the same data.")
    init_from: Path | None = option(
        "Continue the training of this model: a directory of --save or of snapshots.", panel="Training"
    )
    auto_resume: bool = option(
        "If more servers die than there are replicas, continue from the newest snapshot.",
        "--auto-resume",
        default=False,
    )

    def parse_snapshots(self) -> SnapshotPlan | None:
        from paceline.training.options import SnapshotPlan
        from paceline.training.snapshots import parse_every

        if self.snapshot_every is None:
            for name, value in (("--snapshot-dir", self.snapshot_dir), ("--snapshots", self.snapshots)):
                if value is not None:
                    raise UsageError(f"{name} needs --snapshot-every. Pass it too, or leave {name} out")
            return None
        seconds, examples = parse_every(self.snapshot_every)
        directory = self.snapshot_dir or self.resume
        if directory is None:
            if self.save is None:
                raise UsageError(
                    "--snapshot-every: no directory. Pass --snapshot-dir DIR, or --save MODEL for MODEL-snapshots"
                )
            directory = self.save.with_name(f"{self.save.name}-snapshots")
        return SnapshotPlan(directory=directory, seconds=seconds, examples=examples, keep=self.snapshots or 3)


@dataclass(frozen=True, kw_only=True)
class OutputFlags:
    """Treatment of malformed lines, and the output of the command."""

    panel: ClassVar = "Output"

    max_malformed: float = option(
        "Largest fraction of malformed lines, if more than 10 are malformed; the training fails above it.",
        default=0.05,
        panel="Data",
    )
    strict: options.Strict = in_panel("Data", default=False)
    json: options.Json = False
    quiet: options.Quiet = False
    progressive: bool = option(
        "In the first pass, print the loss before learning, each time the number of rows doubles.",
        "--progressive",
        default=False,
    )


@dataclass(frozen=True, kw_only=True)
class ConnectionFlags:
    """The connections to the cluster's processes."""

    panel: ClassVar = "Cluster"

    heartbeat_timeout: float | None = option(
        "Seconds without a heartbeat before a process is declared dead; default 10.", min=0.5, panel=_FAILURES
    )
    scheduler: options.Scheduler = None
    token_file: options.TokenFile = None
    tls: TLSFlags


@dataclass(frozen=True, kw_only=True)
class TrainFlags:
    """All options of the command, in the order of its help."""

    data: options.Data
    evaluation: list[str] | None = option(
        "File to evaluate on after training; may be given several times.",
        "--eval",
        metavar="FILE",
        callback=find_data,
        panel=_COMMON,
    )
    reading: ReadFlags
    passes: PassFlags
    update: UpdateFlags
    model: ModelFlags
    saving: SaveFlags
    cluster: OwnClusterFlags
    connection: ConnectionFlags
    output: OutputFlags
    weights: WeightFlags
    filters: FilterFlags
    solver: SolverFlags
    observe: ObserveFlags
    timeline: TimelineFlags = in_panel("Metrics", default=TimelineFlags())

    def parse_model(self) -> SparseModel:
        """Return the model. Raises UsageError for an unknown model, and for options that the model does not have."""
        from paceline.models.deep.layers import parse_hidden
        from paceline.models.features.interactions import Interactions
        from paceline.models.registry import make_model
        from paceline.models.softmax import parse_classes

        reading, settings = self.reading, dict(vars(self.model))
        name, hidden, classes = (settings.pop(key) for key in ("model", "hidden", "classes"))
        return make_model(
            name,
            **settings,
            hidden=None if hidden is None else parse_hidden(hidden),
            classes=None if classes is None else parse_classes(classes),
            positive=options.find_positive(reading.positive),
            min_count=reading.min_count,
            count_cells=reading.count_cells,
            interactions=None if reading.interactions is None else Interactions(text=reading.interactions),
        )
