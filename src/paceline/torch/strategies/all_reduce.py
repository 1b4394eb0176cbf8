"""One process per device: all-reduce averages the gradients, and every rank updates its copy of the model."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from paceline.collectives import Group
from paceline.environment import Timeout, environment, naming, timedelta_of
from paceline.errors import UsageError
from paceline.filters import Filter
from paceline.filters.gradients import gradient_filters
from paceline.torch.gradient_filters import check_compression, compress, filter_hook, launcher_filters
from paceline.torch.strategies.base import Strategy, as_one, named_parameters
from paceline.torch.strategies.deferred import is_stand_in
from paceline.torch.strategies.devices import choose_device
from paceline.torch.strategies.ranks import DEFAULT_TIMEOUT, Ranks, check_not_elastic
from paceline.torch.strategies.reached import Reached, refuse_steps_in_backward
from paceline.torch.strategies.replicas.replica import Replica, check_steps
from paceline.torch.strategies.replicas.sync_batch_norm import with_sync_batch_norm

BACKENDS = ("paceline", "gloo", "nccl")


class AllReduce(Strategy):
    """Data parallelism over PyTorch's DistributedDataParallel (Li et al., "PyTorch Distributed", VLDB 2020).

    The result equals that of one process on the concatenated batch, if the loss is a mean and the ranks' batches have
    the same size.

    - `backend`: ``paceline`` (NCCL for CUDA tensors), ``gloo`` or ``nccl``. If the program has already initialized
      ``torch.distributed``, that backend is used.
    - `join`: allow ranks to have different numbers of batches. A rank without data contributes zero gradients (the mean
      is still over all ranks). At the end of the epoch all ranks get the values and the optimizer state of the rank
      with the most batches. Schedulers that step once per batch have made fewer steps on ranks with fewer batches.
    - `compression`: compress gradients by ``fp16``, ``bf16`` or ``powersgd:R``.
    - `filters`: compress gradients by filters instead (:func:`paceline.torch.filter_hook`); default:
      ``paceline run --filters``.
    - `sync_batch_norm`: normalize BatchNorm layers over all ranks.
    - `find_unused_parameters` and `static_graph` are options of DistributedDataParallel. The first allows parameters
      without effect on the loss. The second states that every step uses the same parameters.
    - `bucket_mb`: mebibytes of gradients per message.
    - `timeout`: time to wait for a rank.

    Raises UsageError for an invalid option, and for options that exclude each other.
    """

    name: ClassVar[str] = "all-reduce"

    def __init__(
        self,
        *,
        backend: str | None = None,
        device: torch.device | str | None = None,
        seed: int = 0,
        join: bool = False,
        compression: str | None = None,
        filters: Sequence[Filter] | str | None = None,
        sync_batch_norm: bool = False,
        find_unused_parameters: bool = False,
        bucket_mb: float = 25,
        static_graph: bool = False,
        timeout: Timeout = DEFAULT_TIMEOUT,
    ) -> None:
        check_compression(compression)
        source = "PACELINE_FILTERS" if filters is None else None
        if filters is None:
            filters, _ = launcher_filters()
        if filters:
            with naming(source):
                gradient_filters(filters)
            if compression is not None:
                raise UsageError(f"compression={compression!r} and filters={filters!r}: pass only one")
        if backend is not None and backend not in BACKENDS:
            raise UsageError(f"backend={backend!r}: expected one of {', '.join(BACKENDS)}")
        if bucket_mb <= 0:
            raise UsageError(f"bucket_mb={bucket_mb}: expected more than 0")
        if join and sync_batch_norm:
            raise UsageError(
                "join=True and sync_batch_norm=True: a rank without data has no batch to normalize with; choose "
                "one option"
            )
        chosen = choose_device(device, environment().local_rank or 0)
        if backend == "nccl" and chosen.type != "cuda":
            raise UsageError(f"backend='nccl' needs a CUDA device, but this rank has {chosen}: leave backend out")
        if chosen.type == "cuda":
            torch.cuda.set_device(chosen)
        super().__init__(self._meet(timedelta_of(timeout), backend or "paceline"), device=chosen, seed=seed)
        self.takes_uneven = join
        self._compression = compression
        self._filters = filters
        self._sync_batch_norm = sync_batch_norm
        self._find_unused_parameters = find_unused_parameters
        self._static_graph = static_graph
        self._bucket_mb = bucket_mb
        self._wraps = backend is not None or self.world_size > 1  # a single rank has no gradients to average
        self._replicas: list[Replica] = []
        self._reached: list[Reached] = []

    def _meet(self, timeout: timedelta, backend: str) -> Ranks:
        """Connect the ranks of the training, initialize ``torch.distributed``, and return the ranks."""
        check_not_elastic(self)
        return Ranks.meet(timeout, backend=backend)

    def _spread(self, models: list[nn.Module], optimizers: list[Optimizer]) -> tuple[list[nn.Module], list[Optimizer]]:
        if self.embedder is not None:
            if self.takes_uneven:
                raise UsageError(
                    "join=True is not supported with embeddings: give all ranks the same number of batches"
                )
            self.embedder.step_with(optimizers)
        if not self._wraps:
            return models, optimizers
        if self._sync_batch_norm and self.world_size > 1:
            synced = [with_sync_batch_norm(model) for model in models]
            self.module = as_one([*self.models[: len(self.models) - len(models)], *synced])
            models = synced
        spread = [self._spread_model(model) for model in models]
        assert self.module is not None
        if self._ranks.group is not None:
            self._step_guard = refuse_steps_in_backward(self.rank, self.module, self._step_guard)
            may_be_unused = self._find_unused_parameters or self._static_graph
            for optimizer in optimizers:
                check_steps(optimizer, self.optimizers, self._reached, self._ranks, may_be_unused=may_be_unused)
        return spread, optimizers

    def _spread_model(self, model: nn.Module) -> nn.Module:
        if not any(named_parameters(model)):
            broadcast_values(model)
            return model
        reached = None
        if self._ranks.group is not None:
            reached = Reached(self.rank, self._ranks.group, model)
            self._reached.append(reached)
        replica = self._wrap(model, reached)
        self._replicas.append(replica)
        return replica

    def _wrap(self, model: nn.Module, reached: Reached | None) -> Replica:
        anchors = [name for name, parameter in model.named_parameters() if not parameter.numel()]
        if anchors:
            Replica._set_params_and_buffers_to_ignore_for_model(model, anchors)  # type: ignore[no-untyped-call]
        replica = Replica(
            model,
            reached=reached,
            bucket_cap_mb=self._bucket_mb,
            find_unused_parameters=self._find_unused_parameters,
            static_graph=self._static_graph,
            gradient_as_bucket_view=True,
        )
        if self._compression is not None:
            compress(replica, self._compression)
        elif self._filters:
            replica.register_comm_hook(replica.process_group, filter_hook(self._filters))
        return replica

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context in which ``backward()`` only adds to this rank's gradients.

        Run the forward in this context too.
        """
        with contextlib.ExitStack() as contexts:
            for replica in self._replicas:
                contexts.enter_context(replica.no_sync())
            yield

    @contextlib.contextmanager
    def epoch(self, num_batches: int | None) -> Iterator[None]:
        """Return a context for one epoch of the training loader.

        With ``join``, it ends when all ranks have no batches.
        """
        if not self.takes_uneven or not self._replicas:
            yield
            return
        if len(self._replicas) > 1:
            raise UsageError(
                "join=True is not supported with several models: give all ranks the same number of batches"
            )
        num_steps = 0

        def count(*_: Any) -> None:
            nonlocal num_steps
            num_steps += 1

        hook = None if self.optimizer is None else self.optimizer.register_step_post_hook(count)
        waiting: AbstractContextManager[None] = self._replicas[0].join()
        try:
            yield
            with warnings.catch_warnings():  # undo torch's changes of the process's warning filters
                waiting.__exit__(None, None, None)
        finally:
            if hook is not None:
                hook.remove()
        self._share_optimizer_state(num_steps)

    def _share_optimizer_state(self, num_steps: int) -> None:
        """Give all ranks the optimizer state of the first rank with the most steps."""
        counts = self._ranks.exchange(num_steps)
        group = self._ranks.group
        if len(set(counts)) == 1 or group is None:
            return
        source = counts.index(max(counts))
        shared = share_optimizer_state(group, self.gather_optimizer_state(), source)
        if self.rank != source:
            self._scatter_optimizer_state(shared)

    def close(self) -> None:
        """Disconnect from the other ranks. Idempotent."""
        self._replicas = []
        super().close()


def broadcast_values(model: nn.Module) -> None:
    """Copy rank 0's parameters and buffers to every rank, except placeholders of models from the meta device."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.numel() and not is_stand_in(tensor):
            dist.broadcast(tensor.detach(), 0)


def share_optimizer_state(group: Group, state: dict[int, dict[str, Any]], source: int) -> dict[int, dict[str, Any]]:
    """Return the optimizer state of the rank `source`, in the form of :meth:`Strategy.gather_optimizer_state`."""
    described: list[list[Any]] = [
        [number, key, describe_entry(value)] for number, entry in state.items() for key, value in entry.items()
    ]
    described = group.broadcast_object(described if group.rank == source else None, root=source)
    shared: dict[int, dict[str, Any]] = {}
    for number, key, (kind, value) in described:
        if kind != "value":
            tensor = torch.empty(value, dtype=getattr(torch, kind))
            if group.rank == source:
                tensor.copy_(state[number][key])
            value = group.broadcast(tensor, root=source)
        shared.setdefault(number, {})[key] = value
    return shared


def describe_entry(value: Any) -> tuple[str, Any]:
    """Return dtype and shape of a tensor in an optimizer's state; ``"value"`` and the value for other entries."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype).removeprefix("torch."), list(value.shape)
    return "value", value
