"""Direct the training and evaluation of a model.

The driver posts jobs to a cluster, watches them, collects their reports and saves the model. Workers execute the jobs
(:mod:`paceline.training.worker.worker`).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paceline.data import Columns, Dataset, open_dataset
from paceline.errors import ModelError, ModelLostError, PacelineError
from paceline.launch.local import LocalCluster
from paceline.models.base import open_tables, predict_on_cluster
from paceline.models.metrics import Evaluation
from paceline.models.progressive import progressive_losses
from paceline.protocol import Sequential
from paceline.protocol.jobs import JobAccount, JobState
from paceline.ps import Client, messages, save_tables, to_fields
from paceline.storage.format import MANIFEST
from paceline.temporary import TemporaryFolder
from paceline.training.bad_data import BadData, describe_bad_lines, no_line_left
from paceline.training.block_training import BlockTraining, block_passes
from paceline.training.cluster_health import ClusterHealth
from paceline.training.early_stopping import FOLDER, BestPass, PassLosses
from paceline.training.expiry import FeatureExpiry
from paceline.training.files.data_files import (
    format_of_evaluation,
    is_weighted,
    open_training_data,
    total_size,
    weighting_of,
)
from paceline.training.files.feature_names import keep_feature_names
from paceline.training.initial_model import InitialModel, clear_tables
from paceline.training.job_running import DeferredSignals, FinishedJob, JobRunner
from paceline.training.options import EarlyStopping, TrainOptions
from paceline.training.plan import TrainingPlan
from paceline.training.results import ObservedStaleness, TrainingState, TrainResult, judge_losses, mean_loss
from paceline.training.snapshots import Resumption, TrainingSnapshots, describe_files, describe_training
from paceline.training.weighting import Weighting
from paceline.training.worker import jobs
from paceline.training.worker.table_rates import TableRates


class Training:
    """One training on a cluster. `processes` is its own cluster, or None. `on_news` receives sentences for the user."""

    def __init__(
        self,
        options: TrainOptions,
        plan: TrainingPlan,
        client: Client,
        *,
        num_workers: int,
        processes: LocalCluster | None = None,
        on_progress: Callable[[TrainingState], None] = lambda progress: None,
        on_news: Callable[[str], None] = lambda text: None,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._options = options
        self._plan = plan
        self._client = client
        self._num_workers = num_workers
        self._processes = processes
        self._on_news = on_news
        self._warn = warn
        self._data: Dataset | None = None
        self._signals = DeferredSignals()
        self._health = ClusterHealth(client, processes, warn)
        self._resumption: Resumption | None = None
        self._best: BestPass | None = None
        self._rates: TableRates | None = None
        self._snapshots = None if options.snapshots is None else TrainingSnapshots(client, options.snapshots, warn)
        self._runner = JobRunner(
            client, self._health, self._signals, self._snapshots, on_progress, own_processes=processes is not None
        )

    def run(self) -> TrainResult:
        """Train, save, evaluate. After Ctrl-C or a failure, save the unfinished model if a directory was given."""
        options, plan, spare = self._options, self._plan, None if self._processes is None else self._processes.scratch
        if plan.resumed is not None:
            self._resumption = Resumption(plan.resumed)
        with self._signals, contextlib.ExitStack() as stack:
            self._choose_filters()
            before = 0 if self._resumption is None else self._resumption.examples
            shard_bytes = None if self._resumption is None else self._resumption.shard_bytes
            dataset = open_training_data(options, plan, self._num_workers, spare, shard_bytes)
            self._data = dataset
            train_share = 1.0
            if options.evaluation:
                trained, evaluated = plan.epochs * total_size(options.data), total_size(options.evaluation)
                train_share = trained / (trained + evaluated)
            staleness = ObservedStaleness(self._client, plan.model)
            with dataset:
                self._begin(dataset)
                if options.passes.stopping is not None:
                    self._best = self._begin_validation(options.passes.stopping, stack)
                try:
                    finished = self._train(dataset, train_share)
                    examples = int(finished.state.progress.get("examples", 0))
                    passes = plan.epochs if self._best is None else self._best.losses.last_pass
                    num_rows = None if before else examples // max(passes, 1)
                    bad_data = self._report_bad_data(finished.reports, num_rows)
                    bad_data.check(num_rows, options.reading.max_malformed, options.format)
                except (KeyboardInterrupt, PacelineError) as error:
                    if not isinstance(error, KeyboardInterrupt | ModelLostError):
                        self._runner.check_losses()  # a lost process may be the cause of the error
                    self._save_unfinished(error)
                    raise
            state, statistics, found_staleness = finished.state, self._client.statistics(), staleness.summary()
            rows = sum(server.tables[plan.model.tables[0].name].rows for server in statistics)
            self._check_trained(state, before, bad_data)
            self._calibrate()
            if options.save is not None:
                self.save(options.save)
                if options.feature_names:
                    keep_feature_names(options.save, dataset)
            evaluation = None
            if options.evaluation:
                evaluation = self._evaluate(options.evaluation, dataset, (train_share, 1.0))
            self._warn_if_useless(state, evaluation)
        return TrainResult(
            model=self._plan.model,
            settings={**self._plan.settings(), **options.passes.rates.settings()}
            if options.passes.blocks is None
            else options.passes.blocks.settings(),
            examples=examples,
            seconds=state.seconds,
            examples_per_s=(examples - before) / state.seconds if state.seconds else 0.0,
            train_loss=mean_loss(state.progress),
            num_features=max(rows - 1, 0),  # the bias is also a row
            evaluation=evaluation,
            staleness=found_staleness,
            bad_lines=bad_data,
            lost_workers=self._health.num_lost_workers,
            bytes=int(state.progress.get("bytes", 0)),
            progressive=progressive_losses(state.progress),
            validation=None if self._best is None else self._best.losses.as_json(),
            block_passes=block_passes(finished),
        )

    def _choose_filters(self) -> None:
        options = self._options
        view: messages.View = self._client.link.get_view()
        filters = options.filters.suited_to(view.members)
        if filters is not options.filters:
            self._options = dataclasses.replace(options, filters=filters)
            self._on_news(
                f"servers are on other machines, so the traffic uses --filters {filters.pushed}. They change no "
                "result. Pass --filters none to turn them off"
            )

    def _begin(self, dataset: Dataset) -> None:
        options, plan = self._options, self._plan
        clear_tables(self._client, plan.model, plan.update, self._signals.check)
        if self._resumption is not None:
            self._resume(self._resumption, dataset)
        elif options.init_from is not None:
            initial = InitialModel.read(options.init_from, plan.model, plan.update)
            initial.check_data(dataset)
            initial.load(self._client, self._signals.check)
        if self._snapshots is not None:
            examples = 0 if self._resumption is None else self._resumption.examples
            self._snapshots.begin(describe_training(dataset, plan, str(self._client.consistency)), examples)

    def _train(self, dataset: Dataset, share: float) -> FinishedJob:
        blocks = self._options.passes.blocks
        if blocks is not None:
            training = BlockTraining(
                self._client, self._runner, self._plan, blocks, on_news=self._on_news, warn=self._warn
            )
            return training.run(self._job("read-columns", dataset), dataset, share)
        before, plan = None if self._resumption is None else self._resumption.account, self._plan
        is_sequential = isinstance(self._client.consistency, Sequential)
        if not self._options.passes.rates.is_constant:
            self._options.passes.rates.check_consistency(self._client.consistency)
            tables = open_tables(self._client, plan.model, plan.update)
            self._rates = TableRates(tables, plan.model, plan.update, self._options.passes.rates, plan.epochs)
        try:
            by_passes = self._best is not None or self._options.passes.expire_after is not None
            if by_passes or (self._rates is not None and is_sequential):
                finished = self._train_by_passes(dataset, before, share)
            else:
                job = self._job("train", dataset)
                finished = self._runner.run(job, dataset, epochs=plan.epochs, before=before, span=(0.0, share))
            if self._rates is not None:
                self._rates.reset()
            if self._best is not None:
                self._restore_best(self._best)
            return finished
        finally:
            if self._snapshots is not None:
                self._snapshots.end()

    def _train_by_passes(self, dataset: Dataset, before: JobAccount | None, share: float) -> FinishedJob:
        most, seconds = self._plan.epochs, 0.0
        is_sequential = isinstance(self._client.consistency, Sequential)
        reports: list[tuple[dict[str, Any], bytes]] = []
        first = 0 if self._resumption is None else min(self._resumption.num_passes, most - 1)
        expiry = FeatureExpiry(self._client, self._plan.model, self._plan.update, self._options.passes.expire_after)
        expiry.begin(first + 1, are_seen=self._resumption is not None)  # the pass may be partly done
        for number in range(first + 1, most + 1):
            if self._rates is not None and is_sequential:
                self._rates.set_before(number)
            end, job = share * number / most, self._job("train", dataset)
            finished = self._runner.run(job, dataset, epochs=number, before=before, span=(0.0, end))
            before = finished.account
            seconds += finished.state.seconds
            reports += finished.reports
            if dropped := expiry.end_pass(number):
                self._on_news(dropped)
            if self._best is not None and self._validate(self._best, number, dataset, end).is_over:
                break
        return FinishedJob(dataclasses.replace(finished.state, seconds=seconds), reports, finished.account)

    def _begin_validation(self, stopping: EarlyStopping, stack: contextlib.ExitStack) -> BestPass:
        """Return the store of the best pass. It contains the best pass of the resumed training, if any."""
        if self._options.snapshots is not None:
            folder = Path(self._options.snapshots.directory)
        else:
            scratch = None if self._processes is None else self._processes.scratch
            folder = stack.enter_context(TemporaryFolder.make("best", scratch)).path
        names = [table.name for table in self._plan.model.tables]
        format = format_of_evaluation(stopping.validation, self._options.format or "")
        origin = {"run": self._plan.run, "validation": describe_files(stopping.validation, format)}
        best = BestPass(self._client, folder / FOLDER, PassLosses(stopping), names, origin)
        if self._resumption is not None:
            best.losses.continue_from(self._resumption.training.get("validation"))
            best.find(self._resumption.snapshot.directory / FOLDER)
        return best

    def _validate(self, best: BestPass, number: int, dataset: Dataset, done: float) -> PassLosses:
        """Evaluate the model after a pass. `done` is the finished fraction of the whole work."""
        losses = best.losses
        found = self._evaluate(losses.stopping.validation, dataset, (done, done))
        if losses.add(number, found):
            try:
                best.keep()
            except ModelError as error:
                self._warn(f"pass {number} is the best so far, but cannot be saved: {error}. The training continues")
        self._on_news(losses.line(found))
        if self._snapshots is not None:
            self._snapshots.describe(validation=losses.as_json())
        return losses

    def _restore_best(self, best: BestPass) -> None:
        losses = best.losses
        if losses.is_best or best.is_kept:
            if not losses.is_best:
                best.restore()
            self._on_news(losses.summary(self._plan.epochs))
        else:
            self._warn(f"pass {losses.best_pass} was the best, but could not be saved. The model is from the last pass")

    def _check_trained(self, state: JobState, before: int, bad_data: BadData) -> None:
        examples, model = int(state.progress.get("examples", 0)), self._plan.model
        if not examples:
            raise no_line_left(self._options.data[0], "trained on", bad_data)
        if self._resumption is not None and examples == before:
            done = f"{self._resumption.snapshot} has all examples of {self._plan.epochs} epochs"
            self._warn(f"no examples remained to train on, because {done}. Pass a larger --epochs to continue")
        if not mean_loss(state.progress) <= model.diverged_loss:
            self._warn(f"the training diverged: the mean {model.loss_name} is far too high. Pass a smaller --lr")

    def _warn_if_useless(self, state: JobState, evaluation: Evaluation | None) -> None:
        if is_weighted(self._options):  # losses of weighted examples are not comparable with the shares of labels
            return
        plan = self._plan
        by_losses = judge_losses(plan.model, state.progress, plan.recent)
        useless = by_losses if evaluation is None else evaluation.find_useless()
        if useless is not None:
            self._warn(f"the model may have learned nothing: {useless}")

    def _calibrate(self) -> None:
        recent = self._plan.recent
        if recent is None or self._plan.optimism is None:
            return
        if self._options.passes.blocks is not None:  # no correction, because the solver's intercept is optimal
            return
        tables = open_tables(self._client, self._plan.model, self._plan.update)
        model = self._plan.calibrated_model(predict_on_cluster(self._plan.model, tables, recent))
        self._plan = dataclasses.replace(self._plan, model=model)

    def _resume(self, resumption: Resumption, dataset: Dataset) -> None:
        resumption.check_model(self._plan.model)
        resumption.check_data(dataset)
        open_tables(self._client, self._plan.model, self._plan.update)
        resumption.load(self._client, self._signals.check)
        self._warn(resumption.describe())

    def save(self, directory: str | Path, *, finished: bool = True) -> None:
        save_tables(
            self._client, directory, [table.name for table in self._plan.model.tables], **self._metadata(finished)
        )

    def _metadata(self, finished: bool) -> dict[str, Any]:
        plan, columns = self._plan, self._columns
        return {
            **plan.model.describe(),
            "finished": finished,
            "format": "" if self._data is None else self._data.source_format,
            "columns": None if columns is None else columns.to_fields(),
            "scaling": None if plan.scaling is None else plan.scaling.spec(),
        }

    @property
    def _columns(self) -> Columns | None:
        return None if self._data is None or self._data.columns is None else self._data.columns.unweighted

    def _save_unfinished(self, reason: BaseException) -> None:
        """Save the unfinished model, or the best pass's model. After a failure, never replace a finished model."""
        plan, best = self._plan, self._best
        try:
            if self._processes is not None:
                self._processes.end_workers()
            is_lost = isinstance(reason, ModelLostError) or (self._processes and self._health.find_loss())
            if self._rates is not None and not is_lost:
                self._rates.reset()
            if self._options.save is None:
                return
            directory = Path(self._options.save)
            if not isinstance(reason, KeyboardInterrupt) and (directory / MANIFEST).exists():
                directory = directory.with_name(f"{directory.name}-unfinished")
            if best is not None and best.is_kept:
                rules = {table.name: table.update or plan.update for table in plan.model.tables}
                best.save(directory, rules, **self._metadata(finished=False))
                self._warn(f"the model of pass {best.kept_pass}, the best so far, is saved in {directory}")
            elif is_lost:
                return
            elif not any(table.rows for server in self._client.statistics() for table in server.tables.values()):
                self._warn(f"no example was trained on, so no model is saved in {directory}")
            else:
                self.save(directory, finished=False)
                self._warn(f"the unfinished model is saved in {directory}")
        except PacelineError as error:
            self._warn(f"the unfinished model could not be saved: {error}")

    def _evaluate(self, files: Sequence[str | Path], trained_on: Dataset, span: tuple[float, float]) -> Evaluation:
        plan = self._plan
        with open_dataset(
            files,
            format_of_evaluation(files, trained_on.format),
            self._columns,
            strict=self._options.strict,
            labels=trained_on.labels,
            scaling=plan.scaling,
        ) as dataset:
            reports = self._runner.run(self._job("evaluate", dataset), dataset, span=span).reports
        found = [np.frombuffer(body, np.float32) for fields, body in reports if fields["kind"] == "predictions"]
        width = plan.model.num_outputs
        bad_data = self._report_bad_data(reports, sum(map(len, found)) // (1 + width))
        if not found:
            raise no_line_left(files[0], "evaluated", bad_data)
        halves = [np.split(body, [len(body) // (1 + width)]) for body in found]
        labels, predictions = (np.concatenate([half[i] for half in halves]) for i in range(2))
        return plan.model.evaluate(labels, predictions if width == 1 else predictions.reshape(-1, width))

    def _job(self, task: str, dataset: Dataset) -> jobs.WorkerTask:
        is_training, is_sequential = task != "evaluate", isinstance(self._client.consistency, Sequential)
        filters, pull_filters = self._options.filters.of(task)
        return jobs.WorkerTask(
            task=task,
            model=self._plan.model.describe(),
            dataset=dataset.spec(),
            batch_size=self._plan.batch_size,
            update=to_fields(self._plan.update),
            shards_at_once=self._plan.shards_at_once if is_training else 1,
            is_shuffled=is_training and self._plan.order == "shuffle" and self._plan.epochs > 1,
            reordered=self._resumption.reordered(self._plan) if is_training and self._resumption else (),
            epochs=self._plan.epochs if is_training else 1,
            consistency=str(self._client.consistency),
            weighting=weighting_of(self._options) if is_training else Weighting(),
            rates=None if is_sequential or task != "train" else self._plan.job_rates(self._options.passes.rates),
            filters=filters,
            pull_filters=pull_filters,
        )

    def _report_bad_data(self, reports: list[tuple[dict[str, Any], bytes]], num_good: int | None) -> BadData:
        found = [fields for fields, _ in reports if fields["kind"] == "data"]
        for fields in found:
            if fields["cache_error"]:
                self._warn(fields["cache_error"])
                break
        bad = describe_bad_lines([(fields["bad_lines"], fields["first"]) for fields in found])
        if bad.count:
            self._warn(bad.sentence(num_good))
        return bad
