"""Keep prepared minibatches in memory, with their distinct keys, for later passes.

A shuffled training shuffles each shard's rows once, and consecutive shards are far from each other in the file. The
last pass has the order of the file, because the newest rows of a log are the most similar to future rows.

The first shards are kept, up to a limit in bytes. They are never replaced: each pass reads the shards in the same
order, so the least recently used shard is the next one to be read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np

from paceline.data import Batch, Dataset
from paceline.data.streams import FileStatus
from paceline.models.base import KeyedMatrix, KeyScratch, Minibatch, SparseModel
from paceline.protocol.jobs import Lease
from paceline.training.worker.jobs import WorkerTask
from paceline.training.worker.mixed_shards import leaping

MOST_BYTES: Final = 256 << 20
_ALL_ROWS: Final = 1 << 40


class _Prepared(NamedTuple):
    batch: Batch
    """The examples with their interactions."""
    rows: KeyedMatrix
    num_read: int

    @property
    def num_bytes(self) -> int:
        batch, rows = self.batch, self.rows
        arrays = (batch.labels, batch.indptr, batch.keys, batch.values, batch.weights, batch.fields)
        return sum(0 if array is None else array.nbytes for array in arrays) + rows.keys.nbytes + rows.indices.nbytes


class PreparedShards:
    """The minibatches of a training's shards. At most `most_bytes` are kept."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._left_bytes = self._most_bytes = most_bytes
        self._is_full = False
        self._kept: dict[tuple[int, int, FileStatus], list[_Prepared]] = {}
        self._identity: object = None

    @property
    def num_bytes(self) -> int:
        return self._most_bytes - self._left_bytes

    def begin(self, job: WorkerTask, model: SparseModel) -> None:
        """Drop the minibatches unless the previous job had the same data, batch size, weighting and order."""
        identity = (job.dataset, model.interactions, job.batch_size, job.weighting, job.is_shuffled)
        if identity != self._identity:
            self._left_bytes, self._is_full, self._kept, self._identity = self._most_bytes, False, {}, identity

    def read(
        self, job: WorkerTask, model: SparseModel, dataset: Dataset, lease: Lease, scratch: KeyScratch
    ) -> Iterator[tuple[Minibatch, int]]:
        """Yield a shard's minibatches, each with the number of examples read for it.

        Raises the errors of :meth:`Dataset.read`, and DataError if the file of a kept shard has changed.
        """
        is_first_pass = lease.epoch == 0
        if job.shuffles(lease.epoch) and lease.num_shards and dataset.can_enter(lease.file):
            lease = dataclasses.replace(lease, shard=leaping(lease.shard, lease.num_shards, 0))
        stored = self._kept.get((lease.file, lease.shard, dataset.in_use.check(lease.file)))
        stored = stored if job.shuffles(lease.epoch) == job.is_shuffled else None
        for prepared in self._prepare(job, model, dataset, lease, scratch) if stored is None else stored:
            minibatch = model.training_minibatch(prepared.batch, prepared.rows, scratch, is_first_pass=is_first_pass)
            yield minibatch, prepared.num_read

    def _prepare(
        self, job: WorkerTask, model: SparseModel, dataset: Dataset, lease: Lease, scratch: KeyScratch
    ) -> Iterator[_Prepared]:
        # With `keep_negatives`, each pass draws other negatives, so minibatches cannot be kept for later passes.
        is_kept = (
            job.epochs - job.is_shuffled > lease.epoch + 1 and job.weighting.keep_negatives == 1 and not self._is_full
        )
        is_kept = is_kept and job.shuffles(lease.epoch) == job.is_shuffled
        minibatches: list[_Prepared] = []
        num_bytes = 0
        for batch, num_read in _batches(job, dataset, lease):
            crossed = model.crossed(batch)
            prepared = _Prepared(crossed, KeyedMatrix(crossed, scratch), num_read)
            if is_kept:
                prepared.rows.keys = prepared.rows.keys.copy()  # a view would keep its larger buffer
                minibatches.append(prepared)
                num_bytes += prepared.num_bytes
                if num_bytes > self._left_bytes:
                    is_kept, minibatches, self._is_full = False, [], True
            yield prepared
        if is_kept:
            self._kept[lease.file, lease.shard, dataset.in_use.check(lease.file)] = minibatches
            self._left_bytes -= num_bytes


def _batches(job: WorkerTask, dataset: Dataset, lease: Lease) -> Iterator[tuple[Batch, int]]:
    """Yield a shard's minibatches, shuffled if the job is, each with the number of examples read for it."""
    if not job.shuffles(lease.epoch):
        yield from job.weighting.read(dataset, lease, job.batch_size)
        return
    for rows, num_read in job.weighting.read(dataset, lease, _ALL_ROWS):  # all rows of the shard in one batch
        order, done = np.random.default_rng((lease.file, lease.shard)).permutation(rows.num_examples), 0
        for start in range(0, max(len(order), 1), job.batch_size):
            batch = rows.take(order[start : start + job.batch_size])
            stop = num_read * (start + batch.num_examples) // max(len(order), 1) if len(order) else num_read
            yield batch, stop - done
            done = stop
