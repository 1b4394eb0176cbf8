"""Divide the items of an epoch among the ranks, from any position in the epoch."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, Sampler

from paceline.errors import UsageError
from paceline.protocol.leases import Remaining


class ShardedSampler(Sampler[Any]):
    """Yields every `size`-th item (index or batch of indices) of another sampler, starting at number `rank`.

    It uses only the `remaining` items of the other sampler. With `drop_last`, a last group of less than `size` items is
    dropped. Otherwise it is filled up with the first items or, with ``pads=False``, some ranks get no item.
    """

    def __init__(
        self, sampler: Any, rank: int, size: int, *, drop_last: bool, pads: bool, remaining: Remaining
    ) -> None:
        self.sampler = sampler
        self._rank = rank
        self._size = size
        self._drop_last = drop_last
        self._pads = pads
        self._remaining = remaining

    def __iter__(self) -> Iterator[Any]:
        first: list[Any] = []
        group: list[Any] = []
        for number, item in enumerate(self.sampler):
            if len(first) < self._size:
                first.append(item)
            if number not in self._remaining:
                continue
            group.append(item)
            if len(group) == self._size:
                yield group[self._rank]
                group.clear()
        if group and not self._drop_last:
            if self._pads:
                group += itertools.islice(itertools.cycle(first), self._size - len(group))
            yield from group[self._rank : self._rank + 1]

    def __len__(self) -> int:
        num_groups, remainder = divmod(self._remaining.count(len(self.sampler)), self._size)
        has_last = not self._drop_last and (remainder > 0 if self._pads else remainder > self._rank)
        return num_groups + has_last

    def set_epoch(self, epoch: int) -> None:
        set_epoch(self.sampler, epoch)


class SeededSampler(Sampler[Any]):
    """A torch sampler whose items depend only on the seed and the epoch, so that all processes draw the same items."""

    def __init__(self, sampler: Any, seed: int) -> None:
        self.sampler = copy.copy(sampler)
        self.sampler.generator = torch.Generator()
        self._seed = seed
        self.set_epoch(0)

    def __iter__(self) -> Iterator[Any]:
        self.sampler.generator.manual_seed(self._seed + self._epoch)
        yield from self.sampler

    def __len__(self) -> int:
        return len(self.sampler)

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch


def set_epoch(sampler: Any, epoch: int) -> None:
    """Call ``set_epoch`` of a sampler or of its inner sampler, if one has this method."""
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
    elif hasattr(sampler, "sampler"):
        set_epoch(sampler.sampler, epoch)


def seeded(sampler: Any, seed: int) -> Any:
    """Return a sampler that draws the same items in every process.

    A shuffling sampler of torch, or any sampler whose ``generator`` is None, draws from the seed and the epoch. Other
    samplers are unchanged.
    """
    if type(sampler) is BatchSampler:
        inner = seeded(sampler.sampler, seed)
        return sampler if inner is sampler.sampler else BatchSampler(inner, sampler.batch_size, sampler.drop_last)
    shuffles = type(sampler) is RandomSampler and not sampler.replacement
    if shuffles or getattr(sampler, "generator", True) is None:
        return SeededSampler(sampler, seed)
    return sampler


def is_sharded(sampler: Any, rank: int, size: int) -> bool:
    """Return whether a sampler yields only this rank's part. Raises UsageError if it is for another rank or size."""
    if isinstance(sampler, BatchSampler):
        sampler = sampler.sampler
    if not isinstance(sampler, DistributedSampler):
        return False
    if (sampler.rank, sampler.num_replicas) == (rank, size):
        return True
    raise UsageError(
        f"rank {rank} of {size} got a DistributedSampler for rank {sampler.rank} of {sampler.num_replicas}: leave it "
        "out and use shuffle=True, because the strategy shards the data"
    )


def sharded_stream(batches: Iterable[Any], rank: int, size: int, *, drop_last: bool, pads: bool) -> Iterator[Any]:
    """Yield every `size`-th batch of a stream, starting at number `rank`.

    An incomplete last group is dropped with `drop_last`. Otherwise, with `pads`, each rank gets a batch from the group
    (some batches twice); without `pads`, some ranks get no batch.
    """
    stream = iter(batches)
    while group := list(itertools.islice(stream, size)):
        if len(group) == size or (rank < len(group) and not drop_last):
            yield group[rank]
        elif pads and not drop_last:
            yield group[rank % len(group)]
