"""Embeddings on servers, asynchronously; all other parameters by all-reduce."""

from __future__ import annotations

import atexit
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from paceline.filters import Filter
from paceline.filters.gradients import are_for_gradients
from paceline.protocol import Consistency
from paceline.ps import Client
from paceline.torch.embeddings import ClusterTables, RowTables
from paceline.torch.gradient_filters import row_filters
from paceline.torch.strategies.all_reduce import AllReduce
from paceline.torch.strategies.base import warn
from paceline.torch.strategies.ranks import DEFAULT_TIMEOUT
from paceline.torch.strategies.server.cluster import check_cluster, check_is_first, connect_workers


class Hybrid(AllReduce):
    """One process per device: the rows of embeddings live on servers, the dense part is averaged by all-reduce.

    The default for models with Paceline's embeddings. An ``optimizer.step()`` sends the gradients of this rank's rows
    and ends its iteration; the rows of the next batch are asked for while this one is computed. What servers do with
    the gradients is up to the cluster's consistency: under ``bounded:4``, which ``paceline run`` takes by default, each
    rank's are applied when they arrive; under ``sequential`` they are averaged and applied once, as everywhere else.

    Options are those of :class:`~paceline.torch.strategies.all_reduce.AllReduce`, and `consistency`, `replicas` and
    `min_replicas` as `ParameterServer` has them. `filters` (a list or a text as ``key-caching,quantize:8``; default:
    those of ``paceline run --filters``) are for what processes exchange: rows of embeddings all of them,
    unless an embedding has its own, and gradients that are averaged those that are for them. Rows that are pulled come
    behind `pull_filters` (default: `filters`, as far as they are for values and bytes).

    A model without embeddings is trained as under all-reduce, and standard error says so.

    Raises UsageError where there are no servers: start the program with ``paceline run --strategy hybrid``.

    Source: Jiang et al., "A Unified Architecture for Accelerating Distributed DNN Training in Heterogeneous GPU/CPU
    Clusters", OSDI'20, for why both; Lian et al., "Persia", KDD'22, for asynchronous embeddings beside a synchronous
    dense part.
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
        averaged = [each for each in self._row_filters.filters if are_for_gradients(each)]
        super().__init__(device=device, seed=seed, filters=averaged, **options)
        self._client: Client | None = None
        try:
            self._client = connect_workers(self.name, self.rank, options.get("timeout", DEFAULT_TIMEOUT))
            check_cluster(self._client, self.name, consistency, replicas, min_replicas)
        except BaseException:
            self.close()
            raise
        self._takes_part = True
        atexit.register(self._leave)

    def _spread(self, models: list[nn.Module], optimizers: list[Optimizer]) -> tuple[list[nn.Module], list[Optimizer]]:
        embedder, self.embedder = self.embedder, None  # all-reduce is for the others
        if embedder is None and self.is_main:
            warn("strategy hybrid: this model has no embeddings of paceline.torch, the servers have nothing to do")
        spread = super()._spread(models, optimizers)
        if embedder is not None:
            embedder.step_with(optimizers, self._tick)
            self.embedder = embedder
        return spread

    def _row_tables(self) -> RowTables:
        assert self._client is not None, "prepare() comes before close()"
        return ClusterTables(self._client, self._row_filters)

    def _tick(self) -> None:
        if self._client is not None and self._takes_part:
            self._client.tick()

    @contextmanager
    @override
    def epoch(self, num_batches: int | None) -> Iterator[None]:
        """A rank takes part in the servers' iterations while it has batches.

        So nobody waits for one that has run out, evaluates or writes a checkpoint.
        """
        if self._client is not None:
            if not self._takes_part:
                self._client.join()
                self._takes_part = True
            self.barrier()  # the first iteration of the epoch is the same one for all
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
