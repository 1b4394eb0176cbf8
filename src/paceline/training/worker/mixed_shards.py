"""Read several shards at once, so that each minibatch has examples from the whole file.

In a file sorted by label, a minibatch of consecutive examples would have only one label, and the model would learn the
labels one after another. Therefore consecutive shards are far from each other in the file, and a minibatch has a few
examples from each open shard.
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

_LEAP: Final = (math.sqrt(5) - 1) / 2  # golden ratio: each shard is far from all earlier ones


def leaping(shard: int, num_shards: int, epoch: int) -> int:
    """Return the shard to read instead of `shard`. The epoch determines this permutation of the shards."""
    step = max(round(num_shards * _LEAP), 1)
    while math.gcd(step, num_shards) != 1:
        step += 1
    return (shard * step + epoch) % num_shards


@dataclass(slots=True)
class _OpenShard:
    lease: Lease
    batches: Iterator[tuple[Batch, int]]


class MixedShards:
    """At most `most` open shards of a data set.

    Some files (gzip) can be read only from the beginning. The first epoch reads their shards in order. Later epochs mix
    the shards if they are cached.
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
        return len(self._open) < (1 if self._in_order else self._most)

    @property
    def is_first_pass(self) -> bool:
        return all(shard.lease.epoch == 0 for shard in self._open)

    def open(self, lease: Lease) -> None:
        """Start to read the lease's shard, or its replacement in the mixed order."""
        dataset, shard = self._dataset, lease.shard
        can_enter = dataset.can_enter(lease.file)
        num_shards = lease.num_shards if can_enter or lease.epoch else 0  # 0 unless all workers know the number
        self._in_order = not num_shards or not (can_enter or dataset.is_cached)
        if num_shards:
            shard = leaping(shard, num_shards, lease.epoch)
        rows = self._batch_size if self._in_order else max(self._batch_size // self._most, 1)
        read = dataset.read(lease.file, shard, rows)
        counted = ((batch, batch.num_examples) for batch in read)
        batches = counted if self._weighting.is_plain else self._weighting.apply(read, lease, rows)
        self._open.append(_OpenShard(lease, batches))

    def next_batch(self) -> tuple[Batch | None, int, list[Lease]]:
        """Return a few examples of each open shard (or None), the number of examples read, and leases that ended."""
        parts: list[Batch] = []
        ended: list[Lease] = []
        missing, num_read = self._batch_size, 0
        while self._open and missing > 0:
            shard = self._open.popleft()
            part, num_read_of_part = next(shard.batches, (None, 0))
            if part is None:
                ended.append(shard.lease)
            else:
                parts.append(part)
                missing -= part.num_examples
                num_read += num_read_of_part
                self._open.append(shard)
        return (Batch.concatenate(parts) if parts else None), num_read, ended
