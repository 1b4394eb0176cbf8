"""Minibatches that a worker has read before: later passes take them from memory, their distinct keys found already.

In a shuffled training the rows of each shard are shuffled once, and shards come in an order that leaps through the
file. The last pass is in the order of the file: the newest rows of a log suit the rows to come.

Shards are kept in the order in which they are read first, as many as there is room for, and are not replaced: of data
that is read round and round, whatever makes room for the newest shard drops the one that is due next.
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
_WHOLE: Final = 1 << 40  # rows


class _Prepared(NamedTuple):
    batch: Batch
    """With its interactions."""
    rows: KeyedMatrix
    num_read: int

    @property
    def num_bytes(self) -> int:
        batch, rows = self.batch, self.rows
        arrays = (batch.labels, batch.indptr, batch.keys, batch.values, batch.weights, batch.fields)
        return sum(0 if each is None else each.nbytes for each in arrays) + rows.keys.nbytes + rows.indices.nbytes


class PreparedShards:
    """The minibatches of one training's shards, of which `most_bytes` are kept."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._left_bytes = self._most_bytes = most_bytes
        self._is_full = False
        self._kept: dict[tuple[int, int, FileStatus], list[_Prepared]] = {}
        self._identity: object = None

    @property
    def num_bytes(self) -> int:
        """How much memory is taken."""
        return self._most_bytes - self._left_bytes

    def begin(self, job: WorkerTask, model: SparseModel) -> None:
        """Forget what was kept unless the job has the same minibatches as the one before."""
        identity = (job.dataset, model.interactions, job.batch_size, job.weighting, job.is_shuffled)
        if identity != self._identity:
            self._left_bytes, self._is_full, self._kept, self._identity = self._most_bytes, False, {}, identity

    def read(
        self, job: WorkerTask, model: SparseModel, dataset: Dataset, lease: Lease, scratch: KeyScratch
    ) -> Iterator[tuple[Minibatch, int]]:
        """Yield the minibatches of a shard, with the number of examples that each stands for.

        Raises DataError as :meth:`Dataset.read` does; of a shard that was kept, if its file has changed.
        """
        is_first_pass = lease.epoch == 0
        if job.shuffles(lease.epoch) and lease.num_shards and dataset.can_enter(lease.file):
            lease = dataclasses.replace(lease, shard=leaping(lease.shard, lease.num_shards, 0))
        kept = self._kept.get((lease.file, lease.shard, dataset.in_use.check(lease.file)))
        kept = kept if job.shuffles(lease.epoch) == job.is_shuffled else None
        for each in self._prepare(job, model, dataset, lease, scratch) if kept is None else kept:
            minibatch = model.training_minibatch(each.batch, each.rows, scratch, is_first_pass=is_first_pass)
            yield minibatch, each.num_read

    def _prepare(
        self, job: WorkerTask, model: SparseModel, dataset: Dataset, lease: Lease, scratch: KeyScratch
    ) -> Iterator[_Prepared]:
        """Yield the minibatches of a shard that is read, and keep them if all of them have room."""
        # Which negatives are left out is drawn anew for each pass.
        is_kept = (
            job.epochs - job.is_shuffled > lease.epoch + 1 and job.weighting.keep_negatives == 1 and not self._is_full
        )
        is_kept = is_kept and job.shuffles(lease.epoch) == job.is_shuffled
        kept: list[_Prepared] = []
        num_bytes = 0
        for batch, num_read in _batches(job, dataset, lease):
            crossed = model.crossed(batch)
            prepared = _Prepared(crossed, KeyedMatrix(crossed, scratch), num_read)
            if is_kept:
                prepared.rows.keys = prepared.rows.keys.copy()  # of which it has only the beginning
                kept.append(prepared)
                num_bytes += prepared.num_bytes
                if num_bytes > self._left_bytes:
                    is_kept, kept, self._is_full = False, [], True
            yield prepared
        if is_kept:
            self._kept[lease.file, lease.shard, dataset.in_use.check(lease.file)] = kept
            self._left_bytes -= num_bytes


def _batches(job: WorkerTask, dataset: Dataset, lease: Lease) -> Iterator[tuple[Batch, int]]:
    """Yield the minibatches of a shard, its rows shuffled if the job is, with the number of examples of each."""
    if not job.shuffles(lease.epoch):
        yield from job.weighting.read(dataset, lease, job.batch_size)
        return
    for rows, num_read in job.weighting.read(dataset, lease, _WHOLE):  # one batch
        order, done = np.random.default_rng((lease.file, lease.shard)).permutation(rows.num_examples), 0
        for start in range(0, max(len(order), 1), job.batch_size):
            batch = rows.take(order[start : start + job.batch_size])
            stop = num_read * (start + batch.num_examples) // max(len(order), 1) if len(order) else num_read
            yield batch, stop - done
            done = stop
