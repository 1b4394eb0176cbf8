"""Post the jobs of a training to its cluster and wait for their end. Signals are deferred until then."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

from paceline.data import Dataset
from paceline.errors import (
    DataError,
    DeadlineError,
    LostRowsError,
    ModelLostError,
    NoRoomError,
    PacelineError,
    TableMismatchError,
    UsageError,
)
from paceline.models.progressive import progressive_losses
from paceline.protocol import Sequential
from paceline.protocol.jobs import JobAccount, JobSpec, JobState, TakenReport
from paceline.ps import Client, messages
from paceline.training.cluster_health import ClusterHealth
from paceline.training.results import TrainingState
from paceline.training.snapshots import TrainingSnapshots
from paceline.training.worker import jobs
from paceline.transport.backoff import Backoff

_FIRST_POLL_S, _POLL_S = 0.002, 0.05  # the first polls are frequent, because a job on little data ends quickly
_PROGRESS_S = 0.2
_REPLY_S = 1.0
_PATIENCE_S = 90.0  # longer than the client waits for a lost scheduler
_ERRORS: dict[str, type[PacelineError]] = {
    kind.__name__: kind for kind in (DataError, LostRowsError, NoRoomError, TableMismatchError, UsageError)
}


@dataclass(frozen=True)
class FinishedJob:
    """The result of a job: its final state and the workers' reports."""

    state: JobState
    reports: list[tuple[dict[str, Any], bytes]]
    account: JobAccount
    """The finished shards, from which another job can continue."""


class DeferredSignals:
    """Records SIGINT, SIGTERM and SIGHUP in its ``with`` block. :meth:`check` and the block's end handle them.

    A second signal is handled immediately. A signal is not deferred if it has no Python handler, or if the block does
    not run in the main thread.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._recorded: int | None = None

    def __enter__(self) -> DeferredSignals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                handler = signal.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    signal.signal(number, self._record)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if error is None:
            self.check()
        self._handlers = {}

    def check(self) -> None:
        """Call the handler of a recorded signal, which usually raises KeyboardInterrupt."""
        if self._recorded is not None:
            number, self._recorded = self._recorded, None
            self._handlers[number](number, None)

    def _record(self, number: int, frame: FrameType | None) -> None:
        if self._recorded is not None:
            self._recorded = None
            self._handlers[number](number, frame)
        else:
            self._recorded = number


class JobRunner:
    """Runs jobs on a cluster, one after another. If `own_processes`, the cluster ends with the training."""

    def __init__(
        self,
        client: Client,
        health: ClusterHealth,
        signals: DeferredSignals,
        snapshots: TrainingSnapshots | None,
        on_progress: Callable[[TrainingState], None],
        *,
        own_processes: bool,
    ) -> None:
        self._client = client
        self._health = health
        self._signals = signals
        self._snapshots = snapshots
        self._on_progress = on_progress
        self._own_processes = own_processes

    def run(
        self,
        job: jobs.WorkerTask,
        dataset: Dataset,
        *,
        epochs: int = 1,
        before: JobAccount | None = None,
        span: tuple[float, float] = (0.0, 1.0),
        num_shards: int | None = None,
        on_report: Callable[[dict[str, Any]], None] = lambda fields: None,
    ) -> FinishedJob:
        """Run a job on the shards of a data set that are not finished in `before`.

        `span` is the job's part of the whole work. If `num_shards` is given, the job leases that many numbers to the
        workers instead of the data set's shards. Raises the workers' DataError, LostRowsError, NoRoomError,
        TableMismatchError or UsageError. Losses raise ModelLostError or PeerError, and an interruption raises
        KeyboardInterrupt.
        """
        self._health.begin_job()
        strided = job.task != "evaluate" and isinstance(self._client.consistency, Sequential)
        known = [None] * len(dataset.files) if before is None else before.files
        spec = JobSpec(
            description=jobs.encode(job),
            files=tuple(dataset.num_shards(i) if size is None else size for i, size in enumerate(known))
            if num_shards is None
            else (num_shards,),
            epochs=epochs,
            assignment="strided" if strided else "first-come",
            done=() if before is None else before.done,
            progress={} if before is None else before.progress,
        )
        number = self._client.link.call(messages.PostJob(spec=spec), int)
        if job.task == "train" and self._snapshots is not None:
            self._snapshots.follow(number)
        state, reports = self._watch(number, job.task, epochs, span, on_report)
        account = self._client.link.call(messages.GetAccount(job=number), JobAccount)
        return FinishedJob(state, reports, account)

    def check_losses(self) -> None:
        loss = self._health.find_loss()
        if loss is None:
            return
        detail = "with its replacements" if loss.startswith("scheduler") else "and with it a part of the model"
        if self._snapshots is None or self._snapshots.newest is None:
            raise ModelLostError(f"{loss}, {detail}. Start again from the last saved model")
        directory = str(self._snapshots.directory)
        number = self._snapshots.newest.number
        raise ModelLostError(f"{loss}, {detail}. Continue from snapshot {number} with --resume {directory}", directory)

    def _watch(
        self,
        number: int,
        task: str,
        epochs: int,
        span: tuple[float, float],
        on_report: Callable[[dict[str, Any]], None],
    ) -> tuple[JobState, list[tuple[dict[str, Any], bytes]]]:
        reports: list[tuple[dict[str, Any], bytes]] = []
        reported_s, pauses = 0.0, Backoff(_FIRST_POLL_S, _POLL_S)
        while True:
            state = self._request_state(number)
            self._health.report_lost_workers(task, state)
            num_known = len(reports)
            self._take_reports(number, state.num_reports, reports)
            for fields, _ in reports[num_known:]:
                on_report(fields)
            if state.failed is not None:
                raise _ERRORS.get(state.failed[0], DataError)(state.failed[1])
            if state.finished and not state.num_reports:  # not 0 until a new scheduler has all reports
                self._report_progress(task, epochs, span, state)
                return state, reports
            self._check_signals(number)
            self._health.report_replacements()
            self.check_losses()
            self._health.check_workers(state)
            if task == "train" and self._snapshots is not None:
                self._snapshots.poll(state)
            if time.monotonic() - reported_s >= _PROGRESS_S:
                reported_s = time.monotonic()
                self._report_progress(task, epochs, span, state)
            time.sleep(pauses.next_s())

    def _request_state(self, number: int) -> JobState:
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                state: JobState = self._client.link.call(messages.JobStatus(job=number), JobState, timeout_s=_REPLY_S)
                return state
            except DeadlineError:
                self._check_signals(number)
                if self._own_processes:
                    self.check_losses()
                if time.monotonic() > deadline:
                    raise

    def _check_signals(self, number: int) -> None:
        try:
            self._signals.check()
        except KeyboardInterrupt:
            interrupted = messages.JobFailed(job=number, error="PacelineError", message="the training was interrupted")
            self._client.link.notify(interrupted)
            raise

    def _take_reports(self, number: int, most: int, reports: list[tuple[dict[str, Any], bytes]]) -> None:
        for _ in range(most):
            report, body = self._client.link.call_with_body(messages.TakeReports(job=number), TakenReport | None)
            if report is None:
                return
            reports.append((report.fields, bytes(body)))

    def _report_progress(self, task: str, epochs: int, span: tuple[float, float], state: JobState) -> None:
        done = state.done / state.total if state.total else None
        self._on_progress(
            TrainingState(
                task=task,
                fraction=None if done is None else span[0] + done * (span[1] - span[0]),
                epoch=None if done is None else min(int(done * epochs) + 1, epochs),
                examples=int(state.progress.get("examples", 0)),
                weight=state.progress.get("weight", 0.0),
                loss=state.progress.get("loss", 0.0),
                num_bytes=int(state.progress.get("bytes", 0)),
                num_workers=state.num_workers,
                seconds=state.seconds,
                is_taking_snapshot=self._snapshots is not None and self._snapshots.is_taking,
                progressive=progressive_losses(state.progress, 0 if state.finished else max(state.num_workers, 1)),
            )
        )
