"""Make gradient messages smaller, by filters or PyTorch's compression, in hooks of DistributedDataParallel.

With filters, the exchange of a bucket (a group of gradients) overlaps with the computation and the exchange of later
buckets. DistributedDataParallel calls the hook in the order of the buckets, so all ranks use one order of exchanges.
"""

# No `from __future__ import annotations`: PyTorch compares the annotations of a hook with types, not with text.
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from paceline.environment import environment, naming
from paceline.errors import UsageError
from paceline.filters import Filter, FilterChain, parse_filters
from paceline.filters.base import Bytes
from paceline.filters.chain import chain_of
from paceline.filters.gradients import Averaging, GradientMean, RankExchange, gradient_filters
from paceline.filters.modules import import_filter_modules, modules_named_in
from paceline.tables.types import Floats
from paceline.torch.embeddings.tables import RowFilters

Hook = Callable[[Any, GradBucket], Future[Tensor]]


def filter_hook(filters: Sequence[Filter] | str) -> Hook:
    """Return a hook for ``DistributedDataParallel.register_comm_hook(group, hook)``. A group of None means all ranks.

    `filters` has at most one of :class:`~paceline.filters.TopK` and :class:`~paceline.filters.RandomK`, which select
    values of a gradient, and at most one of :class:`~paceline.filters.Float16`, :class:`~paceline.filters.BFloat16` and
    :class:`~paceline.filters.Quantize`. It may be a text such as ``top-k:0.01,quantize:8``. The part of a gradient that
    the filters remove is added to the next gradient (error feedback). This part is lost when the process ends. Use one
    hook per model. Gradients that are not float32 are converted. Gradients on CUDA devices are copied to the host.

    Raises UsageError for filters that do not apply to gradients.
    """
    gradients = _FilteredGradients(gradient_filters(filters))

    def average(state: Any, bucket: GradBucket) -> Future[Tensor]:
        return gradients.start(dist.group.WORLD if state is None else state, bucket)

    return average


def launcher_filters() -> tuple[str, str | None]:
    """Return ``--filters`` ("" for none) and ``--pull-filters`` of ``paceline run``. Import the filters' modules."""
    pushed, pulled = environment().filters or "", environment().pull_filters
    chains = []
    for name, text in (("PACELINE_FILTERS", pushed), ("PACELINE_PULL_FILTERS", pulled or "")):
        with naming(name):
            import_filter_modules(modules_named_in(text))
            chains.append(parse_filters(text))
    return pushed if chains[0] else "", pulled


def row_filters(filters: Sequence[Filter] | str | None, pull_filters: Sequence[Filter] | str | None) -> RowFilters:
    """Return the filters for embeddings' rows on servers. For None, use the filters of ``paceline run``."""
    if filters is None:
        filters, launcher_pull_filters = launcher_filters()
        pull_filters = launcher_pull_filters if pull_filters is None else pull_filters
    pulled = None if pull_filters is None else chain_of(pull_filters).filters
    return RowFilters(chain_of(filters).filters, pulled)


class _Step:
    """The exchange of one bucket in one backward pass."""

    def __init__(self, group: Any, buffer: Tensor, averaging: Averaging) -> None:
        self._group, self._buffer, self._averaging = group, buffer, averaging
        self.future: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else [])
        self._received = torch.empty(0)
        self._work: Any = None
        self._continue(None)

    def advance(self) -> bool:
        """Finish the current message and start the next one; return whether no message is left."""
        if self._work is None:
            return True
        self._work.wait()
        self._continue(self._received.cpu().numpy())
        return self._work is None

    def _continue(self, received: Bytes | None) -> None:
        try:
            exchange = self._averaging.send(received) if received is not None else next(self._averaging)
        except StopIteration as ended:
            self._work = None
            self._buffer.copy_(torch.from_numpy(ended.value))
            self.future.set_result(self._buffer)
        else:
            self._begin(exchange)

    def _begin(self, exchange: RankExchange) -> None:
        sent = torch.from_numpy(exchange.data).to(self._buffer.device)
        if exchange.is_for_all:
            self._received = sent.new_empty((dist.get_world_size(self._group), len(sent)))
            self._work = dist.all_gather(list(self._received), sent, group=self._group, async_op=True)
        else:
            self._received = torch.empty_like(sent)
            self._work = dist.all_to_all_single(self._received, sent, group=self._group, async_op=True)


class _FilteredGradients:
    """Averages the buckets of one model, and stores the error feedback of each parameter's gradients."""

    def __init__(self, chain: FilterChain) -> None:
        self._chain = chain
        self._means: dict[tuple[int, ...], GradientMean] = {}  # by the ids of a bucket's parameters
        self._feedback: dict[int, Floats] = {}  # by the parameter's id
        self._in_flight: deque[_Step] = deque()

    def start(self, group: Any, bucket: GradBucket) -> Future[Tensor]:
        """Start averaging a bucket, and continue with earlier buckets. At the last bucket, finish all buckets."""
        if bucket.index() == 0:
            self._in_flight.clear()  # drop exchanges of an interrupted backward pass
        buffer = bucket.buffer()
        grads: Floats = buffer.detach().to("cpu", torch.float32).numpy()
        step = _Step(group, buffer, self._mean_of(group, bucket).average(grads))
        before = list(self._in_flight)
        self._in_flight.append(step)
        self._advance(before)
        while bucket.is_last() and self._in_flight:
            self._advance(list(self._in_flight))
        return step.future

    def _advance(self, steps: list[_Step]) -> None:
        for step in steps:
            if step.advance():
                self._in_flight.remove(step)

    def _mean_of(self, group: Any, bucket: GradBucket) -> GradientMean:
        """Return the object that averages a bucket.

        If torch moves parameters to other buckets, their error feedback is kept.
        """
        parameters = bucket.parameters()
        key = tuple(map(id, parameters))
        found = self._means.get(key)
        if found is None:
            for known in [known for known in self._means if set(known) & set(key)]:
                self._means.pop(known).fold_into_residual()
            parts = [
                self._feedback.get(id(parameter), np.zeros(parameter.numel(), np.float32)) for parameter in parameters
            ]
            joined = np.concatenate(parts)
            ends = np.cumsum([len(part) for part in parts])
            # GradientMean updates `joined` in place, so these views of `joined` contain the updates.
            self._feedback.update(zip(key, np.split(joined, ends[:-1]), strict=True))
            found = self._means[key] = GradientMean(
                self._chain, dist.get_rank(group), dist.get_world_size(group), joined, number=bucket.index()
            )
        return found


_POWER_SGD_STARTS = 10


def check_compression(compression: str | None) -> None:
    """Raise UsageError unless `compression` is None, ``fp16``, ``bf16``, ``powersgd`` or ``powersgd:R``."""
    if compression is None or compression in ("fp16", "bf16"):
        return
    name, _, rank = compression.partition(":") if isinstance(compression, str) else ("", "", "")
    if name == "powersgd" and compression != "powersgd:" and (not rank or (rank.isdecimal() and int(rank) > 0)):
        return
    raise UsageError(
        f"compression={compression!r}: expected None, 'fp16', 'bf16', 'powersgd', or 'powersgd:R' for rank R from 1 up"
    )


def compress(model: DistributedDataParallel, compression: str) -> None:
    """Compress the gradients that a model sends.

    ``fp16`` and ``bf16`` convert gradients to 16 bits. ``powersgd:R`` sends a matrix as two factors of R (default 1)
    columns, with error feedback (Vogels et al., NeurIPS 2019). It starts after 10 iterations, because gradients change
    fastest in the first iterations.
    """
    group = model.process_group
    if compression == "fp16":
        model.register_comm_hook(group, default_hooks.fp16_compress_hook)
    elif compression == "bf16":
        model.register_comm_hook(group, _cast_to_bf16)
    else:
        rank = int(compression.partition(":")[2] or 1)
        state = powerSGD_hook.PowerSGDState(
            group, matrix_approximation_rank=rank, start_powerSGD_iter=_POWER_SGD_STARTS
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


# This function wraps PyTorch's hook, because PyTorch accepts its own hook only with NCCL.
def _cast_to_bf16(state: Any, bucket: GradBucket) -> Future[Tensor]:
    group: dist.ProcessGroup = state
    return default_hooks.bf16_compress_hook(group, bucket)
