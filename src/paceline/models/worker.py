"""A worker process: it takes jobs from the scheduler, shards of their data, and trains or predicts.

The loop overlaps what it can without adding staleness: as soon as a minibatch's gradient is sent, the next one's weights
are asked for (the server answers after it has applied the gradient), and while they are on their way the minibatch after
that is parsed and its keys deduped.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from ..data import Batch, Dataset, open_spec
from ..errors import DataError, PacelineError, PeerError
from ..ps import RULES, Client, SparseTable, Ticket, from_fields, messages
from ..transport import Transport
from . import jobs
from .logistic import Minibatch, Preparation

NOTHING_NOW, ALL_DONE = -1, -2
_PROGRESS_S = 0.2


def run_worker(
    transport: Transport,
    scheduler: str,
    *,
    rank: int | None = None,
    timeout_s: float = 60.0,
    watch: Callable[[Callable[[], None]], None] | None = None,
    on_ready: Callable[[int], None] = lambda rank: None,
) -> None:
    """Work until the cluster ends.

    `watch`, if given, is called with a function that ends this process at once; `on_ready` with the rank.
    """
    if watch is not None:
        watch(lambda: os.kill(os.getpid(), signal.SIGKILL))
    expelled = threading.Event()

    def heard(notice: msgspec.Struct) -> None:
        if isinstance(notice, messages.Expelled):
            expelled.set()

    with Client(transport, scheduler, rank=rank, timeout_s=timeout_s, on_notice=heard) as client:
        on_ready(client.rank)
        worker = Worker(client)
        number = 0
        while True:
            try:
                job: messages.Job = client.link.call(
                    messages.GetJob(after=number), messages.Job, timeout_s=365 * 86400.0
                )
            except PacelineError:
                if expelled.is_set():
                    raise PeerError("this worker was declared dead: it gave no sign of life; start it again") from None
                raise
            if job.number < 0:
                return
            number = job.number
            worker.work(number, jobs.decode(job.description))


@dataclass
class _Counters:
    """What a worker has done in one job; it goes to the scheduler with the heartbeats."""

    job: int
    examples: int = 0
    loss: float = 0.0
    bad_lines: int = 0
    start_bytes: tuple[int, int] = (0, 0)
    told: float = field(default_factory=time.monotonic)

    def as_progress(self, client: Client) -> dict[str, float]:
        received, sent = client.byte_counts()
        return {
            "job": self.job,
            "examples": self.examples,
            "loss": self.loss,
            "bad_lines": self.bad_lines,
            "bytes": received + sent - sum(self.start_bytes),
        }


class Worker:
    """One worker's part in the jobs of a cluster."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._retired = False
        self._preparation = Preparation()

    def work(self, number: int, job: jobs.Job) -> None:
        """Do this worker's share of a job; a failure of the data is the job's, not this process's."""
        client = self._client
        counters = _Counters(number, start_bytes=client.byte_counts())
        table = client.sparse_table(jobs.TABLE, dim=1, update=from_fields(RULES, job.update))  # type: ignore[type-abstract]
        dataset = open_spec(job.dataset)
        try:
            if job.task == "train":
                self._train(job, dataset, table, counters)
            else:
                self._evaluate(job, dataset, table, counters)
        except PacelineError as error:
            if not isinstance(error, DataError):
                raise
            self._call(messages.JobFailed(job=number, error=type(error).__name__, message=str(error)))
        finally:
            dataset.close()
        self._rest()
        self._report_data(number, dataset, counters)

    # Training.

    def _train(self, job: jobs.Job, dataset: Dataset, table: SparseTable, counters: _Counters) -> None:
        leases = _Leases(self, dataset, counters, iterates=True)
        current: Minibatch | None = None
        ticket: Ticket | None = None
        for batch in leases.batches(job.batch_size):
            if batch is None:  # a shard ends here: what came of it must be acknowledged before it counts as done
                if current is not None and ticket is not None:
                    self._step(table, current, ticket, counters)
                current = ticket = None
                self._client.flush()
                continue
            following = self._preparation.prepare(batch)
            if current is not None and ticket is not None:
                self._step(table, current, ticket, counters)
            current, ticket = following, table.pull_async(following.keys, assume_unique=True)
            self._tell(counters)

    def _step(self, table: SparseTable, minibatch: Minibatch, ticket: Ticket, counters: _Counters) -> None:
        weights = ticket.result().reshape(-1)
        gradient, loss = minibatch.gradients(weights)
        table.push(minibatch.keys, gradient, tick=True, assume_unique=True)
        counters.examples += minibatch.num_examples
        counters.loss += loss

    # Evaluation.

    def _evaluate(self, job: jobs.Job, dataset: Dataset, table: SparseTable, counters: _Counters) -> None:
        self._rest()
        leases = _Leases(self, dataset, counters, iterates=False)
        found: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]] = []
        for batch in leases.batches(max(job.batch_size, 4096)):
            if batch is None:
                self._report_predictions(counters.job, found)
                found = []
                continue
            minibatch = self._preparation.prepare(batch)
            weights = table.pull(minibatch.keys, assume_unique=True).reshape(-1)
            found.append((minibatch.labels.copy(), minibatch.predict(weights)))
            counters.examples += minibatch.num_examples
            self._tell(counters)

    def _report_predictions(
        self, number: int, found: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]
    ) -> None:
        if found:
            labels = np.concatenate([labels for labels, _ in found])
            probabilities = np.concatenate([probabilities for _, probabilities in found])
            report = messages.Report(job=number, fields={"kind": "predictions", "examples": len(labels)})
            self._call(report, (labels, probabilities))

    # With the scheduler.

    def _tell(self, counters: _Counters) -> None:
        now = time.monotonic()
        if now - counters.told > _PROGRESS_S:
            counters.told = now
            self._client.link.tell(messages.Heartbeat(progress=counters.as_progress(self._client)))

    def _call(self, message: msgspec.Struct, body: tuple[Any, ...] = ()) -> Any:
        return self._client.link.call(message, body=body)

    def _rest(self) -> None:
        if not self._retired:
            self._client.retire()
            self._retired = True

    def _take_part(self) -> None:
        if self._retired:
            self._client.join()
            self._retired = False

    def _report_data(self, number: int, dataset: Dataset, counters: _Counters) -> None:
        bad = dataset.bad_lines
        counters.bad_lines = bad.count
        self._client.link.tell(messages.Heartbeat(progress=counters.as_progress(self._client)))
        if bad.count or dataset.cache_error:
            lines = [[str(line.file), line.offset, line.row, line.text, line.reason] for line in bad.first]
            fields = {"kind": "data", "bad_lines": bad.count, "first": lines, "cache_error": dataset.cache_error}
            self._call(messages.Report(job=number, fields=fields))


class _Leases:
    """The shards that this worker gets, as minibatches."""

    def __init__(self, worker: Worker, dataset: Dataset, counters: _Counters, *, iterates: bool) -> None:
        self._worker = worker
        self._link = worker._client.link
        self._dataset = dataset
        self._counters = counters
        self._iterates = iterates

    def batches(self, batch_size: int) -> Iterator[Batch | None]:
        """Yield the minibatches of one shard after the other, and None where a shard ends."""
        lease = self._take()
        while lease is not None:
            if self._iterates:
                self._worker._take_part()
            yield from self._dataset.read(lease.file, lease.shard, batch_size)
            yield None
            ended = self._dataset.ended(lease.file)
            if ended is not None:
                self._link.tell(messages.FileEnded(job=self._counters.job, file=lease.file, num_shards=ended))
            progress = self._counters.as_progress(self._worker._client)
            self._link.tell(messages.LeaseDone(job=self._counters.job, lease=lease.lease, progress=progress))
            lease = self._take()

    def _take(self) -> messages.Lease | None:
        """Return the next lease; while there is none, nobody waits for this worker at the gates."""
        ask = messages.TakeLease(job=self._counters.job, wait=False)
        lease: messages.Lease = self._link.call(ask, messages.Lease)
        if lease.lease == NOTHING_NOW:
            self._worker._rest()
            ask = messages.TakeLease(job=self._counters.job, wait=True)
            lease = self._link.call(ask, messages.Lease, timeout_s=365 * 86400.0)
        return None if lease.lease == ALL_DONE else lease

