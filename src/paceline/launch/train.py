"""Training and evaluation of a click model: the driver's side.

It posts jobs to a cluster (its own, or one that was started by hand), watches how far they are, gathers the findings,
and saves the model. Workers do the work (:mod:`paceline.models.worker`).
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..data import Columns, Dataset, line_number, open_dataset
from ..errors import DataError, PacelineError, PeerError, UsageError
from ..models import jobs
from ..models.metrics import Evaluation, evaluate
from ..protocol import Consistency, Sequential
from ..ps import FTRL, Client, UpdateRule, messages, to_fields
from .local import LocalCluster

_POLL_S = 0.05
_CACHE_SPARE = 4  # a temporary cache is made where there is this many times the data's size of free disk


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """What to train, and how."""

    data: Sequence[str | Path]
    """Files to train on."""
    evaluation: Sequence[str | Path] = ()
    """Files to evaluate on after training."""
    format: str | None = None
    """criteo, libsvm, csv or parquet; None: guessed from the content."""
    columns: Columns | None = None
    """Of csv and parquet."""
    epochs: int = 4
    """Passes over the data."""
    batch_size: int = 256
    """Examples per minibatch of one worker."""
    update: UpdateRule = field(default_factory=lambda: FTRL(alpha=0.05, beta=1.0, l1=1.0))
    """How servers update weights."""
    save: str | Path | None = None
    """Directory for the model."""
    cache: str | Path | None = None
    """Directory that keeps parsed data for later passes; None: a temporary one, if there are several passes."""
    strict: bool = False
    """Whether the first malformed line ends the training."""


@dataclass(frozen=True)
class Progress:
    """How far a job is."""

    task: str
    done: int
    total: int | None
    examples: int
    loss: float
    num_bytes: int
    num_workers: int
    seconds: float


@dataclass(frozen=True)
class BadData:
    """Lines that were skipped."""

    count: int
    first: list[str]


@dataclass(frozen=True)
class TrainResult:
    """What came of a training. Seconds run from the first shard leased to the last update applied."""

    examples: int
    seconds: float
    examples_per_s: float
    train_log_loss: float
    num_features: int
    nonzero: int | None
    evaluation: Evaluation | None
    staleness: dict[str, Any]
    bad_lines: BadData
    lost_workers: int
    bytes: int

    def as_json(self) -> dict[str, Any]:
        """Return the final object of ``paceline train --json``."""
        found = self.evaluation
        return {
            "auc": None if found is None else found.auc,
            "log_loss": None if found is None else found.log_loss,
            "calibration": None if found is None else found.calibration,
            "accuracy": None if found is None else found.accuracy,
            "eval_examples": None if found is None else found.examples,
            "train_log_loss": self.train_log_loss,
            "examples": self.examples,
            "seconds": self.seconds,
            "examples_per_s": self.examples_per_s,
            "num_features": self.num_features,
            "staleness": self.staleness,
            "bad_lines": self.bad_lines.count,
            "lost_workers": self.lost_workers,
            "bytes": self.bytes,
        }


class Training:
    """One training on a cluster. `processes`, if it is our own cluster, is asked who has died."""

    def __init__(
        self,
        options: TrainOptions,
        client: Client,
        *,
        num_workers: int,
        processes: LocalCluster | None = None,
        on_progress: Callable[[Progress], None] = lambda progress: None,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        if options.epochs < 1 or options.batch_size < 1:
            raise UsageError(
                f"epochs={options.epochs}, batch_size={options.batch_size}: expected positive whole numbers"
            )
        self._options = options
        self._client = client
        self._num_workers = num_workers
        self._processes = processes
        self._on_progress = on_progress
        self._warn = warn
        self._lost = 0

    def run(self) -> TrainResult:
        """Train, evaluate, save. On Ctrl-C or a failure in mid-training the model so far is saved, if it was to be.

        Raises DataError for what is wrong with the data, PeerError when servers or all workers have died.
        """
        with tempfile.TemporaryDirectory(prefix="paceline-cache-") as spare:
            dataset = open_training_data(self._options, self._num_workers, Path(spare))
            with dataset:
                try:
                    state, reports = self._run_job("train", dataset, self._options.epochs)
                except (KeyboardInterrupt, PacelineError):
                    self._save_what_there_is()
                    raise
        statistics = self._client.statistics()
        staleness = summarize_staleness([each.tables[jobs.TABLE].staleness for each in statistics])
        rows = sum(each.tables[jobs.TABLE].rows for each in statistics)
        if self._options.save is not None:
            self.save()
        evaluation = self._evaluate(dataset) if self._options.evaluation else None
        examples = int(state.progress.get("examples", 0))
        return TrainResult(
            examples=examples,
            seconds=state.seconds,
            examples_per_s=examples / state.seconds if state.seconds else 0.0,
            train_log_loss=state.progress.get("loss", 0.0) / max(examples, 1),
            num_features=max(rows - 1, 0),  # the bias is no feature
            nonzero=None,
            evaluation=evaluation,
            staleness=staleness,
            bad_lines=self._bad_data(reports),
            lost_workers=self._lost,
            bytes=int(state.progress.get("bytes", 0)),
        )

    def save(self) -> None:
        """Save the model."""
        assert self._options.save is not None
        columns = self._options.columns
        model = {
            "kind": "lr",
            "format": self._format,
            "columns": None
            if columns is None
            else {"label": columns.label, "categorical": list(columns.categorical), "numeric": list(columns.numeric)},
        }
        self._client.save(self._options.save, **model)

    def _save_what_there_is(self) -> None:
        if self._options.save is None:
            return
        try:
            if self._processes is not None:
                self._processes.end_workers()
            if any(spec.name == jobs.TABLE for spec in self._client.tables()):
                self.save()
                self._warn(f"the model so far is saved in {self._options.save}")
        except PacelineError as error:
            self._warn(f"the model so far could not be saved: {error}")

    def _evaluate(self, trained_on: Dataset) -> Evaluation:
        options = self._options
        with open_dataset(
            options.evaluation, options.format or trained_on.format, trained_on.columns, strict=options.strict
        ) as dataset:
            _, reports = self._run_job("evaluate", dataset, 1)
        found = [body for fields, body in reports if fields["kind"] == "predictions"]
        halves = [np.frombuffer(body, np.float32).reshape(2, -1) for body in found]
        if not halves:
            raise DataError(f"{options.evaluation[0]} has no line that can be evaluated")
        self._bad_data(reports)
        return evaluate(np.concatenate([h[0] for h in halves]), np.concatenate([h[1] for h in halves]))

    # A job, start to end.

    def _run_job(
        self, task: str, dataset: Dataset, epochs: int
    ) -> tuple[messages.JobState, list[tuple[dict[str, Any], bytes]]]:
        link = self._client.link
        consistency: Consistency = self._client.consistency
        job = jobs.Job(
            task=task,
            model="lr",
            dataset=dataset.spec(),
            batch_size=self._options.batch_size,
            update=to_fields(self._options.update),
            consistency=str(consistency),
        )
        self._format = dataset.format
        strided = task == "train" and isinstance(consistency, Sequential)
        number = link.call(
            messages.PostJob(
                description=jobs.encode(job),
                files=tuple(dataset.num_shards(i) for i in range(len(dataset.files))),
                epochs=epochs,
                assignment="strided" if strided else "first-come",
            ),
            int,
        )
        reports: list[tuple[dict[str, Any], bytes]] = []
        reported = 0.0
        while True:
            state: messages.JobState = link.call(messages.JobStatus(job=number), messages.JobState)
            self._lost = max(self._lost, state.lost_workers)
            self._take_reports(number, state.num_reports, reports)
            if state.failed is not None:
                raise DataError(state.failed[1])
            if state.finished:
                self._report(task, state)
                self._take_reports(number, 1 << 30, reports)
                return state, reports
            self._check_alive(state)
            if time.monotonic() - reported >= 0.2:
                reported = time.monotonic()
                self._report(task, state)
            time.sleep(_POLL_S)

    def _take_reports(self, number: int, most: int, reports: list[tuple[dict[str, Any], bytes]]) -> None:
        for _ in range(most):
            fields, body = self._client.link.call_with_body(messages.TakeReports(job=number))
            if fields is None:
                return
            reports.append((fields, bytes(body)))

    def _report(self, task: str, state: messages.JobState) -> None:
        self._on_progress(
            Progress(
                task=task,
                done=state.done,
                total=state.total,
                examples=int(state.progress.get("examples", 0)),
                loss=state.progress.get("loss", 0.0),
                num_bytes=int(state.progress.get("bytes", 0)),
                num_workers=state.num_workers,
                seconds=state.seconds,
            )
        )

    def _check_alive(self, state: messages.JobState) -> None:
        if self._processes is None:
            return
        dead = self._processes.dead_children("server") + self._processes.dead_children("scheduler")
        if dead:
            raise PeerError(
                f"{dead[0][0]} died (status {dead[0][1]}), and with it its part of the model: start again from the last "
                "saved one"
            )
        if not self._processes.pids("worker"):
            raise PeerError("all workers have died: nobody is left to train")

    def _bad_data(self, reports: list[tuple[dict[str, Any], bytes]]) -> BadData:
        count, first = 0, []
        for fields, _ in reports:
            if fields["kind"] != "data":
                continue
            count += fields["bad_lines"]
            first += fields["first"]
            if fields["cache_error"]:
                self._warn(f"parsed data could not be cached, so every pass parsed it again: {fields['cache_error']}")
        lines = []
        for file, offset, row, text, reason in sorted(first, key=lambda line: (line[0], line[1] or 0, line[2] or 0))[:5]:
            where = f"line {line_number(file, offset)}" if offset is not None else f"row {row}"
            lines.append(f"{file}, {where}: {reason}: {text!r}")
        if count:
            listed = "".join(f"\n  {line}" for line in lines)
            self._warn(f"{count} malformed line(s) were skipped (use --strict to stop at the first):{listed}")
        return BadData(count, lines)


def open_training_data(options: TrainOptions, num_workers: int, spare: Path) -> Dataset:
    """Open the data, in shards that suit the number of workers, cached if there are several passes."""
    dataset = open_dataset(options.data, options.format, options.columns, strict=options.strict)
    size = sum(os.path.getsize(file) for file in dataset.files)
    cache: Path | None = None if options.cache is None else Path(options.cache)
    if cache is None and options.epochs > 1:
        disk = os.statvfs(spare)
        packed = 8 if any(str(file).endswith(".gz") for file in dataset.files) else 1
        if disk.f_bavail * disk.f_frsize > _CACHE_SPARE * size * packed:
            cache = spare
    shard_bytes = max(256 << 10, min(size // (16 * num_workers), 16 << 20))
    format, columns = dataset.format, dataset.columns
    dataset.close()
    return open_dataset(options.data, format, columns, shard_bytes, options.strict, cache)


def summarize_staleness(histograms: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return mean, maximum and histogram of the staleness that servers observed."""
    total = np.sum(np.array(histograms, np.int64), axis=0)
    count = int(total.sum())
    ages = np.arange(len(total))
    seen = np.flatnonzero(total)
    last = int(seen[-1]) if count else 0
    return {
        "mean": float((total * ages).sum() / count) if count else 0.0,
        "max": last,
        "histogram": total[: last + 1].tolist(),
    }


def train_locally(
    options: TrainOptions,
    *,
    servers: int = 1,
    workers: int = 1,
    consistency: Consistency | None = None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    warn: Callable[[str], None] = lambda text: None,
    on_compile: Callable[[str], None] | None = None,
    **cluster_options: Any,
) -> TrainResult:
    """Train on processes of this machine that live as long as the training. Arguments as LocalCluster and Training."""
    open_dataset(options.data, options.format, options.columns).close()  # what is wrong is said before anything starts
    if options.evaluation:
        open_dataset(options.evaluation, options.format, options.columns).close()
    with LocalCluster(
        servers=servers, workers=workers, consistency=consistency, on_compile=on_compile, **cluster_options
    ) as cluster:
        for rank in range(workers):
            cluster.start_worker(rank)
        with cluster.connect(observer=True) as client:
            cluster.wait_workers(client, workers)
            training = Training(
                options, client, num_workers=workers, processes=cluster, on_progress=on_progress, warn=warn
            )
            return training.run()
