"""Divide a data loader over the ranks: all ranks shuffle in the same order, and each rank reads its part."""

from __future__ import annotations

import base64
import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from paceline.errors import ModelError, UsageError
from paceline.protocol.leases import Remaining
from paceline.torch.strategies.sampling import (
    ShardedSampler,
    is_sharded,
    seeded,
    set_epoch,
    sharded_stream,
)

if TYPE_CHECKING:
    from paceline.torch.strategies.base import Strategy


@dataclass
class Position:
    """A position in an epoch: the items that no rank has received, and the generator's state at the epoch's start."""

    epoch: int
    remaining: Remaining
    """The numbers of the remaining samples, or of batches if the data is a stream or has no batch size."""
    generator: str | None


class Loader:
    """One rank's part of a ``torch.utils.data.DataLoader``, in batches on the strategy's device.

    *Map dataset*: the loader's options stay the same. Rank r of W reads the samples r, r + W, … of each epoch, so batch
    t of all ranks together is batch t of one process with W times the batch size. The order of a shuffling loader
    depends only on (seed, epoch), under every strategy. Epochs are counted automatically. A user's own sampler or batch
    sampler must yield the same items on every rank. Each rank takes every W-th item, and calls the sampler's
    ``set_epoch``. A ``DistributedSampler`` for these ranks is used unchanged.

    *Iterable dataset*: every rank reads the whole stream and takes the batches r, r + W, …. If the dataset yields each
    rank's own part already, pass ``shard=False``.

    A training loader (``trains=True``) has the same number of batches on all ranks: it repeats some samples at the end,
    or drops the remainder with ``drop_last``. Other loaders yield every sample exactly once, so the ranks' numbers of
    batches may differ by one. Tensors in tuples, lists and dictionaries are moved too. On the CPU a batch is returned
    unchanged.

    Checkpoints contain the position of a training loader (:meth:`state_dict`). After
    :meth:`Strategy.load <paceline.torch.strategies.base.Strategy.load>` the next iteration yields the rest of the
    epoch: each sample that the training loop had not received, exactly once, on any number of ranks. `len` is the
    number of batches of a whole epoch.

    Raises UsageError on every rank if one rank has no batch.
    """

    def __init__(self, loader: Any, strategy: Strategy, *, shard: bool, trains: bool) -> None:
        if not isinstance(loader, DataLoader):
            raise UsageError(f"got a loader of type {type(loader).__name__}, expected a torch.utils.data.DataLoader")
        self._strategy = strategy
        self._trains = trains
        self._rank, self._size = strategy.data_place if shard else (0, 1)
        self._is_stream = isinstance(loader.dataset, IterableDataset)
        self._epoch = 0
        self._remaining = Remaining()
        """The items of the next epoch that the training loop did not receive before the checkpoint."""
        self._reading: Position | None = None
        """Position in the running epoch; None between epochs."""
        self._given = loader
        self.inner: DataLoader[Any] = loader if self._is_stream else self._with_sampler(Remaining())
        if trains:
            sizes = strategy._ranks.exchange([self._num_batches(), self._num_samples()])
            for rank, (num_batches, num_samples) in enumerate(sizes):
                if num_batches == 0:
                    raise UsageError(self._describe_empty(rank, num_samples))
        elif not self._is_stream and len_or_none(loader) == 0:
            raise UsageError(self._describe_empty(strategy.rank, self._num_samples()))

    def _with_sampler(self, remaining: Remaining) -> DataLoader[Any]:
        """Return the given loader with this rank's part of the `remaining` items of all ranks."""
        loader, pads = self._given, self._trains

        def share(sampler: Any) -> Any:
            place, own = (self._rank, self._size), remaining
            if self._size > 1 and is_sharded(sampler, *place):
                place, own = (0, 1), Remaining(remaining.first // self._size)
            sampler = seeded(sampler, self._strategy.seed)
            if place == (0, 1) and own == Remaining():
                return sampler
            return ShardedSampler(sampler, *place, drop_last=loader.drop_last, pads=pads, remaining=own)

        sampler: Any = loader.sampler
        batch_sampler: Any = loader.batch_sampler
        if loader.batch_size is not None:
            sampler = share(sampler)
            batch_sampler = BatchSampler(sampler, loader.batch_size, loader.drop_last)
        elif batch_sampler is not None:
            batch_sampler = share(batch_sampler)
        else:  # the dataset itself yields batches
            sampler = share(sampler)
        return with_samplers(loader, sampler, batch_sampler)

    @property
    def dataset(self) -> Any:
        return self.inner.dataset

    @property
    def batch_size(self) -> int | None:
        """Number of samples in a batch of this rank; None if the loader has no batch size."""
        return self.inner.batch_size

    @property
    def sampler(self) -> Any:
        return self.inner.sampler

    @property
    def batch_sampler(self) -> Any:
        """The sampler of this rank's batches; None if the dataset yields batches."""
        return self.inner.batch_sampler

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch, from 0. Each later epoch has the next number.

        If a checkpoint was loaded, its epoch continues at the checkpoint's position. Other epochs start at their
        beginning.
        """
        if epoch != self._epoch:
            self._remaining = Remaining()
        self._epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        """Return the training loop's position: the epoch, and how many of its items all ranks together have received.

        The batch of the current iteration counts as received. Items are samples, or batches if the loader has no batch
        size.
        """
        position = self._reading or Position(self._epoch, self._remaining, self._generator_state())
        return {
            "epoch": position.epoch,
            "items": position.remaining.first * self._items_per_number,
            "returned": list(position.remaining.returned),
            "unit": self._unit,
            "length": self._num_items(),
            "generator": position.generator,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a position from :meth:`state_dict`. If the data has another length, start the epoch again.

        Raises ModelError if the position is not between two batches of this loader.
        """
        self._epoch, self._remaining, self._reading = state["epoch"], Remaining(), None
        if (self._unit, self._num_items()) != (state["unit"], state["length"]):
            return
        per_batch = self._items_per_number
        if state["items"] % per_batch:
            raise ModelError(
                f"the checkpoint was saved after {state['items']:,} samples of a stream, which is not a whole number "
                f"of batches with batch_size={per_batch}: use the batch_size of the saved training"
            )
        self._remaining = Remaining(state["items"] // per_batch, tuple(state.get("returned", ())))
        self._set_generator(state["generator"])

    @property
    def _unit(self) -> str:
        return "batch" if self.batch_size is None else "sample"

    @property
    def _items_per_number(self) -> int:
        """Number of samples that one number in :class:`Remaining` counts: the batch size for a stream, otherwise 1."""
        return (self.batch_size or 1) if self._is_stream else 1

    @property
    def numbers_per_step(self) -> int:
        """Number of samples, or of batches in a stream, in one batch of every rank together."""
        return self._size * (1 if self._is_stream else self.batch_size or 1)

    def _generator(self) -> torch.Generator | None:
        """Return the generator of the user's sampler; None if it has none."""
        sampler = getattr(self._given.batch_sampler, "sampler", None) or self._given.sampler
        return getattr(sampler, "generator", None)

    def _generator_state(self) -> str | None:
        generator = self._generator()
        return None if generator is None else base64.b64encode(generator.get_state().numpy().tobytes()).decode()

    def _set_generator(self, state: str | None) -> None:
        generator = self._generator()
        if generator is not None and state is not None:
            generator.set_state(torch.frombuffer(bytearray(base64.b64decode(state)), dtype=torch.uint8))

    def _num_items(self) -> int | None:
        """Return the number of items of all ranks in an epoch; None for a stream, or if the number is unknown."""
        if self._is_stream:
            return None
        return len_or_none(self._given.batch_sampler if self.batch_size is None else self._given.sampler)

    def __len__(self) -> int:
        """Return this rank's number of batches in an epoch. Raises TypeError if the data has no length."""
        if not self._is_stream:
            return len(self.inner)
        length = len(self.inner)
        if self.inner.drop_last:
            return length // self._size
        return math.ceil((length - (0 if self._trains else self._rank)) / self._size)

    def __iter__(self) -> Iterator[Any]:
        snapshots = self._strategy.snapshots if self._trains else None
        is_repeating = snapshots is not None and snapshots.resume(self._strategy, self._epoch)
        epoch, remaining = self._epoch, self._remaining
        self._epoch, self._remaining = epoch + 1, Remaining()
        inner = self.inner if self._is_stream or remaining == Remaining() else self._with_sampler(remaining)
        if self._trains:
            self._reading = Position(epoch, remaining, self._generator_state())
        batches = self._batches(inner, epoch, remaining)
        if not self._trains:
            return batches
        batches = self._iterate_training(batches, None if self._is_stream else len_or_none(inner))
        return self._iterate_first(batches) if is_repeating else batches

    def _iterate_first(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield only one batch, because this epoch is before the snapshot's epoch."""
        yield next(batches)
        self._reading = None

    def _iterate_training(self, batches: Iterator[Any], length: int | None) -> Iterator[Any]:
        strategy, position = self._strategy, self._reading
        assert position is not None
        if strategy.world_size > 1 and not strategy.takes_uneven:
            lengths = strategy._ranks.exchange(length)
            if None in lengths:
                batches = self._in_step(batches)
            elif len(set(lengths)) > 1:
                counts = ", ".join(f"rank {rank} {count}" for rank, count in enumerate(lengths))
                raise UsageError(f"the ranks have unequal numbers of batches in an epoch ({counts}){self._advice()}")
        if length is None and not position.remaining.first:
            batches = self._at_least_one(batches)
        if strategy.embedder is not None:
            batches = self._prefetching(batches)
        if strategy.profiler is not None:
            batches = strategy.profiler.watch(batches)
        with strategy.epoch(length):
            if strategy.phases is not None:
                batches = strategy.phases.batches(batches)
            for number, batch in enumerate(batches):
                if strategy.snapshots is not None and not strategy.snapshots.is_repeating:
                    strategy.snapshots.save_if_due(strategy, number)
                position.remaining = position.remaining.after(self.numbers_per_step)
                self._report(position.epoch, position.remaining)
                yield batch
            strategy._ran_out()
        if self._reading is position:
            self._reading = None

    def _report(self, epoch: int, remaining: Remaining) -> None:
        """Report the position in the training data, as progress for Kubeflow."""
        if self._strategy.status is not None:
            unit, length = "samples" if self._unit == "sample" else "batches", self._num_items()
            done = remaining.first * self._items_per_number
            position = {unit: done if length is None else min(done, length), f"{unit}PerEpoch": length}
            self._strategy.report_progress(currentEpoch=epoch + 1, **position)

    def _batches(self, inner: DataLoader[Any], epoch: int, remaining: Remaining) -> Iterator[Any]:
        """Return this rank's batches of an epoch, on the strategy's device."""
        set_epoch(inner.dataset if self._is_stream else inner.batch_sampler or inner.sampler, epoch)
        batches: Iterator[Any] = iter(inner)
        if self._is_stream and remaining != Remaining():
            batches = (batch for number, batch in enumerate(batches) if number in remaining)
        if self._is_stream and self._size > 1:
            batches = sharded_stream(batches, self._rank, self._size, drop_last=self.inner.drop_last, pads=self._trains)
        device = self._strategy.device
        if device.type == "cpu":
            return batches
        return (moved(batch, device) for batch in batches)

    def _prefetching(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches. While the loop computes a batch, the embedder fetches the next batch's rows."""
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

    def _num_batches(self) -> int | None:
        return None if self._is_stream else len_or_none(self.inner)

    def _in_step(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches of a stream. Before each batch, check that every rank has a batch."""
        group, size = self._strategy._ranks.group, self._strategy.world_size
        assert group is not None
        nothing = object()
        count = 0
        while True:
            batch = next(batches, nothing)
            has_batch = np.zeros(size, np.int32)
            has_batch[self._strategy.rank] = batch is not nothing
            has_batch = group.all_reduce(has_batch)
            if not has_batch.any():
                return
            if not has_batch.all():
                ended = ", ".join(str(rank) for rank in np.flatnonzero(has_batch == 0))
                continuing = ", ".join(str(rank) for rank in np.flatnonzero(has_batch))
                raise UsageError(
                    f"rank {ended} ran out of data after {count} batches, rank {continuing} has more{self._advice()}"
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
            f": under strategy {self._strategy.name} all ranks need the same number; give them data of equal length "
            "(drop_last=True drops the remainder), or choose AllReduce(join=True)"
        )

    def _num_samples(self) -> int | None:
        return None if self._is_stream else len_or_none(self.dataset)

    def _describe_empty(self, rank: int, num_samples: int | None) -> str:
        size = "of unknown length" if num_samples is None else f"of length {num_samples}"
        return (
            f"rank {rank} has no batch in an epoch: the dataset is {size}, over {self._size} ranks, with "
            f"batch_size={self.batch_size} and drop_last={self.inner.drop_last}; pass more data, a smaller "
            "batch_size, or drop_last=False"
        )


def with_samplers(loader: DataLoader[Any], sampler: Any, batch_sampler: Any) -> DataLoader[Any]:
    """Return a copy of a loader with other samplers."""
    # DataLoader's samplers are read-only, so write to __dict__. A new DataLoader would lack a subclass's attributes.
    other = copy.copy(loader)
    other.__dict__.update(sampler=sampler, batch_sampler=batch_sampler, _iterator=None)
    return other


def len_or_none(items: Any) -> int | None:
    try:
        return len(items)
    except (TypeError, NotImplementedError):
        return None


def moved(batch: Any, device: torch.device) -> Any:
    """Return a batch with its tensors on `device`. Copies from pinned memory are asynchronous."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=batch.device.type == "cpu" and batch.is_pinned())
    if hasattr(batch, "to"):  # packed sequences, and batches of other libraries
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: moved(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(moved(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(moved(value, device) for value in batch)
    return batch
