"""Plan a training, wait for the workers and run the training, silently or with a progress line."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from rich.console import Console

from paceline.data import Sample
from paceline.data.labels import describe_classes, describe_label_words
from paceline.data.sampling import ExampleSample
from paceline.environment import Environment, environment
from paceline.errors import ModelLostError
from paceline.launch.cluster_metrics import ClusterMetrics
from paceline.launch.fork_server import ForkServer
from paceline.launch.local import LocalCluster
from paceline.models.progressive import HEADING, ProgressiveLoss
from paceline.observe.collector import Collector
from paceline.observe.kubeflow import KubeflowStatus
from paceline.observe.metrics import MetricValues
from paceline.observe.progress import ProgressSnapshot, RateMeter, TrainingProgress
from paceline.protocol import Consistency, Eventual, parse_consistency
from paceline.ps import Client, messages
from paceline.tables.memory.limit import MemoryLimit
from paceline.training.files.data_files import resolve_files
from paceline.training.files.describing import find_warnings, show_columns
from paceline.training.options import TrainOptions
from paceline.training.plan import TrainingPlan
from paceline.training.planning import plan_training
from paceline.training.results import ObservedStaleness, TrainingState, TrainResult
from paceline.training.train import Training
from paceline.transport import TLS, SocketTransport

_STALENESS_EVERY_S = 0.5
_LOSS_EXAMPLES = 50_000
_PHASES = {"evaluate": "evaluating", "read-columns": "reading", "solve-blocks": "solving"}


def train_on(
    options: TrainOptions,
    client: Client,
    *,
    examples: ExampleSample | None = None,
    processes: LocalCluster | None = None,
    on_plan: Callable[[Client, TrainingPlan], Callable[[TrainingState], None]] = lambda client, plan: (
        lambda state: None
    ),
    on_news: Callable[[str], None] = lambda text: None,
    warn: Callable[[str], None] = lambda text: None,
) -> TrainResult:
    """Plan a training, wait for the workers of `processes`, and train.

    :func:`resolve_files` returns `options` and the
    sample `examples`. If `examples` is None, a sample is read. `on_plan` receives the plan before the training starts,
    and returns the callback for the progress.
    """
    plan = plan_training(options, warn, examples)  # the workers start during this call
    on_progress = on_plan(client, plan)
    num_workers = client.settings.num_workers
    if processes is not None:
        processes.wait_workers(client, num_workers)
    training = Training(
        options,
        plan,
        client,
        num_workers=num_workers,
        processes=processes,
        on_progress=on_progress,
        on_news=on_news,
        warn=warn,
    )
    return training.run()


def train_locally(
    options: TrainOptions,
    *,
    servers: int = 1,
    workers: int = 1,
    consistency: Consistency | None = None,
    warn: Callable[[str], None] = lambda text: None,
    **cluster_options: Any,
) -> TrainResult:
    """Train silently on this machine's processes. :meth:`LocalCluster.start` receives `cluster_options`."""
    options, sample = resolve_files(options)  # before any process starts, because this call may raise an error
    settings = messages.ClusterSettings(
        num_servers=servers, num_workers=workers, consistency=str(Eventual() if consistency is None else consistency)
    )
    with _open_cluster(options, settings, **cluster_options) as (cluster, client):
        return train_on(options, client, examples=sample.examples, processes=cluster, warn=warn)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainOutput:
    """The outputs of a training, in addition to warnings."""

    quiet: bool = False
    """Whether to leave out the progress line and the news."""
    progressive: bool = False
    """Whether to print the mean losses before learning in the first pass."""
    collector: Collector | None = None
    """Receives the metrics."""


def run_training(
    options: TrainOptions,
    settings: messages.ClusterSettings,
    *,
    memory_limit: MemoryLimit | None = None,
    auto_resume: bool = False,
    scheduler: str | None = None,
    token: str | None = None,
    tls: TLS | None = None,
    output: TrainOutput = TrainOutput(),
    fork_server: ForkServer | None = None,
) -> TrainResult:
    """Train with a progress line, on the cluster of `scheduler` or on processes that end with the training.

    If `auto_resume`, a training on its own processes survives the loss of a part of its model: it continues on new
    processes from its newest snapshot.
    """
    if scheduler is None:
        options.passes.rates.check_consistency(parse_consistency(settings.consistency))
    options, sample = resolve_files(options)
    display = _Display(Console(stderr=True), options, sample, output)
    display.show_files(memory_limit)
    cluster_options = {"memory_limit": memory_limit, "tls": tls, "fork_server": fork_server}
    while True:
        try:
            with contextlib.ExitStack() as stack:
                display.status = stack.enter_context(KubeflowStatus(environment(), display.warn))
                display.line = stack.enter_context(TrainingProgress(display.console, not output.quiet))
                cluster: LocalCluster | None = None
                if scheduler is not None:
                    assert token is not None
                    transport, address = SocketTransport(token, tls=tls), scheduler
                    client = stack.enter_context(Client.connect(transport, address, observer=True))
                else:
                    compiling = partial(display.console.print, highlight=False)
                    cluster, client = stack.enter_context(
                        _open_cluster(options, settings, on_compile=compiling, **cluster_options)
                    )
                    transport, address = cluster.transport(), cluster.scheduler
                if output.collector is not None:
                    stack.enter_context(ClusterMetrics.start(transport, address, output.collector))
                result = train_on(
                    options,
                    client,
                    examples=sample.examples,
                    processes=cluster,
                    on_plan=display.show_plan,
                    on_news=display.show_news,
                    warn=display.warn,
                )
                display.status.update(1.0)
                return result
        except ModelLostError as error:
            if not auto_resume or error.resume_from is None:
                raise
            display.warn(f"{error}. Resuming automatically")
            options = dataclasses.replace(options, resume=error.resume_from)


@contextlib.contextmanager
def _open_cluster(
    options: TrainOptions, settings: messages.ClusterSettings, **cluster_options: Any
) -> Iterator[tuple[LocalCluster, Client]]:
    modules = options.filters.own_modules
    with (
        LocalCluster.start(settings, start_workers=True, filter_modules=modules, **cluster_options) as cluster,
        cluster.connect(observer=True) as client,
    ):
        yield cluster, client


class _Display:
    """A training's output for the user: the columns, the plan, warnings, a progress line and Kubeflow's status.

    If `progressive`, the mean losses before learning are printed, one per line.
    """

    def __init__(self, console: Console, options: TrainOptions, sample: Sample, output: TrainOutput) -> None:
        self.console = console
        self.line = TrainingProgress(console, enabled=False)
        self.status = KubeflowStatus(Environment(), self.warn)
        self._options, self._sample = options, sample
        self._is_quiet, self._is_progressive, self._collector = output.quiet, output.progressive, output.collector

    def warn(self, text: str) -> None:
        self.console.print(f"paceline: {text}", highlight=False, markup=False, soft_wrap=True)

    def show_news(self, text: str) -> None:
        if self._collector is not None:
            self._collector.add_event(text)
        if not self._is_quiet:
            self.warn(text)

    def show_files(self, memory_limit: MemoryLimit | None) -> None:
        sample, labels = self._sample, self._options.model.read_labels_as
        if sample.has_guessed_columns and not self._is_quiet:
            show_columns(self.console, sample)
        if memory_limit is not None and memory_limit.warning is not None:
            self.warn(memory_limit.warning)
        if self._is_quiet:
            return
        if sample.header_note is not None:
            self.warn(sample.header_note)
        if sample.columns is not None and sample.columns.classes:
            self.warn(describe_classes(sample.columns.classes, labels))
        if sample.label_words:
            self.warn(describe_label_words(sample.label_words, labels))

    def show_plan(self, client: Client, plan: TrainingPlan) -> Callable[[TrainingState], None]:
        for text in find_warnings(self._sample, self._options.model.read_labels_as):
            self.warn(text)
        if self._collector is not None:
            self._collector.add_event(plan.sentence())
        if not self._is_quiet and plan.chosen_on and self._options.passes.blocks is None:
            self.warn(plan.sentence())
            if plan.note is not None:
                self.warn(plan.note)
        self._epochs, self._loss_name = plan.epochs, plan.model.loss_name
        self._examples, self._bytes, self._loss = RateMeter(), RateMeter(), RunningLoss()
        self._observed = ObservedStaleness(client, plan.model)
        self._staleness: dict[str, Any] = {}
        self._num_losses = 0
        self._read_staleness_s = time.monotonic()
        return self._show_progress

    def _show_progress(self, progress: TrainingState) -> None:
        time_s = time.monotonic()
        self._examples.add(time_s, progress.examples)
        self._bytes.add(time_s, progress.num_bytes)
        training = progress.task == "train"
        if training and time_s - self._read_staleness_s > _STALENESS_EVERY_S:
            self._read_staleness_s = time_s
            self._staleness = self._observed.summary()
        if not progress.examples:
            return
        if training and self._is_progressive:
            self._show_losses(progress.progressive)
        loss = self._loss.add(progress.examples, progress.loss, progress.weight) if training else None
        metrics = {"loss": loss, "examples": progress.examples} if training else {}
        if training and progress.epoch:
            metrics |= {"currentEpoch": progress.epoch, "totalEpochs": self._epochs}
        self.status.update(progress.fraction, metrics)
        if self._collector is not None and training:
            values = MetricValues()
            values.set("paceline_training_examples_total", float(progress.examples))
            for name, value in (("loss", loss), ("done_ratio", progress.fraction)):
                if value is not None:
                    values.set(f"paceline_training_{name}", value)
            self._collector.update(values)
        self.line.update(
            ProgressSnapshot(
                examples=progress.examples,
                examples_per_s=self._examples.per_s,
                done_fraction=progress.fraction,
                loss=loss,
                loss_name=self._loss_name,
                staleness_mean=self._staleness.get("mean") if training else None,
                staleness_max=self._staleness.get("max") if training else None,
                bytes_per_s=self._bytes.per_s,
                workers=progress.num_workers,
                epoch=f"{progress.epoch}/{self._epochs}" if training and progress.epoch else None,
                phase="writing a snapshot" if progress.is_taking_snapshot else _PHASES.get(progress.task),
            )
        )

    def _show_losses(self, losses: Sequence[ProgressiveLoss]) -> None:
        if losses and not self._num_losses:
            self.console.print(HEADING, highlight=False, soft_wrap=True)
        for loss in losses[self._num_losses :]:
            self.console.print(loss.line(), highlight=False, soft_wrap=True)
        self._num_losses = max(self._num_losses, len(losses))


class RunningLoss:
    """The mean loss over at least 50,000 latest examples."""

    def __init__(self) -> None:
        self._reports: deque[tuple[int, float, float]] = deque([(0, 0.0, 0.0)])

    def add(self, examples: int, loss: float, weight: float) -> float | None:
        """Add a report with sums since the start. Return the weighted mean over the latest examples."""
        reports = self._reports
        if examples < reports[-1][0]:  # a worker died, and its unfinished examples no longer count
            reports.clear()
        if not reports or examples > reports[-1][0]:
            reports.append((examples, loss, weight))
        while len(reports) > 2 and examples - reports[1][0] >= _LOSS_EXAMPLES:
            reports.popleft()
        (_, first_loss, first), (_, last_loss, last) = reports[0], reports[-1]
        return (last_loss - first_loss) / (last - first) if last > first else None
