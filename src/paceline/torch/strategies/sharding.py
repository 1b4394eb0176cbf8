"""Which part of the data is a rank's: samplers of indices, samplers of batches, streams of batches."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, Sampler

from paceline.errors import UsageError


class ShardedSampler(Sampler[Any]):
    """Every `size`-th item, from number `rank` on, of what another sampler yields: indices, or batches of them.

    It is the interleaving of ``torch.utils.data.DistributedSampler``: the ranks' shares of the same length, side by
    side, are `sampler` itself. A last incomplete group of `size` items is dropped, filled up with the first items, or
    (with ``pads=False``) shared out as it is, so that every item comes exactly once.
    """

    def __init__(self, sampler: Any, rank: int, size: int, *, drop_last: bool, pads: bool = True) -> None:
        self.sampler = sampler
        self._rank = rank
        self._size = size
        self._drop_last = drop_last
        self._pads = pads

    def __iter__(self) -> Iterator[Any]:
        """Yield the share, in order."""
        first: list[Any] = []
        group: list[Any] = []
        for item in self.sampler:
            if len(first) < self._size:
                first.append(item)
            group.append(item)
            if len(group) == self._size:
                yield group[self._rank]
                group.clear()
        if group and not self._drop_last:
            if self._pads:
                group += itertools.islice(itertools.cycle(first), self._size - len(group))
            yield from group[self._rank : self._rank + 1]

    def __len__(self) -> int:
        """Return how many items the share has. Raises TypeError if the sampler does not say."""
        whole, rest = divmod(len(self.sampler), self._size)
        has_rest = not self._drop_last and (rest > 0 if self._pads else rest > self._rank)
        return whole + has_rest

    def set_epoch(self, epoch: int) -> None:
        """Pass the number of the epoch on."""
        set_epoch(self.sampler, epoch)


class SeededSampler(Sampler[Any]):
    """One of torch's samplers that draws the same in every process: from the seed and the number of the epoch."""

    def __init__(self, sampler: Any, seed: int) -> None:
        self.sampler = copy.copy(sampler)
        self.sampler.generator = torch.Generator()
        self._seed = seed
        self.set_epoch(0)

    def __iter__(self) -> Iterator[Any]:
        """Yield what the sampler draws in this epoch."""
        self.sampler.generator.manual_seed(self._seed + self._epoch)
        yield from self.sampler

    def __len__(self) -> int:
        """Return how many items an epoch has."""
        return len(self.sampler)

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch comes."""
        self._epoch = epoch


def set_epoch(sampler: Any, epoch: int) -> None:
    """Tell a sampler, and the one it draws from, which epoch comes, if it wants to know."""
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
    elif hasattr(sampler, "sampler"):
        set_epoch(sampler.sampler, epoch)


def seeded(sampler: Any, seed: int) -> Any:
    """Return `sampler`, or one that draws alike in every process where it would draw from the global random state.

    A shuffling loader's permutation is always the seed's and the epoch's, as ``DistributedSampler`` makes it. Samplers
    of the user's own that have no ``generator`` stay as they are.
    """
    if type(sampler) is BatchSampler:
        inner = seeded(sampler.sampler, seed)
        return sampler if inner is sampler.sampler else BatchSampler(inner, sampler.batch_size, sampler.drop_last)
    shuffles = type(sampler) is RandomSampler and not sampler.replacement
    if shuffles or getattr(sampler, "generator", True) is None:
        return SeededSampler(sampler, seed)
    return sampler


def is_sharded(sampler: Any, rank: int, size: int) -> bool:
    """Whether a sampler yields a rank's share by itself. Raises UsageError if it is the share of another number."""
    if isinstance(sampler, BatchSampler):
        sampler = sampler.sampler
    if not isinstance(sampler, DistributedSampler):
        return False
    if (sampler.rank, sampler.num_replicas) == (rank, size):
        return True
    raise UsageError(
        f"rank {rank} of {size} got a DistributedSampler for rank {sampler.rank} of {sampler.num_replicas}: leave it "
        "out (shuffle=True does), the strategy shards the data"
    )


def sharded_stream(batches: Iterable[Any], rank: int, size: int, *, drop_last: bool, pads: bool) -> Iterator[Any]:
    """Yield every `size`-th batch of a stream, from number `rank` on.

    Of a last incomplete group of `size` batches: nothing if it is to be dropped; else, with `pads`, every rank gets one
    (so some come twice), without it those that there are.
    """
    stream = iter(batches)
    while group := list(itertools.islice(stream, size)):
        if len(group) == size or (rank < len(group) and not drop_last):
            yield group[rank]
        elif pads and not drop_last:
            yield group[rank % len(group)]
