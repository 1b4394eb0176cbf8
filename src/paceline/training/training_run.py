"""A training as a person runs it: the cluster, the progress line on standard error, warnings as they come."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console

from paceline.data.labels import describe_classes, describe_label_words
from paceline.errors import ModelLostError
from paceline.launch.fork_server import ForkServer
from paceline.launch.local import LocalCluster
from paceline.models.progressive import HEADING, ProgressiveLoss
from paceline.observe import ProgressSnapshot, RateMeter, TrainingProgress
from paceline.protocol import parse_consistency
from paceline.ps import Client, messages
from paceline.tables.memory.limit import MemoryLimit
from paceline.training.driver import train_on
from paceline.training.files.data_files import settle_files
from paceline.training.files.describing import find_warnings, show_columns
from paceline.training.options import TrainOptions
from paceline.training.plan import TrainingPlan
from paceline.training.results import ObservedStaleness, TrainingState, TrainResult
from paceline.transport import TLS, SocketTransport

_STALENESS_EVERY_S = 0.5
_LOSS_EXAMPLES = 50_000
_PHASES = {"evaluate": "evaluating", "read-columns": "reading", "solve-blocks": "solving"}


def run_training(
    options: TrainOptions,
    settings: messages.ClusterSettings,
    *,
    memory_limit: MemoryLimit | None = None,
    auto_resume: bool = False,
    scheduler: str | None = None,
    token: str | None = None,
    tls: TLS | None = None,
    quiet: bool = False,
    progressive: bool = False,
    fork_server: ForkServer | None = None,
) -> TrainResult:
    """Train with a progress line; on the cluster of `scheduler`, or on processes that live as long as this call.

    With `auto_resume` a training on own processes that loses a part of its model goes on, on new ones, from its newest
    snapshot. With `progressive` the losses before learning in the first pass are printed as they become known.
    """
    console = Console(stderr=True)
    if scheduler is None:
        options.passes.rates.check_consistency(parse_consistency(settings.consistency))
    options, look = settle_files(options)
    if look.guessed and not quiet:
        show_columns(console, look)

    def warn(text: str) -> None:
        console.print(f"paceline: {text}", highlight=False, markup=False, soft_wrap=True)

    if memory_limit is not None and memory_limit.warning is not None:
        warn(memory_limit.warning)
    if look.header_news is not None and not quiet:
        warn(look.header_news)
    if look.columns is not None and look.columns.classes and not quiet:
        warn(describe_classes(look.columns.classes, options.model.read_labels_as))
    if look.label_words and not quiet:
        warn(describe_label_words(look.label_words, options.model.read_labels_as))

    def train_once() -> TrainResult:
        with contextlib.ExitStack() as stack:
            line = stack.enter_context(TrainingProgress(console, None, not quiet))
            cluster: LocalCluster | None = None
            if scheduler is not None:
                assert token is not None
                client = stack.enter_context(Client.connect(SocketTransport(token, tls=tls), scheduler, observer=True))
            else:
                cluster = LocalCluster.start(
                    settings,
                    memory_limit=memory_limit,
                    tls=tls,
                    on_compile=lambda text: console.print(text, highlight=False),
                    start_workers=True,
                    fork_server=fork_server,
                    filter_modules=options.filters.own_modules,
                )
                stack.enter_context(cluster)
                client = stack.enter_context(cluster.connect(observer=True))

            def show_plan(plan: TrainingPlan) -> Callable[[TrainingState], None]:
                for text in find_warnings(look, options.model.read_labels_as):
                    warn(text)
                if not quiet and plan.chosen_on and options.passes.blocks is None:
                    warn(plan.sentence())
                    if plan.note is not None:
                        warn(plan.note)
                return _Display(line, client, plan, console if progressive else None).show

            return train_on(
                options,
                client,
                examples=look.examples,
                processes=cluster,
                on_plan=show_plan,
                on_news=(lambda text: None) if quiet else warn,
                warn=warn,
            )

    while True:
        try:
            return train_once()
        except ModelLostError as error:
            if not auto_resume or error.resume_from is None:
                raise
            warn(f"{error}: which it does by itself")
            options = dataclasses.replace(options, resume=error.resume_from)


class _Display:
    """Makes progress line after progress line of what the driver tells.

    The losses before learning go to `losses`, a line each.
    """

    def __init__(
        self, line: TrainingProgress, client: Client, plan: TrainingPlan, losses: Console | None = None
    ) -> None:
        self._line = line
        self._losses_to = losses
        self._num_losses = 0
        self._epochs = plan.epochs
        self._loss_name = plan.model.loss_name
        self._examples, self._bytes = RateMeter(), RateMeter()
        self._loss = RunningLoss()
        self._observed = ObservedStaleness(client, plan.model)
        self._staleness: dict[str, Any] = {}
        self._looked = time.monotonic()

    def show(self, progress: TrainingState) -> None:
        """Show this from now on."""
        now = time.monotonic()
        self._examples.add(now, progress.examples)
        self._bytes.add(now, progress.num_bytes)
        training = progress.task == "train"
        if training and now - self._looked > _STALENESS_EVERY_S:
            self._looked = now
            self._staleness = self._observed.summary()
        if not progress.examples:
            return
        if training and self._losses_to is not None:
            self._show_losses(self._losses_to, progress.progressive)
        self._line.update(
            ProgressSnapshot(
                examples=progress.examples,
                examples_per_s=self._examples.per_s,
                done_fraction=progress.fraction,
                loss=self._loss.add(progress.examples, progress.loss, progress.weight) if training else None,
                loss_name=self._loss_name,
                staleness_mean=self._staleness.get("mean") if training else None,
                staleness_max=self._staleness.get("max") if training else None,
                bytes_per_s=self._bytes.per_s,
                workers=progress.num_workers,
                epoch=f"{progress.epoch}/{self._epochs}" if training and progress.epoch else None,
                phase=_PHASES.get(progress.task),
            )
        )

    def _show_losses(self, console: Console, found: Sequence[ProgressiveLoss]) -> None:
        if found and not self._num_losses:
            console.print(HEADING, highlight=False, soft_wrap=True)
        for each in found[self._num_losses :]:
            console.print(each.line(), highlight=False, soft_wrap=True)
        self._num_losses = max(self._num_losses, len(found))


class RunningLoss:
    """The mean loss of the last examples: of the newest report that covers enough of them."""

    def __init__(self) -> None:
        self._reports: deque[tuple[int, float, float]] = deque([(0, 0.0, 0.0)])

    def add(self, examples: int, loss: float, weight: float) -> float | None:
        """Take the sums so far; return the mean over the last so many thousand examples, each as often as it counts."""
        reports = self._reports
        if examples < reports[-1][0]:  # a worker died, and what it had not finished counts no more
            reports.clear()
        if not reports or examples > reports[-1][0]:
            reports.append((examples, loss, weight))
        while len(reports) > 2 and examples - reports[1][0] >= _LOSS_EXAMPLES:
            reports.popleft()
        (_, first_loss, first), (_, last_loss, last) = reports[0], reports[-1]
        return (last_loss - first_loss) / (last - first) if last > first else None
