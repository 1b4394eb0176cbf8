"""Filters as a communication hook of DistributedDataParallel: gradients are averaged in fewer bytes.

Exchanges of one bucket overlap with those of the next and with the rest of backward; all ranks make them in the same
order, since none is started but by the hook.
"""

# Annotations are not postponed here, for PyTorch compares those of a hook.
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from paceline.environment import environment
from paceline.filters import Filter, FilterChain, parse_filters
from paceline.filters.base import Bytes
from paceline.filters.chain import chain_of
from paceline.filters.gradients import Averaging, GradientMean, RankExchange, gradient_filters
from paceline.filters.modules import import_filter_modules, modules_named_in
from paceline.tables.types import Floats
from paceline.torch.embeddings.tables import RowFilters

Hook = Callable[[Any, GradBucket], Future[Tensor]]


def filter_hook(filters: Sequence[Filter] | str) -> Hook:
    """Return a hook for ``DistributedDataParallel.register_comm_hook(group, hook)``; group None: all ranks.

    `filters`: one of :class:`~paceline.filters.TopK` and :class:`~paceline.filters.RandomK`, which choose single values
    here, and one of :class:`~paceline.filters.Float16`, :class:`~paceline.filters.BFloat16` and
    :class:`~paceline.filters.Quantize`, or a text as ``top-k:0.01,quantize:8``. What they take of a gradient is kept
    and added to the next one (error feedback); it is lost when the process ends. Each model takes a hook of its own.
    Gradients that are not float32 are converted; those of CUDA devices go through the host's memory.

    Raises UsageError for filters that are not for gradients.
    """
    gradients = _FilteredGradients(gradient_filters(filters))

    def average(state: Any, bucket: GradBucket) -> Future[Tensor]:
        return gradients.start(dist.group.WORLD if state is None else state, bucket)

    return average


def told_filters() -> tuple[str, str | None]:
    """Return the filters of ``paceline run --filters`` and ``--pull-filters``, whose modules are imported.

    Empty for none; None for those of pulled values that follow from the others.
    """
    pushed, pulled = environment().filters or "", environment().pull_filters
    import_filter_modules([*modules_named_in(pushed), *modules_named_in(pulled or "")])
    return pushed if parse_filters(pushed) else "", pulled


def row_filters(filters: Sequence[Filter] | str | None, pull_filters: Sequence[Filter] | str | None) -> RowFilters:
    """Return what rows of embeddings on servers go behind; None: what ``paceline run`` was told."""
    if filters is None:
        filters, told = told_filters()
        pull_filters = told if pull_filters is None else pull_filters
    pulled = None if pull_filters is None else chain_of(pull_filters).filters
    return RowFilters(chain_of(filters).filters, pulled)


class _Step:
    """One bucket of one backward pass, on its way."""

    def __init__(self, group: Any, buffer: Tensor, averaging: Averaging) -> None:
        self._group, self._buffer, self._averaging = group, buffer, averaging
        self.future: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else [])
        self._received = torch.empty(0)
        self._work: Any = None
        self._go_on(None)

    def advance(self) -> bool:
        """Wait for what is under way and begin what follows; return whether that is all."""
        if self._work is None:
            return True
        self._work.wait()
        self._go_on(self._received.cpu().numpy())
        return self._work is None

    def _go_on(self, received: Bytes | None) -> None:
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
    """The buckets of one model, and what is kept of each parameter's gradients."""

    def __init__(self, chain: FilterChain) -> None:
        self._chain = chain
        self._means: dict[tuple[int, ...], GradientMean] = {}  # by the parameters in a bucket
        self._rests: dict[int, Floats] = {}  # by parameter
        self._under_way: deque[_Step] = deque()

    def start(self, group: Any, bucket: GradBucket) -> Future[Tensor]:
        """Begin to average a bucket, and go on with those before; end all with the last one."""
        if bucket.index() == 0:
            self._under_way.clear()  # a backward pass before was cut short
        buffer = bucket.buffer()
        grads: Floats = buffer.detach().to("cpu", torch.float32).numpy()
        step = _Step(group, buffer, self._mean_of(group, bucket).average(grads))
        before = list(self._under_way)
        self._under_way.append(step)
        self._advance(before)
        while bucket.is_last() and self._under_way:
            self._advance(list(self._under_way))
        return step.future

    def _advance(self, steps: list[_Step]) -> None:
        for each in steps:
            if each.advance():
                self._under_way.remove(each)

    def _mean_of(self, group: Any, bucket: GradBucket) -> GradientMean:
        """Return what averages a bucket; its parameters may have been in others (buckets are made anew once)."""
        parameters = bucket.parameters()
        key = tuple(map(id, parameters))
        found = self._means.get(key)
        if found is None:
            for known in [known for known in self._means if set(known) & set(key)]:
                self._means.pop(known).fold_into_rest()
            rests = [self._rests.get(id(each), np.zeros(each.numel(), np.float32)) for each in parameters]
            rest = np.concatenate(rests)
            ends = np.cumsum([len(each) for each in rests])
            self._rests.update(zip(key, np.split(rest, ends[:-1]), strict=True))  # views, which change with the whole
            found = self._means[key] = GradientMean(
                self._chain, dist.get_rank(group), dist.get_world_size(group), rest, number=bucket.index()
            )
        return found
