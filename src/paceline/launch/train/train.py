"""Training and evaluation of a model: the driver's side.

It posts jobs to a cluster (its own, or one that was started by hand), watches how far they are, gathers the findings,
and saves the model. Workers do the work (:mod:`paceline.models.worker`).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from paceline.data import Columns, Dataset, open_dataset
from paceline.errors import (
    DataError,
    DeadlineError,
    ModelLostError,
    PacelineError,
    TableMismatchError,
    UsageError,
)
from paceline.launch.interrupts import DeferredSignals
from paceline.launch.local import LocalCluster
from paceline.launch.train.bad_data import BadData, describe_bad_lines
from paceline.launch.train.cluster_health import ClusterHealth
from paceline.launch.train.data_files import is_weighted, open_training_data, settle_files, total_size, weighting_of
from paceline.launch.train.feature_names import keep_feature_names
from paceline.launch.train.initial_model import InitialModel
from paceline.launch.train.options import TrainOptions
from paceline.launch.train.plan import TrainingPlan
from paceline.launch.train.planning import plan_training
from paceline.launch.train.results import ObservedStaleness, TrainingState, TrainResult
from paceline.launch.train.snapshots import Resumption, TrainingSnapshots, describe_training
from paceline.models import jobs
from paceline.models.base import KeyScratch, open_tables
from paceline.models.metrics import ClickEvaluation, Evaluation, find_useless
from paceline.models.progressive import progressive_losses
from paceline.models.weighting import Weighting
from paceline.protocol import Consistency, Sequential
from paceline.protocol.jobs import JobSpec, JobState, TakenReport
from paceline.ps import Client, messages, to_fields
from paceline.storage.manifests import MANIFEST

_POLL_S = 0.05
_ANSWER_S = 1.0
_PATIENCE_S = 90.0  # longer than the client's with a scheduler that is gone
_ERRORS: dict[str, type[PacelineError]] = {kind.__name__: kind for kind in (DataError, TableMismatchError, UsageError)}


class Training:
    """One training on a cluster. `processes`, if it is our own cluster, is asked who has died."""

    def __init__(
        self,
        options: TrainOptions,
        plan: TrainingPlan,
        client: Client,
        *,
        num_workers: int,
        processes: LocalCluster | None = None,
        on_progress: Callable[[TrainingState], None] = lambda progress: None,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._options = options
        self._plan = plan
        self._client = client
        self._num_workers = num_workers
        self._processes = processes
        self._on_progress = on_progress
        self._warn = warn
        self._format = ""
        self._columns: Columns | None = None
        self._span = (0.0, 1.0)
        self._signals = DeferredSignals()
        self._health = ClusterHealth(client, processes, warn)
        self._resumption: Resumption | None = None
        self._snapshots = None if options.snapshots is None else TrainingSnapshots(client, options.snapshots, warn)

    def run(self) -> TrainResult:
        """Train, save, evaluate. On Ctrl-C or a failure in mid-training the model so far is saved, if it was to be.

        Raises DataError for what is wrong with the data, PeerError when servers or all workers have died.
        """
        options, plan, spare = self._options, self._plan, None if self._processes is None else self._processes.scratch
        if plan.resumed is not None:
            self._resumption = Resumption(plan.resumed)
        with self._signals:
            before = 0 if self._resumption is None else self._resumption.examples
            shard_bytes = None if self._resumption is None else self._resumption.shard_bytes
            dataset = open_training_data(options, plan, self._num_workers, spare, shard_bytes)
            train_share = 1.0
            if options.evaluation:
                trained, evaluated = plan.epochs * total_size(options.data), total_size(options.evaluation)
                train_share = trained / (trained + evaluated)
            self._span = (0.0, train_share)
            staleness = ObservedStaleness(self._client, plan.model)
            with dataset:
                if self._resumption is not None:
                    self._resume(self._resumption, dataset)
                elif options.init_from is not None:
                    initial = InitialModel.read(options.init_from, plan.model, plan.update)
                    initial.check_data(dataset)
                    initial.load(self._client, self._signals.check)
                try:
                    state, reports = self._run_job("train", dataset, plan.epochs)
                except (KeyboardInterrupt, PacelineError) as error:
                    if not isinstance(error, KeyboardInterrupt | ModelLostError):
                        self._check_gone()  # which may be what is behind it
                    self._save_what_there_is(error)
                    raise
            statistics = self._client.statistics()
            found_staleness = staleness.summary()
            rows = sum(each.tables[plan.model.tables[0].name].rows for each in statistics)
            examples = int(state.progress.get("examples", 0))
            bad_data = self._report_bad_data(reports)
            if not examples:
                raise DataError(f"{options.data[0]} has no line that can be trained on")
            if self._resumption is not None and examples == before:
                done = f"{self._resumption.snapshot} has all examples of {plan.epochs} epochs"
                self._warn(f"nothing was left to train: {done}; a larger --epochs goes on")
            loss = state.progress.get("loss", 0.0) / examples
            if not loss <= plan.model.diverged_loss:
                what = f"its mean {plan.model.loss_name} is beyond all measure"
                self._warn(f"the training diverged: {what}; choose a smaller --lr")
            self._calibrate()
            if options.save is not None:
                self.save(options.save)
                if options.feature_names:
                    keep_feature_names(options.save, dataset)
            self._span = (train_share, 1.0)
            evaluation = self._evaluate(dataset) if options.evaluation else None
            self._warn_if_useless(state, evaluation)
        return TrainResult(
            model=self._plan.model,
            settings=self._plan.settings(),
            examples=examples,
            seconds=state.seconds,
            examples_per_s=(examples - before) / state.seconds if state.seconds else 0.0,
            train_loss=loss,
            num_features=max(rows - 1, 0),  # the bias is no feature
            evaluation=evaluation,
            staleness=found_staleness,
            bad_lines=bad_data,
            lost_workers=self._health.num_lost_workers,
            bytes=int(state.progress.get("bytes", 0)),
            progressive=progressive_losses(state.progress),
        )

    def _warn_if_useless(self, state: JobState, evaluation: Evaluation | None) -> None:
        """Say so if the model predicts no better than always the same does."""
        useless = None
        if evaluation is not None:
            useless = evaluation.find_useless()
        elif issubclass(self._plan.model.evaluation, ClickEvaluation) and not is_weighted(self._options):
            examples, positives = int(state.progress["examples"]), int(state.progress.get("positives", 0))
            useless = find_useless(state.progress["loss"] / examples, positives, examples)
        if useless is not None:
            self._warn(f"the model may have learned nothing: {useless}")

    def _calibrate(self) -> None:
        """Have predictions right in the mean on the newest examples of the sample."""
        recent = self._plan.recent
        if recent is None or is_weighted(self._options):  # which changes what is right in the mean
            return
        minibatch = self._plan.model.prepare(recent, KeyScratch())
        tables = open_tables(self._client, self._plan.model, self._plan.update)
        weights = [table.pull(keys, assume_unique=True) for table, keys in zip(tables, minibatch.keys, strict=True)]
        model = self._plan.model.calibrated(minibatch.labels, minibatch.predict(weights))
        self._plan = dataclasses.replace(self._plan, model=model)

    def _resume(self, resumption: Resumption, dataset: Dataset) -> None:
        """Bring the cluster to where the snapshot was."""
        resumption.check_model(self._plan.model)
        resumption.check_data(dataset)
        open_tables(self._client, self._plan.model, self._plan.update)
        resumption.load(self._client, self._signals.check)
        self._warn(resumption.describe())

    def save(self, directory: str | Path, *, finished: bool = True) -> None:
        """Save the model."""
        plan = self._plan
        columns = None if self._columns is None else self._columns.to_fields()
        scaling = None if plan.scaling is None else plan.scaling.spec()
        model = {**plan.model.describe(), "finished": finished, "format": self._format, "columns": columns}
        self._client.save(directory, **model, scaling=scaling)

    def _save_what_there_is(self, reason: BaseException) -> None:
        """Save the unfinished model: after Ctrl-C under the name given, after a failure never over a finished one."""
        if self._options.save is None:
            return
        directory = Path(self._options.save)
        if not isinstance(reason, KeyboardInterrupt) and (directory / MANIFEST).exists():
            directory = directory.with_name(f"{directory.name}-unfinished")
        try:
            if self._processes is not None:
                self._processes.end_workers()
                if self._health.find_gone():
                    return  # and the model with it
            if not any(table.rows for each in self._client.statistics() for table in each.tables.values()):
                self._warn(f"nothing was trained yet, and nothing is saved in {directory}")
                return
            self.save(directory, finished=False)
            self._warn(f"the model so far is saved in {directory}")
        except PacelineError as error:
            self._warn(f"the model so far could not be saved: {error}")

    def _evaluate(self, trained_on: Dataset) -> Evaluation:
        options, plan = self._options, self._plan
        with open_dataset(
            options.evaluation,
            trained_on.format,
            self._columns,
            strict=options.strict,
            labels=trained_on.labels,
            scaling=plan.scaling,
        ) as dataset:
            _, reports = self._run_job("evaluate", dataset, 1)
        found = [np.frombuffer(body, np.float32) for fields, body in reports if fields["kind"] == "predictions"]
        self._report_bad_data(reports)
        if not found:
            raise DataError(f"{options.evaluation[0]} has no line that can be evaluated")
        width = plan.model.num_outputs
        halves = [np.split(body, [len(body) // (1 + width)]) for body in found]
        labels, predictions = (np.concatenate([half[i] for half in halves]) for i in range(2))
        return plan.model.evaluate(labels, predictions if width == 1 else predictions.reshape(-1, width))

    # A job, start to end.

    def _run_job(self, task: str, dataset: Dataset, epochs: int) -> tuple[JobState, list[tuple[dict[str, Any], bytes]]]:
        link = self._client.link
        consistency: Consistency = self._client.consistency
        job = jobs.Job(
            task=task,
            model=self._plan.model.describe(),
            dataset=dataset.spec(),
            batch_size=self._plan.batch_size,
            update=to_fields(self._plan.update),
            shards_at_once=self._plan.shards_at_once if task == "train" else 1,
            consistency=str(consistency),
            weighting=weighting_of(self._options) if task == "train" else Weighting(),
            filters=self._options.filter_text(task),
            pull_filters=None if task == "evaluate" else self._options.pull_filters,
        )
        self._format, self._columns = dataset.format, dataset.columns and dataset.columns.unweighted
        self._health.begin_job()
        strided = task == "train" and isinstance(consistency, Sequential)
        resumed = self._resumption.account if task == "train" and self._resumption is not None else None
        known = [None] * len(dataset.files) if resumed is None else resumed.files
        number = link.call(
            messages.PostJob(
                spec=JobSpec(
                    description=jobs.encode(job),
                    files=tuple(dataset.num_shards(i) if size is None else size for i, size in enumerate(known)),
                    epochs=epochs,
                    assignment="strided" if strided else "first-come",
                    done=() if resumed is None else resumed.done,
                    progress={} if resumed is None else resumed.progress,
                )
            ),
            int,
        )
        if task == "train" and self._snapshots is not None:
            examples = 0 if self._resumption is None else self._resumption.examples
            training = describe_training(dataset, self._plan, str(consistency))
            self._snapshots.begin(number, training, examples)
        try:
            return self._watch_job(task, number)
        finally:
            if task == "train" and self._snapshots is not None:
                self._snapshots.end()

    def _watch_job(self, task: str, number: int) -> tuple[JobState, list[tuple[dict[str, Any], bytes]]]:
        """Watch a job to its end."""
        reports: list[tuple[dict[str, Any], bytes]] = []
        reported = 0.0
        while True:
            state = self._ask_state(number)
            self._health.note_lost_workers(task, state)
            self._take_reports(number, state.num_reports, reports)
            if state.failed is not None:
                raise _ERRORS.get(state.failed[0], DataError)(state.failed[1])
            if state.finished and not state.num_reports:  # what a new scheduler hears again, it counts again
                self._report(task, state)
                return state, reports
            self._check_signals(number)
            self._health.note_replaced()
            self._check_gone()
            self._health.check_workers(state)
            if task == "train" and self._snapshots is not None:
                self._snapshots.look(state)
            if time.monotonic() - reported >= 0.2:
                reported = time.monotonic()
                self._report(task, state)
            time.sleep(_POLL_S)

    def _ask_state(self, number: int) -> JobState:
        """Ask how far a job is. That may take long, while the scheduler is replaced; what else happens is noticed."""
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                state: JobState = self._client.link.call(messages.JobStatus(job=number), JobState, timeout_s=_ANSWER_S)
                return state
            except DeadlineError:
                self._check_signals(number)
                if self._processes is not None:
                    self._check_gone()
                if time.monotonic() > deadline:
                    raise

    def _check_signals(self, number: int) -> None:
        try:
            self._signals.check()
        except KeyboardInterrupt:
            interrupted = messages.JobFailed(job=number, error="PacelineError", message="the training was interrupted")
            self._client.link.tell(interrupted)
            raise

    def _take_reports(self, number: int, most: int, reports: list[tuple[dict[str, Any], bytes]]) -> None:
        for _ in range(most):
            report, body = self._client.link.call_with_body(messages.TakeReports(job=number), TakenReport | None)
            if report is None:
                return
            reports.append((report.fields, bytes(body)))

    def _report(self, task: str, state: JobState) -> None:
        done = state.done / state.total if state.total else None
        self._on_progress(
            TrainingState(
                task=task,
                fraction=None if done is None else self._span[0] + done * (self._span[1] - self._span[0]),
                epoch=None if done is None else min(int(done * self._plan.epochs) + 1, self._plan.epochs),
                examples=int(state.progress.get("examples", 0)),
                loss=state.progress.get("loss", 0.0),
                num_bytes=int(state.progress.get("bytes", 0)),
                num_workers=state.num_workers,
                seconds=state.seconds,
                progressive=progressive_losses(state.progress, 0 if state.finished else max(state.num_workers, 1)),
            )
        )

    def _check_gone(self) -> None:
        gone = self._health.find_gone()
        if gone is not None:
            what = (
                "as were those that took its place"
                if gone.startswith("scheduler")
                else "and with it its part of the model"
            )
            if self._snapshots is None or self._snapshots.newest is None:
                raise ModelLostError(f"{gone}, {what}: start again from the last saved one")
            directory = str(self._snapshots.directory)
            number = self._snapshots.newest.number
            raise ModelLostError(f"{gone}, {what}: go on from snapshot {number} with --resume {directory}", directory)

    def _report_bad_data(self, reports: list[tuple[dict[str, Any], bytes]]) -> BadData:
        found = [fields for fields, _ in reports if fields["kind"] == "data"]
        for fields in found:
            if fields["cache_error"]:
                self._warn(fields["cache_error"])
                break
        bad = describe_bad_lines([(fields["bad_lines"], fields["first"]) for fields in found])
        if bad.count:
            self._warn(bad.sentence())
        return bad


def train_locally(
    options: TrainOptions,
    *,
    servers: int = 1,
    workers: int = 1,
    consistency: Consistency | None = None,
    on_progress: Callable[[TrainingState], None] = lambda progress: None,
    warn: Callable[[str], None] = lambda text: None,
    on_compile: Callable[[str], None] | None = None,
    **cluster_options: Any,
) -> TrainResult:
    """Train on processes of this machine that live as long as the training. Arguments as LocalCluster and Training."""
    options, _ = settle_files(options)  # what is wrong is said before anything starts
    with (
        LocalCluster.start(
            servers=servers,
            workers=workers,
            consistency=consistency,
            on_compile=on_compile,
            start_workers=True,
            **cluster_options,
        ) as cluster,
        cluster.connect(observer=True) as client,
    ):
        plan = plan_training(options, warn)  # while workers start
        cluster.wait_workers(client, workers)
        training = Training(
            options, plan, client, num_workers=workers, processes=cluster, on_progress=on_progress, warn=warn
        )
        return training.run()
