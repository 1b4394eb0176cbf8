"""Data loaders under a strategy: every rank gets its part, shuffled alike, on its device.

Talks to the ranks' group where all must have the same number of batches, and to the strategy's embedder.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from paceline.errors import UsageError
from paceline.torch.strategies.sharding import ShardedSampler, is_sharded, seeded, set_epoch, sharded_stream

if TYPE_CHECKING:
    from paceline.torch.strategies.base import Strategy


class Loader:
    """One rank's part of a ``torch.utils.data.DataLoader``, in batches on the strategy's device.

    *Map dataset*: all options of the loader stay; rank r of W takes the samples r, r + W, … of each epoch, so that the
    ranks' batches number t together are batch t of one process with W times the batch size. A loader that shuffles does
    so by (seed, epoch), under every strategy alike, and epochs count by themselves. Of a sampler or batch sampler of
    the user's own every W-th item is taken; it must yield the same on every rank (its ``set_epoch`` is called), or be a
    ``DistributedSampler`` for these ranks, which stays as it is.

    *Iterable dataset*: every rank reads the whole stream and takes the batches r, r + W, …. A dataset that yields each
    rank its own part: ``shard=False``.

    A training loader (``trains=True``) gives all ranks equally many batches: the rest of the data is filled up with
    samples that come twice, or dropped with ``drop_last``. Any other gives every sample exactly once, so its parts may
    differ by one. A batch is moved with the tuples, lists and dictionaries that it consists of; on the CPU it is passed
    on as it is.

    Raises UsageError, on every rank, if a rank would have no batch.
    """

    def __init__(self, loader: Any, strategy: Strategy, *, shard: bool, trains: bool) -> None:
        if not isinstance(loader, DataLoader):
            raise UsageError(f"got a loader of type {type(loader).__name__}, expected a torch.utils.data.DataLoader")
        self._strategy = strategy
        self._trains = trains
        self._rank, self._size = strategy.data_place if shard else (0, 1)
        self._is_stream = isinstance(loader.dataset, IterableDataset)
        self._epoch = 0
        self.inner: DataLoader[Any] = loader if self._is_stream else self._with_sampler(loader)
        if trains:
            sizes = strategy._ranks.exchange([self._num_batches(), self._num_samples()])
            for rank, (num_batches, num_samples) in enumerate(sizes):
                if num_batches == 0:
                    raise UsageError(self._describe_empty(rank, num_samples))
        elif not self._is_stream and len_or_none(loader) == 0:
            raise UsageError(self._describe_empty(strategy.rank, self._num_samples()))

    def _with_sampler(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """Return the same loader, workers and all, over this rank's samples."""
        world, pads = self._strategy.data_place, self._trains

        def share(sampler: Any) -> Any:
            if self._size == 1 or is_sharded(sampler, *world):
                return seeded(sampler, self._strategy.seed)
            whole = seeded(sampler, self._strategy.seed)
            return ShardedSampler(whole, *world, drop_last=loader.drop_last, pads=pads)

        sampler: Any = loader.sampler
        batch_sampler: Any = loader.batch_sampler
        if loader.batch_size is not None:
            sampler = share(sampler)
            batch_sampler = BatchSampler(sampler, loader.batch_size, loader.drop_last)
        elif batch_sampler is not None:
            batch_sampler = share(batch_sampler)
        else:  # what the dataset yields is a batch
            sampler = share(sampler)
        other = copy.copy(loader)  # DataLoader lets nobody set these, and its constructor drops what a subclass has
        other.__dict__.update(sampler=sampler, batch_sampler=batch_sampler, _iterator=None)
        return other

    @property
    def dataset(self) -> Any:
        """The dataset, whole."""
        return self.inner.dataset

    @property
    def batch_size(self) -> int | None:
        """Samples in a batch of this rank; None if the loader does not say."""
        return self.inner.batch_size

    @property
    def sampler(self) -> Any:
        """What chooses this rank's samples."""
        return self.inner.sampler

    @property
    def batch_sampler(self) -> Any:
        """What chooses this rank's batches; None for a dataset that yields them."""
        return self.inner.batch_sampler

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration that of epoch `epoch`, from 0, as after a checkpoint; the count goes on from it."""
        self._epoch = epoch

    def __len__(self) -> int:
        """Return how many batches this rank has in an epoch. Raises TypeError if the data do not say."""
        if not self._is_stream:
            return len(self.inner)
        length = len(self.inner)
        if self.inner.drop_last:
            return length // self._size
        return math.ceil((length - (0 if self._trains else self._rank)) / self._size)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of the next epoch."""
        epoch, self._epoch = self._epoch, self._epoch + 1
        inner = self.inner
        if self._is_stream:
            set_epoch(inner.dataset, epoch)
        elif inner.batch_sampler is not None:
            set_epoch(inner.batch_sampler, epoch)
        else:
            set_epoch(inner.sampler, epoch)
        return self._iterate_training() if self._trains else self._batches()

    def _iterate_training(self) -> Iterator[Any]:
        strategy = self._strategy
        length = self._num_batches()
        batches = self._batches()
        if strategy.world_size > 1 and not strategy.takes_uneven:
            lengths = strategy._ranks.exchange(length)
            if None in lengths:
                batches = self._in_step(batches)
            elif len(set(lengths)) > 1:
                counts = ", ".join(f"rank {rank} {count}" for rank, count in enumerate(lengths))
                raise UsageError(f"the ranks have unequal numbers of batches in an epoch ({counts}){self._advice()}")
        if length is None:
            batches = self._at_least_one(batches)
        if strategy.embedder is not None:
            batches = self._looking_ahead(batches)
        with strategy.epoch(length):
            yield from batches
            strategy._ran_out()

    def _batches(self) -> Iterator[Any]:
        batches: Iterator[Any] = iter(self.inner)
        if self._is_stream and self._size > 1:
            batches = sharded_stream(batches, self._rank, self._size, drop_last=self.inner.drop_last, pads=self._trains)
        device = self._strategy.device
        if device.type == "cpu":
            return batches
        return (moved(batch, device) for batch in batches)

    def _looking_ahead(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches, and let the embedder fetch each one's rows while the one before it is computed."""
        embedder = self._strategy.embedder
        assert embedder is not None
        nothing = object()
        batch = next(batches, nothing)
        while batch is not nothing:
            following = next(batches, nothing)
            embedder.begin(batch)
            if following is not nothing:
                embedder.prefetch(following)
            yield batch
            batch = following

    # How many batches there are.

    def _num_batches(self) -> int | None:
        return None if self._is_stream else len_or_none(self.inner)

    def _in_step(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches of a stream, and see before each one that every rank has it."""
        group, size = self._strategy._ranks.group, self._strategy.world_size
        assert group is not None
        nothing = object()
        count = 0
        while True:
            batch = next(batches, nothing)
            here = np.zeros(size, np.int32)
            here[self._strategy.rank] = batch is not nothing
            here = group.all_reduce(here)
            if not here.any():
                return
            if not here.all():
                ended = ", ".join(str(rank) for rank in np.flatnonzero(here == 0))
                going_on = ", ".join(str(rank) for rank in np.flatnonzero(here))
                raise UsageError(
                    f"rank {ended} ran out of data after {count} batches, rank {going_on} has more{self._advice()}"
                )
            yield batch
            count += 1

    def _at_least_one(self, batches: Iterator[Any]) -> Iterator[Any]:
        nothing = object()
        first = next(batches, nothing)
        if first is nothing:
            raise UsageError(self._describe_empty(self._strategy.rank, self._num_samples()))
        yield first
        yield from batches

    def _advice(self) -> str:
        return (
            f": under strategy {self._strategy.name} each needs as many; give the ranks equally long data "
            "(drop_last=True drops a rest), or choose AllReduce(join=True)"
        )

    def _num_samples(self) -> int | None:
        return None if self._is_stream else len_or_none(self.dataset)

    def _describe_empty(self, rank: int, num_samples: int | None) -> str:
        size = "of unknown length" if num_samples is None else f"of length {num_samples}"
        return (
            f"rank {rank} has no batch in an epoch: the dataset is {size}, over {self._size} ranks, with "
            f"batch_size={self.batch_size} and drop_last={self.inner.drop_last}; give more data, a smaller "
            "batch_size, or drop_last=False"
        )


def len_or_none(items: Any) -> int | None:
    """Return how many items there are; None if `items` does not say."""
    try:
        return len(items)
    except (TypeError, NotImplementedError):
        return None


def moved(batch: Any, device: torch.device) -> Any:
    """Return a batch with its tensors on `device`: those in tuples, lists and dictionaries too, others as they are.

    A copy from pinned memory does not wait.
    """
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=batch.device.type == "cpu" and batch.is_pinned())
    if hasattr(batch, "to"):  # packed sequences, and what libraries make of a batch
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: moved(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(moved(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(moved(value, device) for value in batch)
    return batch
