"""The strategy ``parameter-server`` with ranks that may die and join."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from paceline.environment import timedelta_of
from paceline.errors import UsageError
from paceline.protocol import Consistency
from paceline.strategies.elastic import NO_STRAGGLERS
from paceline.torch.embeddings import ClusterTables, RowTables
from paceline.torch.strategies.base import state_of
from paceline.torch.strategies.elastic.base import ElasticStrategy
from paceline.torch.strategies.ranks import DEFAULT_TIMEOUT, Ranks
from paceline.torch.strategies.server.parameter_server import ParameterServer

_MOST_BATCHES: Final = 16


def batches_per_exchange(consistency: Consistency) -> int:
    """Return the number of batches after which the ranks exchange their progress.

    With bounded delay, this is the number of iterations that a rank may begin without the other ranks, or less.
    """
    return _MOST_BATCHES if consistency.tau is None else min(consistency.tau + 1, _MOST_BATCHES)


class ElasticParameterServer(ElasticStrategy, ParameterServer):
    """Parameters on servers, and ranks that may die, and join, during the training.

    The ranks exchange their progress after each batch under sequential consistency, after N + 1 batches of each rank
    under ``bounded:N`` (at most 16), and after 16 batches under ``eventual``. If a rank has died, the other ranks then
    get its samples, except those of steps that it had reported. A new rank takes part after such an exchange. It pulls
    the parameters from the servers. Rank 0 sends the rest of the state: buffers, schedulers and the position in the
    data.

    If a rank dies while it sends its gradients, the servers may have applied them, although other ranks compute the
    same samples again. Under sequential consistency each server applies them completely or not at all. Under other
    consistencies it may apply a part of them.

    The options are those of :class:`~paceline.torch.strategies.server.parameter_server.ParameterServer`, except
    `filters` and `pull_filters`.
    """

    def __init__(self, **options: Any) -> None:
        for name in ("filters", "pull_filters"):
            if options.get(name):
                raise UsageError(f"{name}={options[name]!r}: not supported with --min-ranks. Leave it out")
        timeout = options.get("timeout", DEFAULT_TIMEOUT)
        self._find_place(timedelta_of(timeout))
        self._share = 1.0
        factor = self._place.options.drop_stragglers
        if factor is not None:
            raise UsageError(f"--drop-stragglers {factor:g}: {NO_STRAGGLERS}")
        super().__init__(**options)
        self._steps.batches_per_exchange = batches_per_exchange(self.client.consistency)
        self._enter()
        if not self._has_effect:
            self.client.retire()

    @override
    def _meet(self, timeout: timedelta) -> Ranks:
        return self._connect(timeout)

    @property
    @override
    def _may_write(self) -> bool:
        return True  # rank 0 may die

    @override
    def _row_tables(self) -> RowTables:
        # Each rank sends changes, because rank 0 may die before it sends a change.
        return ClusterTables(self.client, self._filters, lambda: self._has_effect)

    @override
    def _spread(self, models: list[nn.Module], optimizers: list[Optimizer]) -> tuple[list[nn.Module], list[Optimizer]]:
        spread = super()._spread(models, optimizers)
        if self.dense is not None:
            self.dense.holds = not self._has_effect
        return spread

    @property
    @override
    def _has_samples(self) -> bool:
        return self._share > 0

    @override
    def begin_batch(self, share: float) -> None:
        self._share = share
        if self.dense is not None:
            self.dense.set_share(share)

    @override
    def _step(self, optimizer: Optimizer) -> None:
        if self._has_effect:
            super()._step(optimizer)
            self._training.publish_progress()
            return
        if self.dense is not None:
            self.dense.leave_out(optimizer)
        if self.embedder is not None:
            self.embedder.step(optimizer, has_effect=False)
            self.embedder.ticked()

    @property
    @override
    def iterations(self) -> list[int]:
        return [self.client.clock, *([] if self.dense is None else self.dense.num_steps)]

    @override
    def transferred_state(self) -> dict[str, torch.Tensor]:
        assert self.module is not None
        return state_of(self.module, self._trained)

    @override
    def join_iterations(self, iterations: list[int]) -> None:
        self.client.join(iterations[0])
        if self.dense is not None:
            self.dense.num_steps = iterations[1:]
            self.dense.holds = False
            self.dense.pull_all()

    @override
    def end_transfer(self) -> None:
        # Under sequential consistency, the other ranks must not end an iteration before the new ranks have joined it.
        self._elastic.barrier()
        if self.dense is not None:
            self.dense.hands_on.restart()
