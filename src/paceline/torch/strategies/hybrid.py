"""Asynchronous embeddings on servers; all-reduce for all other parameters."""

from __future__ import annotations

import atexit
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from paceline.environment import timedelta_of
from paceline.filters import Filter
from paceline.filters.gradients import are_for_gradients
from paceline.protocol import Consistency
from paceline.ps import Client
from paceline.torch.embeddings import ClusterTables, Embedder, RowTables
from paceline.torch.gradient_filters import row_filters
from paceline.torch.strategies.all_reduce import AllReduce
from paceline.torch.strategies.base import warn
from paceline.torch.strategies.ranks import DEFAULT_TIMEOUT
from paceline.torch.strategies.server.cluster import check_cluster, check_is_first, connect_workers


class Hybrid(AllReduce):
    """One process per device: servers store embeddings' rows, all-reduce averages the gradients of other parameters.

    Use it for models with Paceline's embeddings. ``optimizer.step()`` sends this rank's gradients of embeddings' rows
    to the servers, and ends the rank's iteration. The rows of the next batch are requested during the computation of
    the current batch. Under the consistency ``bounded:4``, the default of ``paceline run``, servers apply gradients
    when they arrive. Under ``sequential``, servers average them over the ranks and apply them once per iteration.

    The options are those of :class:`~paceline.torch.strategies.all_reduce.AllReduce`, and `consistency`, `replicas` and
    `min_replicas` of `ParameterServer`. `filters` (a list, or a text such as ``key-caching,quantize:8``; default:
    ``paceline run --filters``) apply to embeddings' rows, unless an embedding has its own filters. Those filters that
    support gradients also apply to the gradients that all-reduce averages. `pull_filters` apply to pulled rows
    (default: the filters of `filters` that work on values and bytes).

    A model without embeddings is trained by all-reduce, with a warning on standard error.

    Raises UsageError without servers: start the program with ``paceline run --strategy hybrid``.

    Source: Jiang et al., "A Unified Architecture for Accelerating Distributed DNN Training in Heterogeneous GPU/CPU
    Clusters", OSDI'20, for the combination; Lian et al., "Persia", KDD'22, for asynchronous embeddings with a
    synchronous dense part.
    """

    name: ClassVar[str] = "hybrid"

    def __init__(
        self,
        *,
        consistency: Consistency | None = None,
        replicas: int | None = None,
        min_replicas: int | None = None,
        filters: Sequence[Filter] | str | None = None,
        pull_filters: Sequence[Filter] | str | None = None,
        device: torch.device | str | None = None,
        seed: int = 0,
        **options: Any,
    ) -> None:
        check_is_first(self.name)
        self._row_filters = row_filters(filters, pull_filters)
        averaged = [candidate for candidate in self._row_filters.filters if are_for_gradients(candidate)]
        super().__init__(device=device, seed=seed, filters=averaged, **options)
        self._client: Client | None = None
        try:
            self._client = connect_workers(
                self.name, self._ranks.worker_rank, timedelta_of(options.get("timeout", DEFAULT_TIMEOUT))
            )
            check_cluster(self._client, self.name, consistency, replicas, min_replicas)
        except BaseException:
            self.close()
            raise
        self._takes_part = True
        atexit.register(self._leave)

    def _spread(self, models: list[nn.Module], optimizers: list[Optimizer]) -> tuple[list[nn.Module], list[Optimizer]]:
        embedder, self.embedder = self.embedder, None  # hide it from all-reduce: the servers update the rows
        if embedder is None and self.is_main:
            warn("strategy hybrid: this model has no embeddings of paceline.torch, so the servers are not used")
        spread = super()._spread(models, optimizers)
        if embedder is not None:
            self.embedder = embedder
            self._step_with(embedder, optimizers)
        return spread

    def _step_with(self, embedder: Embedder, optimizers: list[Optimizer]) -> None:
        """Send the gradients of rows, and end the iteration on the servers, in each step of an optimizer."""
        embedder.step_with(optimizers, lambda optimizer: embedder.step(optimizer, self._tick))

    def _row_tables(self) -> RowTables:
        assert self._client is not None, "prepare() comes before close()"
        return ClusterTables(self._client, self._row_filters)

    def _tick(self) -> None:
        if self._client is not None and self._takes_part:
            self._client.tick()

    @contextmanager
    @override
    def epoch(self, num_batches: int | None) -> Iterator[None]:
        """Return a context for one epoch, in which this rank takes part in the servers' iterations.

        It leaves them at the end of its data. So other ranks do not wait while it evaluates or writes a checkpoint.
        """
        if self._client is not None:
            if not self._takes_part:
                self._client.join()
                self._takes_part = True
            self.barrier()  # all ranks then start the epoch in the same iteration
        try:
            with super().epoch(num_batches):
                yield
        finally:
            self._retire()

    def _ran_out(self) -> None:
        self._retire()
        super()._ran_out()

    def _retire(self) -> None:
        if self._client is not None and self._takes_part:
            self._takes_part = False
            self._client.retire()

    def _leave(self) -> None:
        atexit.unregister(self._leave)
        client, self._client = self._client, None
        if client is not None:
            client.close()

    @override
    def close(self) -> None:
        try:
            super().close()
        finally:
            self._leave()
