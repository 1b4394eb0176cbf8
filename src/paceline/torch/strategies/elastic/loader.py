"""The training data of an epoch, divided among ranks that change during the epoch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from typing_extensions import override

from paceline.errors import UsageError
from paceline.torch.strategies.base import Strategy
from paceline.torch.strategies.elastic.training import ElasticTraining
from paceline.torch.strategies.loaders import Loader, Position
from paceline.torch.strategies.sampling import Remaining


class ElasticLoader(Loader):
    """A loader whose ranks change between two batches. See :class:`~paceline.torch.strategies.loaders.Loader`.

    Each item of an epoch is used by exactly one committed step, up to the repetitions at the end of the epoch. Items of
    a rank that died before their step was committed come again, on the other ranks. A newcomer's loader yields
    one batch for each epoch before its first one, so that the training loop's variables have values. The state that the
    newcomer receives later replaces the effects of these batches.
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
        self._window: tuple[Remaining, tuple[int, ...], int] | None = None
        """The remaining items at the last committed step, the ranks that received batches since, and the number of
        steps committed then."""

    @override
    def __iter__(self) -> Iterator[Any]:
        if self._trains:
            return self._iterate_elastic()
        self._take_place(Remaining())
        return super().__iter__()

    def _take_place(self, remaining: Remaining) -> Any:
        """Take the part of the data that belongs to this rank now; return the loader of the remaining items."""
        if self._is_shared:
            self._rank, self._size = self._strategy.data_place
        if self._is_stream:
            return self._given
        self.inner = self._with_sampler(Remaining())
        return self._with_sampler(remaining)

    def _iterate_elastic(self) -> Iterator[Any]:
        epoch = self._epoch
        if not self._training.has_joined and not self._training.join(self, epoch):
            self._epoch = epoch + 1
            yield from itertools.islice(self._batches(self._take_place(Remaining()), epoch, Remaining()), 1)
            return
        position = Position(epoch, self._remaining, self._generator_state())
        self._epoch, self._remaining, self._reading = epoch + 1, Remaining(), position
        self._training.begin_epoch(self, epoch)
        self._window = None
        quorum = -1
        batches: Iterator[Any] = iter(())
        nothing = object()
        while True:
            self._return_lost_items(position)  # before newcomers receive the position
            self._training.admit_newcomers(epoch)
            if quorum != self._training.quorum:
                quorum = self._training.quorum
                batches = self._batches(self._take_place(position.remaining), epoch, position.remaining)
            batch = next(batches, nothing)
            if batch is nothing:
                break
            if self._window is None:
                self._window = (position.remaining, self._training.members, self._training.num_committed)
            position.remaining = position.remaining.after(self.numbers_per_step)
            yield batch
        self._reading = self._window = None

    def _return_lost_items(self, position: Position) -> None:
        """After a committed step, return the items of ranks that died before it."""
        if self._window is None or self._window[2] == self._training.num_committed:
            return
        before, members, _ = self._window
        self._window = None
        contributors = self._training.contributors
        lost = {rank for rank, member in enumerate(members) if member not in contributors}
        if not lost:
            return
        now = position.remaining
        count = len(before.returned) - len(now.returned) + now.first - before.first
        length = self._num_items()
        numbers = [number for place, number in enumerate(before.numbers(count)) if place % len(members) in lost]
        position.remaining = now.with_returned([number for number in numbers if length is None or number < length])
