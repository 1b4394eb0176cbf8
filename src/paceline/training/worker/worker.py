"""The loop of a worker process: receive jobs and shards from the scheduler, and train or predict.

The loop overlaps its work with the servers' work. While a minibatch's weights are in flight, the worker parses the next
minibatch and finds its distinct keys. If the consistency allows it (τ ≥ 1), the worker also requests the next weights
before it computes the gradients. It does not wait at the end of a shard: it reports the shard later, after the last
push is acknowledged.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from paceline.data import Batch, Dataset, open_spec
from paceline.environment import environment
from paceline.errors import DataError, LostRowsError, NoRoomError, PacelineError, PeerError, UsageError
from paceline.models.base import KeyScratch, Minibatch, SparseModel, open_tables, summed_weight
from paceline.models.proximal.columns import ColumnCollector, ExampleColumns
from paceline.models.proximal.solver import BlockSolver
from paceline.models.registry import read_model_settings
from paceline.observe import recording
from paceline.protocol.jobs import ALL_DONE, Job, Lease
from paceline.ps import RULES, Client, SparseTable, Ticket, from_fields, messages
from paceline.training.bad_data import plain_bad_lines
from paceline.training.worker import jobs
from paceline.training.worker.jobs import FOREVER_S, WorkerCounters, WorkerLeases
from paceline.training.worker.mixed_shards import MixedShards
from paceline.training.worker.prepared import PreparedShards
from paceline.training.worker.table_rates import WorkerRates
from paceline.transport import Transport

_PROGRESS_S = 0.2
_READ_AT_ONCE = 16_384
_EXPELLED = "this worker sent no heartbeat for too long, so the scheduler declared it dead. Start it again"


def run_worker(
    transport: Transport,
    scheduler: str,
    *,
    rank: int | None = None,
    timeout_s: float = 60.0,
    watch: Callable[[Callable[[], None]], None] | None = None,
    on_ready: Callable[[int], None] = lambda rank: None,
) -> None:
    """Run jobs until the cluster ends.

    `watch`, if given, receives a function that ends this process at once. `on_ready` receives the rank.
    """
    if watch is not None:
        watch(lambda: os.kill(os.getpid(), signal.SIGKILL))
    expelled, ended = threading.Event(), threading.Event()

    def receive(notice: msgspec.Struct) -> None:
        if isinstance(notice, messages.Expelled):
            expelled.set()
            raise PeerError(_EXPELLED)  # the error closes the link, so a call that waits for a job ends
        if isinstance(notice, messages.Ended):
            ended.set()

    with Client.connect(transport, scheduler, rank=rank, timeout_s=timeout_s, on_notice=receive) as client:
        on_ready(client.rank)
        recording.start(environment(), rank=client.rank)
        worker = Worker(client, expelled)
        number = 0
        while True:
            try:
                worker.retire()  # otherwise workers that still run a job would wait for this worker
                job: Job = client.link.call(messages.GetJob(after=number), Job, timeout_s=FOREVER_S)
                if job.number < 0:
                    return
                number = job.number
                worker.work(number, jobs.decode(job.description))
            except PacelineError as error:
                if ended.is_set():
                    return
                if expelled.is_set():
                    raise PeerError(_EXPELLED) from error
                raise


class _Part(NamedTuple):
    """A job, and the objects with which this worker accesses the model, the data and the servers."""

    job: jobs.WorkerTask
    model: SparseModel
    dataset: Dataset
    tables: Sequence[SparseTable]
    leases: WorkerLeases


class Worker:
    """Runs a cluster's jobs on one worker."""

    def __init__(self, client: Client, expelled: threading.Event) -> None:
        self._client = client
        self._expelled = expelled
        self._retired = False
        self._scratch = KeyScratch()
        self._prepared = PreparedShards()
        self._counters = WorkerCounters(0)
        self._columns: ExampleColumns | None = None
        """This worker's examples, kept from the job that reads them to the job that solves."""

    def work(self, number: int, job: jobs.WorkerTask) -> None:
        """Run a job on this worker. A data error ends the job, but not this process."""
        client = self._client
        if number != self._counters.job:  # keep them if the same job is received again
            self._counters = WorkerCounters(number, start_bytes=client.byte_counts())
            self._scratch = KeyScratch()
        leases = WorkerLeases(client.link, number)
        try:
            model = read_model_settings(job.model)
            tables = open_tables(client, model, from_fields(RULES, job.update))
            for table, parameters in zip(tables, model.tables, strict=True):
                table.set_filters(*job.filter_chains(exact=parameters.is_count))
            with open_spec(job.dataset) as dataset:
                part = _Part(job, model, dataset, tables, leases)
                if job.task == "train":
                    self._train(part)
                elif job.task == "read-columns":
                    self._read_columns(part)
                elif job.task == "solve-blocks":
                    self._solve_blocks(part)
                else:
                    self._evaluate(part)
                recording.flush()  # the launcher may kill this process after its last job
                self.retire()
                self._report_data(dataset)
        except (DataError, LostRowsError, NoRoomError, UsageError) as error:
            self._retire_after_failure()
            self._call(messages.JobFailed(job=number, error=type(error).__name__, message=str(error)))

    # Training.

    def _train(self, part: _Part) -> None:
        job, model, dataset, tables, leases = part
        tau = self._client.consistency.tau
        pipeline = _Pipeline(self._client, tables, leases, self._counters, ahead=0 if tau == 0 else 1)
        rates = None if job.rates is None else WorkerRates.open(job, job.rates, model, dataset, tables)
        self._take_part()
        if job.shards_at_once > 1:
            self._train_mixed(part, pipeline, rates)
            return
        self._prepared.begin(job, model)

        def leave() -> None:
            pipeline.drain()
            self.retire()

        for lease in leases.until_done(leave):
            self._take_part()
            is_first = lease.epoch == 0
            num_before = 0
            for minibatch, num_read in recording.steps(self._prepared.read(job, model, dataset, lease, self._scratch)):
                if rates is not None:
                    rates.set_within(lease, num_before)
                pipeline.feed(minibatch, num_read, is_first)
                num_before += num_read
                self._report_progress()
            leases.read(lease.file, dataset.ended(lease.file))
            pipeline.end_shard(lease)
        pipeline.drain()

    def _train_mixed(self, part: _Part, pipeline: _Pipeline, rates: WorkerRates | None) -> None:
        job, model, dataset, _, leases = part
        shards = MixedShards(dataset, job.weighting, job.batch_size, job.shards_at_once)

        def open_shard(lease: Lease) -> None:
            shards.open(lease)
            if rates is not None:
                rates.set_within(lease)

        may_lease = True

        def read() -> Iterator[tuple[bool, Batch | None, int, list[Lease]]]:
            nonlocal may_lease
            while True:
                while may_lease and shards.has_room:
                    lease = leases.next_nowait()
                    may_lease = lease is not None and lease.lease != ALL_DONE
                    if lease is not None and may_lease:
                        open_shard(lease)
                        leases.prefetch()
                if not shards:
                    pipeline.drain()
                    self.retire()
                    lease = leases.wait_next()
                    if lease.lease == ALL_DONE:
                        return
                    self._take_part()
                    open_shard(lease)
                    may_lease = True
                yield shards.is_first_pass, *shards.next_batch()

        for is_first, batch, num_read, ended in recording.steps(read()):
            if batch is not None:
                minibatch = model.prepare_training(batch, self._scratch, is_first_pass=is_first)
                pipeline.feed(minibatch, num_read, is_first)
                self._report_progress()
            for lease in ended:
                may_lease = True
                leases.read(lease.file, dataset.ended(lease.file))
                pipeline.end_shard(lease)

    # Evaluation.

    def _evaluate(self, part: _Part) -> None:
        job, model, dataset, tables, leases = part
        self.retire()
        counters = self._counters
        for lease in leases.until_done():
            found = []
            for batch in dataset.read(lease.file, lease.shard, max(job.batch_size, 4096)):
                minibatch = model.prepare(batch, self._scratch)
                tickets = _pull(tables, minibatch)
                weights = [ticket.result() for ticket in tickets]
                found.append((minibatch.labels.copy(), minibatch.predict(weights)))
                counters.examples += minibatch.num_examples
                self._report_progress()
            self._report_predictions(lease, found)
            leases.read(lease.file, dataset.ended(lease.file))
            leases.done(lease, counters.as_progress(self._client))

    def _report_predictions(self, lease: Lease, found: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]) -> None:
        if found:
            labels = np.concatenate([labels for labels, _ in found])
            predictions = np.concatenate([predictions for _, predictions in found])
            fields = {"kind": "predictions", "examples": len(labels)}
            report = messages.Report(job=self._counters.job, fields=fields, shard=lease.key)
            self._call(report, (labels, predictions.reshape(-1)))

    # Delayed block proximal gradient.

    def _read_columns(self, part: _Part) -> None:
        """Store this worker's examples by column. If this worker dies, other workers read its shards again."""
        job, model, dataset, _, leases = part
        counters, collector = self._counters, ColumnCollector()
        held: list[Lease] = []
        self._columns = None
        self._take_part()

        def report_held() -> None:
            for lease in held:
                leases.done(lease, counters.as_progress(self._client))
            held.clear()

        for lease in leases.until_done(report_held):
            for batch, num_read in job.weighting.apply(
                dataset.read(lease.file, lease.shard, _READ_AT_ONCE), lease, _READ_AT_ONCE
            ):
                collector.add(model.crossed(batch))
                counters.examples += num_read
                counters.held += batch.num_examples
                counters.weight += summed_weight(batch.num_examples, batch.weights)
                counters.positives += int(np.count_nonzero(batch.labels))
                self._report_progress()
            leases.read(lease.file, dataset.ended(lease.file))
            held.append(lease)
        self._columns = collector.finish()

    def _solve_blocks(self, part: _Part) -> None:
        """Run the passes over blocks of columns with the examples of the previous job."""
        job, leases = part.job, part.leases
        assert job.solve is not None
        counters, columns = self._counters, self._columns
        self._columns = None
        self._take_part()
        lease = leases.next_nowait()
        if lease is None:  # the other workers are already solving
            self.retire()
            lease = leases.wait_next()
        if lease.lease == ALL_DONE:
            return
        if columns is None:
            raise LostRowsError("a worker that held examples has restarted")
        held = [lease]
        solver = BlockSolver.open(self._client, job.solve, columns, *job.filter_chains())
        for block_pass in solver.run(job.solve.examples):
            self._report_progress()
            if block_pass is None:
                continue
            if solver.is_reporter:
                fields = {"kind": "pass", **msgspec.to_builtins(block_pass)}
                self._call(messages.Report(job=counters.job, fields=fields))
            more = leases.next_nowait()
            if more is not None and more.lease == ALL_DONE:  # the driver ended the job
                return
            held += [] if more is None else [more]
        self.retire()
        for lease in held:
            leases.done(lease, counters.as_progress(self._client))

    # Communication with the scheduler.

    def _report_progress(self) -> None:
        counters = self._counters
        if self._expelled.is_set():  # other workers now process this worker's shards
            raise PeerError(_EXPELLED)
        time_s = time.monotonic()
        if time_s - counters.reported_s > _PROGRESS_S:
            counters.reported_s = time_s
            self._client.link.notify(messages.Heartbeat(progress=counters.as_progress(self._client)))

    def _call(self, message: msgspec.Struct, body: tuple[Any, ...] = ()) -> Any:
        return self._client.link.call(message, body=body)

    def retire(self) -> None:
        """Leave the iterations, so that no other worker waits for this worker."""
        if not self._retired:
            self._client.retire()
            self._retired = True

    def _retire_after_failure(self) -> None:
        """Retire after a failure. Retry once, because the first call may raise the error of an earlier push."""
        with contextlib.suppress(NoRoomError, UsageError):
            self.retire()
        self.retire()

    def _take_part(self) -> None:
        if self._retired:
            self._client.join()
            self._retired = False

    def _report_data(self, dataset: Dataset) -> None:
        bad, counters = dataset.bad_lines, self._counters
        counters.bad_lines += bad.count
        self._client.link.notify(messages.Heartbeat(progress=counters.as_progress(self._client)))
        if bad.count or dataset.cache_error:
            counts, first = plain_bad_lines(bad, dataset.bad_lines_by_shard)
            fields = {"kind": "data", "bad_lines": counts, "first": first, "cache_error": dataset.cache_error}
            self._call(messages.Report(job=counters.job, fields=fields))


def _pull(tables: Sequence[SparseTable], minibatch: Minibatch, ahead: int = 0) -> list[Ticket]:
    """Request a minibatch's rows. A minibatch for prediction omits tables that only training needs."""
    return [
        table.pull_async(keys, assume_unique=True, ahead=ahead)
        for table, keys in zip(tables, minibatch.keys, strict=False)
    ]


class _Pipeline:
    """The minibatches whose weights are requested, or whose pushes are not yet acknowledged.

    If `ahead` is 1, the next minibatch's weights are requested before the current gradients are pushed.
    """

    def __init__(
        self,
        client: Client,
        tables: Sequence[SparseTable],
        leases: WorkerLeases,
        counters: WorkerCounters,
        *,
        ahead: int,
    ) -> None:
        self._client = client
        self._tables = tables
        self._leases = leases
        self._counters = counters
        self._ahead = ahead
        self._current: tuple[Minibatch, int, bool, list[Ticket]] | None = None
        self._shards: list[Lease] = []  # shards that end with the current minibatch
        self._unconfirmed: deque[tuple[Ticket, list[Lease], dict[str, float]]] = deque()

    def feed(self, minibatch: Minibatch, num_read: int, is_first_pass: bool) -> None:
        """Request the weights of the next minibatch, made from `num_read` examples. Finish the current one."""
        if self._ahead and self._current is not None:
            tickets = _pull(self._tables, minibatch, ahead=1)
            self._finish_current()
        else:
            self._finish_current()
            tickets = _pull(self._tables, minibatch)
        self._current = (minibatch, num_read, is_first_pass, tickets)
        if self._unconfirmed and self._unconfirmed[0][0].done():
            self._confirm()

    def end_shard(self, lease: Lease) -> None:
        self._shards.append(lease)
        if self._current is None:  # no minibatch will report this empty shard
            self.drain()

    def drain(self) -> None:
        self._finish_current()
        while self._unconfirmed:
            self._confirm()
        self._client.flush()
        self._report(self._shards, self._counters.as_progress(self._client))
        self._shards = []

    def _finish_current(self) -> None:
        if self._current is None:
            return
        minibatch, num_read, is_first_pass, tickets = self._current
        self._current = None
        weights = [ticket.result() for ticket in tickets]
        with recording.phase("compute"):
            gradients, loss = minibatch.gradients(weights)
        for number, keys in reversed(list(enumerate(minibatch.gradient_keys))):  # the first table ends the iteration
            if len(keys) or not number:
                pushed = self._tables[number].push(keys, gradients[number], tick=not number, assume_unique=True)
        self._counters.examples += num_read
        if recording.recorder is not None:
            recording.recorder.add("paceline_examples_total", num_read)
        self._counters.weight += minibatch.summed_weight
        self._counters.loss += loss
        self._counters.positives += int(np.count_nonzero(minibatch.labels))
        if is_first_pass:
            self._counters.first_pass.add(num_read, loss, minibatch.sums())
        if self._shards:
            self._unconfirmed.append((pushed, self._shards, self._counters.as_progress(self._client)))
            self._shards = []

    def _confirm(self) -> None:
        pushed, shards, progress = self._unconfirmed.popleft()
        pushed.wait()
        with self._client.servers.lock:
            self._client.servers.raise_failures()  # by earlier pushes of these shards
        self._report(shards, progress)

    def _report(self, shards: list[Lease], progress: dict[str, float]) -> None:
        for lease in shards:
            self._leases.done(lease, progress)
