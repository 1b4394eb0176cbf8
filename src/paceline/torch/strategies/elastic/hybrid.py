"""The strategy ``hybrid`` with ranks that may die and join."""

from __future__ import annotations

from typing import Any, ClassVar

from torch.optim import Optimizer
from typing_extensions import override

from paceline.torch.embeddings import ClusterTables, Embedder, RowTables
from paceline.torch.strategies.elastic.strategy import ElasticAllReduce
from paceline.torch.strategies.hybrid import Hybrid


class ElasticHybrid(Hybrid, ElasticAllReduce):
    """Embeddings on servers; all other parameters by all-reduce over ranks that may die, and join, during the training.

    A rank sends its gradients of rows after all ranks have agreed on the step. If it dies between these events, the
    servers lack the gradients of rows of its last batch, or a part of them. A new rank sends gradients of rows, and
    takes part in the servers' iterations, when it has the training's state.

    The options are those of :class:`~paceline.torch.strategies.hybrid.Hybrid` that
    :class:`~paceline.torch.strategies.elastic.strategy.ElasticAllReduce` supports. `global_batch` is not supported.
    """

    takes_global_batch: ClassVar[bool] = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if not self._has_effect:
            self._retire()

    @property
    @override
    def iterations(self) -> list[int]:
        return [0 if self._client is None else self._client.clock]

    @override
    def join_iterations(self, iterations: list[int]) -> None:
        # The other ranks are in this iteration. In a later one, they and this rank would wait for each other: for this
        # rank's gradients, and for the end of the iteration on the servers.
        if self._client is not None:
            self._client.join(iterations[0])
            self._takes_part = True

    @override
    def _row_tables(self) -> RowTables:
        assert self._client is not None, "prepare() comes before close()"
        # Each rank sends changes, because rank 0 may die before it sends a change.
        return ClusterTables(self._client, self._row_filters, lambda: self._has_effect)

    @override
    def _step_with(self, embedder: Embedder, optimizers: list[Optimizer]) -> None:
        def step(optimizer: Optimizer) -> None:
            if not self._has_effect:
                self._retire()
            embedder.step(optimizer, self._tick, has_effect=self._has_effect and self._steps.has_samples)

        embedder.step_with(optimizers, step)
