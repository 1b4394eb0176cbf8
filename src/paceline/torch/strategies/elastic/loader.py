"""The training data of an epoch, divided among ranks that change during the epoch."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.utils.data import Sampler
from typing_extensions import override

from paceline.errors import UsageError
from paceline.protocol.balance import divide_step
from paceline.protocol.leases import EpochLeases, Remaining, StepRound, count_rounds, split_rounds
from paceline.torch.strategies.base import Strategy
from paceline.torch.strategies.elastic.training import ElasticTraining
from paceline.torch.strategies.loaders import Loader, Position, moved, with_samplers
from paceline.torch.strategies.sampling import is_sharded, seeded, set_epoch

_Round: TypeAlias = tuple[Any, StepRound[Any]]
"""A batch of this rank, and the batches of all ranks at the same time."""


class ElasticLoader(Loader):
    """A :class:`~paceline.torch.strategies.loaders.Loader` for ranks that may die or join between two batches.

    Each item of an epoch is in exactly one committed step. If a rank dies before its step is committed, the other ranks
    get its items. At the end of an epoch, a rank without an item gets another rank's item, which has no effect on the
    gradient. A newcomer's loader yields one batch of each epoch that is over, so that the training loop's variables
    have values. The state that the newcomer receives later replaces the effects of these batches.

    The global batch is the number of items in a step on all ranks together. The last step of an epoch may have fewer.
    If a rank's part of a step is larger than its batch size, the step has several batches.
    """

    def __init__(
        self, loader: Any, strategy: Strategy, training: ElasticTraining, *, shard: bool, trains: bool
    ) -> None:
        if trains and not shard:
            raise UsageError(
                "prepare_loader(shard=False, prefetch=True): elastic ranks share one data set, which the strategy "
                "divides. Leave shard out"
            )
        super().__init__(loader, strategy, shard=shard, trains=trains)
        self._training = training
        self._is_shared = shard
        self._leases: EpochLeases | None = None
        """Assigns the items of the running epoch to ranks; None between epochs, and before this rank joins."""
        if trains and training.has_step_times and strategy.loaders:
            raise UsageError("--drop-stragglers, --balance: several training loaders are not supported. Leave them out")
        if trains and is_sharded(loader.sampler, self._rank, self._size):
            raise UsageError("prepare() got a DistributedSampler: leave it out, because elastic ranks change")
        self._per_step = self._choose_step(training.steps.global_batch) if trains else None

    def _choose_step(self, global_batch: int | None) -> int | None:
        """Return the size of a step in samples, or in batches for a stream; None: each rank has one batch."""
        if global_batch is None:
            return None
        if self.batch_size is None:
            raise UsageError(f"--global-batch {global_batch}: needs a loader with a batch_size. Pass batch_size")
        if self._is_stream and self._training.has_balance:
            raise UsageError(
                "--balance: not supported with a stream (IterableDataset), because ranks divide a stream by whole "
                "batches. Leave it out"
            )
        if global_batch % self._items_per_number:
            raise UsageError(
                f"--global-batch {global_batch}: expected a multiple of batch_size={self.batch_size}, because a stream "
                "is divided by batches"
            )
        return global_batch // self._items_per_number

    @property
    def _per_rank(self) -> int:
        """The largest size of a rank's batch in samples; for a stream 1, because it counts batches."""
        return 1 if self._is_stream else self.batch_size or 1

    @override
    def __len__(self) -> int:
        """Return the number of batches per epoch for the current ranks. Raises TypeError for data without a length."""
        if not self._trains:
            return super().__len__()
        length = self._num_items()
        if length is None:
            length = len(self.inner)
        size = self._strategy.data_place[1]
        _, shares = self._training.division
        per_step = self._per_step or self._per_rank * size
        num_steps, rest = divmod(length, per_step)
        in_step, in_last = (
            count_rounds(divide_step(count, size, shares), self._per_rank) for count in (per_step, rest)
        )
        return num_steps * in_step + (0 if self.inner.drop_last else in_last)

    @override
    def __iter__(self) -> Iterator[Any]:
        if self._trains:
            phases, batches = self._strategy.phases, self._iterate_elastic()
            return batches if phases is None else phases.batches(batches)
        self._take_place()
        return super().__iter__()

    def _take_place(self) -> None:
        """Select the part of the data for this rank's current number."""
        if self._is_shared:
            rank, self._size = self._strategy.data_place
            self._rank = min(rank, self._size - 1)
        if not self._is_stream:
            self.inner = self._with_sampler(Remaining())

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the position as :meth:`Loader.state_dict` does. A global batch that is not complete does not count."""
        self._training.steps.settle()
        if self._leases is not None and self._reading is not None:
            has_steps = self._per_step is not None
            self._reading.remaining = self._leases.without_step() if has_steps else self._leases.remaining
        return super().state_dict()

    def _iterate_elastic(self) -> Iterator[Any]:
        snapshots, is_repeating = self._strategy.snapshots, False
        if snapshots is not None and self._training.has_joined:
            is_repeating = snapshots.resume(self._strategy, self._epoch)
        elif snapshots is not None:
            snapshots.disable_resume()
        epoch = self._epoch
        while True:
            if not self._training.has_joined and not (yield from self._join(epoch)):
                self._epoch = epoch + 1
                return
            yield from itertools.islice(self._iterate_joined(epoch), 1 if is_repeating else None)
            if self._training.has_joined:
                return

    def _join(self, epoch: int) -> Generator[Any, None, bool]:
        """Join the other ranks; return False if they are in a later epoch.

        Before joining, yield the batches that this process computes alone: one in its first epoch, one in each epoch
        that the other ranks have completed, and a straggler's batches until it has recovered.
        """
        batches: Iterator[Any] = iter(())
        nothing = object()
        has_yielded = False
        while True:
            has_tried = self._training.may_join(self, epoch)
            if has_tried and self._training.join(self, epoch):
                return True
            if has_tried and has_yielded:
                return False
            batch = next(batches, nothing)
            if batch is nothing:
                self._take_place()
                batches = self._batches(self.inner, epoch, Remaining())
                batch = next(batches)
            yield batch
            has_yielded = self._training.has_computed_alone = True

    def _iterate_joined(self, epoch: int) -> Iterator[Any]:
        """Yield batches until the epoch ends or this rank is excluded as a straggler."""
        leases = self._leases = EpochLeases(self._remaining)
        position = self._reading = Position(epoch, self._remaining, self._generator_state())
        self._epoch, self._remaining = epoch + 1, Remaining()
        self._training.begin_epoch(self, epoch)
        self._training.steps.begin_epoch(self, leases)
        division: tuple[Any, Any] = ((), None)
        batches: Iterator[_Round] = iter(())
        snapshots = self._strategy.snapshots
        is_repeating = snapshots is not None and snapshots.is_repeating
        num_steps = 0
        while True:
            self._training.settle()  # end these leases before newcomers receive the position
            if not is_repeating and self._training.admit_newcomers(epoch):
                num_steps = 0
            if not self._training.has_joined:
                break
            if division != self._training.division:
                division = self._training.division
                batches = self._prefetching_rounds(self._rounds(leases, position))
                num_steps = 0
            if snapshots is not None and not is_repeating and self._training.steps.is_idle:
                snapshots.save_if_due(self._strategy, num_steps)
                num_steps += 1
            batch, dealt = next(batches, (None, None))
            if dealt is None:
                if self._training.settle(is_over=True):
                    continue  # items of a dead rank may remain
                break
            self._training.receive(self._weight_of(dealt, batch), is_last=dealt.is_last)
            leases.lease(dealt.parts, division[0], self._training.steps.num_since_exchange - 1)
            self._strategy.begin_batch(dealt.num_own * len(dealt.parts) / sum(dealt.parts))
            self._report(position.epoch, leases.remaining)
            yield batch
        if self._leases is leases:
            self._leases = self._reading = None
        self._training.end_epoch(self, epoch)

    def _rounds(self, leases: EpochLeases, position: Position) -> Iterator[_Round]:
        """Return this rank's batches from the current position on. The round of a batch has one batch of every rank."""
        loader = self._given
        rank, size = self._strategy.data_place
        missing = None if self._per_step is None else self._per_step - leases.num_held
        split = partial(
            split_rounds, rank=rank, size=size, per_rank=self._per_rank, per_step=self._per_step, num_missing=missing,
            drop_last=loader.drop_last, shares=self._training.division[1],
        )  # fmt: skip
        remaining = leases.remaining
        self._set_generator(position.generator)  # the sampler then draws the same items again
        if self._is_stream:
            set_epoch(loader.dataset, position.epoch)
            source = (batch for number, batch in enumerate(loader) if number in remaining)
            return ((self._on_device(dealt.items[0]), dealt) for dealt in split(source))
        has_batches = loader.batch_size is None and loader.batch_sampler is not None
        sampler = seeded(loader.batch_sampler if has_batches else loader.sampler, self._strategy.seed)
        set_epoch(sampler, position.epoch)
        rounds: deque[StepRound[Any]] = deque()
        own = _RoundSampler(sampler, remaining, split, rounds, is_batched=loader.batch_size is not None)
        inner = with_samplers(loader, *((own, None) if loader.batch_sampler is None else (loader.sampler, own)))
        return ((self._on_device(batch), rounds.popleft()) for batch in inner)

    def _prefetching_rounds(self, rounds: Iterator[_Round]) -> Iterator[_Round]:
        """Yield the batches and rounds. While the loop computes a batch, the embedder fetches the next batch's rows."""
        embedder = self._strategy.embedder
        if embedder is None:
            yield from rounds
            return
        following = next(rounds, None)
        while following is not None:
            current, following = following, next(rounds, None)
            embedder.begin(current[0])
            embedder.prefetch(None if following is None else following[0])
            yield current

    def _on_device(self, batch: Any) -> Any:
        device = self._strategy.device
        return batch if device.type == "cpu" else moved(batch, device)

    def _weight_of(self, dealt: StepRound[Any], batch: Any) -> float:
        """Return the batch's number of samples divided by the batch size; 0 if it has only another rank's item."""
        if not dealt.num_own:
            return 0.0
        if self._is_stream or self._given.batch_sampler is None:
            num_samples = _length_of(batch) or self.batch_size or 1
        else:
            num_samples = len(dealt.items[0]) if self.batch_size is None else dealt.num_own
        return num_samples / (self.batch_size or 1)


class _RoundSampler(Sampler[Any]):
    """Yields a rank's batches of indices. It stores their rounds in `rounds`, because a DataLoader reads ahead."""

    def __init__(
        self,
        sampler: Any,
        remaining: Remaining,
        split: Callable[[Iterable[Any]], Iterator[StepRound[Any]]],
        rounds: deque[StepRound[Any]],
        *,
        is_batched: bool,
    ) -> None:
        self.sampler = sampler
        self._remaining, self._split, self._rounds, self._is_batched = remaining, split, rounds, is_batched

    @override
    def __iter__(self) -> Iterator[Any]:
        for dealt in self._split(item for number, item in enumerate(self.sampler) if number in self._remaining):
            self._rounds.append(dealt)
            yield dealt.items if self._is_batched else dealt.items[0]


def _length_of(batch: Any) -> int | None:
    """Return the length of the first tensor in a batch; None without a tensor."""
    if isinstance(batch, torch.Tensor):
        return len(batch) if batch.dim() else None
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    return next((length for length in map(_length_of, parts) if length is not None), None)
