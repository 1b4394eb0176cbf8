"""The base of strategies whose ranks may die, and join, during the training."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, ClassVar, cast

import msgspec
import torch
from typing_extensions import override

from paceline.collectives import Group
from paceline.collectives.elastic import ElasticGroup
from paceline.environment import environment, timedelta_of
from paceline.errors import UsageError
from paceline.meeting.own_launcher import OwnLauncher
from paceline.strategies import NO_GLOBAL_BATCH
from paceline.torch.strategies.base import Strategy
from paceline.torch.strategies.elastic.loader import ElasticLoader
from paceline.torch.strategies.elastic.place import find_place
from paceline.torch.strategies.elastic.state import StateTransfer, broadcast_copies
from paceline.torch.strategies.elastic.steps import ElasticSteps
from paceline.torch.strategies.elastic.training import ElasticTraining
from paceline.torch.strategies.loaders import Loader
from paceline.torch.strategies.ranks import DEFAULT_TIMEOUT, Ranks


class ElasticRanks(Ranks):
    """The current ranks of an elastic training. Before it joins, a newcomer is the only rank of its own group."""

    def __init__(self, group: ElasticGroup, local_rank: int, launcher: OwnLauncher | None) -> None:
        # ElasticGroup has the methods of Group that the strategies use.
        super().__init__(local_rank=local_rank, group=cast(Group, group))
        self._elastic = group
        self._launcher = launcher

    @property
    @override
    def rank(self) -> int:
        # Before it joins, a newcomer must not be rank 0, because rank 0 prints and writes.
        return self._elastic.rank if self._elastic.quorum else max(self.local_rank, 1)

    @property
    @override
    def worker_rank(self) -> int | None:
        return None  # the number of a dead rank may still be in use

    @property
    @override
    def size(self) -> int:
        return self._elastic.size

    @override
    def share(self, key: str, value: Any) -> Any:
        if self._elastic.quorum:
            value = self.exchange(value)[0]
            self._elastic.values.mark(key, msgspec.msgpack.encode(value))
            return value
        return msgspec.msgpack.decode(self._elastic.values.wait(key))

    @override
    def call_on_first(self, function: Callable[[], None]) -> None:
        def run(group: Group) -> None:
            if group.rank == 0:
                function()
            group.barrier()

        if self._elastic.quorum:
            self._elastic.exchange(run)

    @override
    @torch.no_grad()
    def broadcast(self, tensors: Iterable[torch.Tensor]) -> None:
        sent = [tensor.detach() for tensor in tensors if tensor.numel()]
        copies = self._elastic.exchange(lambda group: broadcast_copies(group, sent, 0))
        for tensor, copy in zip(sent, copies, strict=True):
            tensor.copy_(copy)

    @override
    def report_failure(self, error: BaseException) -> None:
        pass  # the other ranks continue

    @override
    def failure(self) -> str | None:
        return None

    @override
    def close(self) -> None:
        super().close()
        if self._launcher is not None:
            self._launcher.close()


class ElasticStrategy(Strategy):
    """A strategy whose ranks may die, and join, during the training. Abstract.

    The constructor of a subclass calls :meth:`_find_place`, then the constructor of its other base class, which calls
    :meth:`_connect`, and then :meth:`_enter`.
    """

    takes_global_batch: ClassVar[bool] = False
    """Whether a step may have a constant number of samples."""

    def _find_place(self, timeout: Any = DEFAULT_TIMEOUT, global_batch: int | None = None) -> None:
        """Find this process's place. Raises UsageError without a coordinator, and for an unsupported global batch."""
        self._place = find_place(timedelta_of(timeout))
        self._steps = ElasticSteps(global_batch or self._place.options.global_batch)
        if self._steps.global_batch is not None and not self.takes_global_batch:
            raise UsageError(f"--global-batch {self._steps.global_batch}: {NO_GLOBAL_BATCH}. Leave it out")

    def _connect(self, timeout: timedelta, balanced_batch: int | None = None) -> Ranks:
        """Connect to the coordinator. `balanced_batch` is as in :meth:`ElasticPlace.connect`."""
        self._elastic = self._place.connect(timeout, balanced_batch)
        return ElasticRanks(self._elastic, environment().local_rank or 0, self._place.launcher)

    def _enter(self) -> None:
        """Take part in the training, unless this process is a newcomer."""
        self._training = ElasticTraining(self, self._elastic, self._steps)
        if self._elastic.has_state:
            self._elastic.enter()
            self._elastic.barrier()  # an exchange, after which all ranks are contributors

    @property
    def has_joined(self) -> bool:
        """Whether this process takes part in the training; False for a newcomer that has not joined."""
        return self._training.has_joined

    @property
    def _has_effect(self) -> bool:
        """Whether this process takes part in the training, and has the training's state."""
        return self.has_joined and self._elastic.is_ready

    @property
    @override
    def data_place(self) -> tuple[int, int]:
        contributors, _ = self._training.division
        own = self._elastic.member
        return contributors.index(own) if own in contributors else len(contributors), len(contributors)

    @override
    def prepare(self, *given: Any, **named: Any) -> Any:
        prepared = super().prepare(*given, **named)
        StateTransfer(self).describe()  # raise UsageError now, not when a newcomer joins
        return prepared

    @override
    def prepare_loader(self, loader: Any, *, shard: bool = True, prefetch: bool = False) -> Loader:
        return ElasticLoader(loader, self, self._training, shard=shard, trains=prefetch)
