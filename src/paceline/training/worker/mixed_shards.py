"""Shards that a worker reads at the same time, so that each minibatch has examples from all over a file.

Where labels stand in runs, as in a file sorted by them, minibatches of neighbours would teach first the one label and
then the other. Here shards are taken in an order that leaps through the file, and a minibatch has a few examples of
each of those that are open.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from paceline.data import Batch, Dataset
from paceline.protocol.jobs import Lease
from paceline.training.weighting import Weighting

_LEAP: Final = (math.sqrt(5) - 1) / 2  # the golden section: successive leaps land far from all before


def leaping(shard: int, num_shards: int, epoch: int) -> int:
    """Return the shard to be read in place of this one: a permutation of all, another one in each epoch."""
    step = max(round(num_shards * _LEAP), 1)
    while math.gcd(step, num_shards) != 1:
        step += 1
    return (shard * step + epoch) % num_shards


@dataclass(slots=True)
class _OpenShard:
    lease: Lease
    batches: Iterator[tuple[Batch, int]]


class MixedShards:
    """The shards of a data set that are open; `most` of them at a time, as far as the file can be entered anywhere.

    A file that cannot (gzip) is read in its order once, and mixed in later epochs, if its shards are cached.
    """

    def __init__(self, dataset: Dataset, weighting: Weighting, batch_size: int, most: int) -> None:
        self._dataset = dataset
        self._weighting = weighting
        self._batch_size = batch_size
        self._most = most
        self._open: deque[_OpenShard] = deque()
        self._in_order = False

    def __len__(self) -> int:
        return len(self._open)

    @property
    def has_room(self) -> bool:
        """Whether another shard may be opened."""
        return len(self._open) < (1 if self._in_order else self._most)

    @property
    def is_first_pass(self) -> bool:
        """Whether all that is open is read for the first time."""
        return all(each.lease.epoch == 0 for each in self._open)

    def open(self, lease: Lease) -> None:
        """Begin to read the shard of a lease, or one in its place."""
        dataset, shard = self._dataset, lease.shard
        can_enter = dataset.can_enter(lease.file)
        num_shards = lease.num_shards if can_enter or lease.epoch else 0  # as every worker has it
        self._in_order = not num_shards or not (can_enter or dataset.is_cached)
        if num_shards:
            shard = leaping(shard, num_shards, lease.epoch)
        rows = self._batch_size if self._in_order else max(self._batch_size // self._most, 1)
        read = dataset.read(lease.file, shard, rows)
        counted = ((batch, batch.num_examples) for batch in read)
        batches = counted if self._weighting.is_plain else self._weighting.apply(read, lease, rows)
        self._open.append(_OpenShard(lease, batches))

    def next_batch(self) -> tuple[Batch | None, int, list[Lease]]:
        """Return a few examples of each open shard, how many they stand for, and the leases of shards that have ended.

        None in place of the examples if there was none.
        """
        parts: list[Batch] = []
        ended: list[Lease] = []
        missing, num_read = self._batch_size, 0
        while self._open and missing > 0:
            each = self._open.popleft()
            part, stands_for = next(each.batches, (None, 0))
            if part is None:
                ended.append(each.lease)
            else:
                parts.append(part)
                missing -= part.num_examples
                num_read += stands_for
                self._open.append(each)
        return (Batch.concatenate(parts) if parts else None), num_read, ended
