"""The strategy ``all-reduce`` with a coordinator, in ``paceline run --min-ranks N`` or ``paceline coordinator``."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, ClassVar

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from paceline.errors import UsageError
from paceline.torch.embeddings import RowTables
from paceline.torch.strategies.all_reduce import AllReduce
from paceline.torch.strategies.deferred import is_stand_in
from paceline.torch.strategies.elastic.base import ElasticStrategy
from paceline.torch.strategies.elastic.gradients import ElasticGradients
from paceline.torch.strategies.ranks import DEFAULT_TIMEOUT, Ranks, be_alone
from paceline.torch.strategies.reached import Reached
from paceline.torch.strategies.replicas.replica import Replica

_UNSUPPORTED = ("join", "compression", "filters", "sync_batch_norm", "find_unused_parameters", "static_graph")


class ElasticAllReduce(ElasticStrategy, AllReduce):
    """All-reduce over ranks that may die, and join, during the training.

    If a rank dies, the other ranks average their gradients again without it. The mean is over the samples of all
    current ranks. A new rank first computes one batch of each earlier epoch alone. Then it receives the other ranks'
    parameters, buffers, optimizers, schedulers and position in the data, and takes part from the next step on. Other
    variables of its loop have their initial values.

    `global_batch` is the number of samples in a step on all ranks together (default: ``--global-batch``, or one batch
    of each rank). The ranks divide these samples. If a rank's part is larger than its batch size, it accumulates
    gradients over several batches. Until the step is complete, gradients are zero after ``backward()``, and the steps
    of optimizers and schedulers have no effect. If a rank dies, the other ranks compute its samples in the
    same step. With `balance`, or ``paceline run --balance``, the parts are in proportion to the ranks' speeds.

    Other options: those of :class:`~paceline.torch.strategies.all_reduce.AllReduce`, except `join`, `compression`,
    `filters`, `sync_batch_norm`, `find_unused_parameters` and `static_graph`.
    """

    takes_global_batch: ClassVar[bool] = True

    def __init__(self, *, global_batch: int | None = None, balance: bool = False, **options: Any) -> None:
        for name in _UNSUPPORTED:
            if options.get(name):
                raise UsageError(f"{name}={options[name]!r}: not supported with --min-ranks. Leave it out")
        if global_batch is not None and global_batch < 1:
            raise UsageError(f"global_batch={global_batch}: expected 1 or more")
        self._find_place(options.get("timeout", DEFAULT_TIMEOUT), global_batch)
        self._has_balance = balance or self._place.options.balance
        if self._has_balance and self._steps.global_batch is None:
            raise UsageError("balance=True: needs a global batch. Pass global_batch=N too")
        super().__init__(**options)
        self._wraps = True
        self._enter()

    @override
    def _meet(self, timeout: timedelta, backend: str) -> Ranks:
        ranks = self._connect(timeout, self._steps.global_batch if self._has_balance else None)
        if not dist.is_initialized():
            be_alone(backend, timeout)
        return ranks

    @property
    def is_step_complete(self) -> bool:
        """Whether the last ``backward()`` completed a step; False if the global batch needs more batches."""
        return self._steps.is_complete

    @override
    def prepare(self, *given: Any, **named: Any) -> Any:
        num_schedulers = len(self.schedulers)
        prepared = super().prepare(*given, **named)
        for scheduler in self.schedulers[num_schedulers:]:
            self._delay_steps(scheduler)
        return prepared

    @override
    def _spread(self, models: list[nn.Module], optimizers: list[Optimizer]) -> tuple[list[nn.Module], list[Optimizer]]:
        for model in models:
            tensors = (*model.parameters(), *model.buffers())
            self._ranks.broadcast(tensor for tensor in tensors if tensor.numel() and not is_stand_in(tensor))
        for optimizer in optimizers:
            self._delay_steps(optimizer)
        return super()._spread(models, optimizers)

    def _delay_steps(self, stepper: Any) -> None:
        """Replace ``step()`` of an optimizer or scheduler: it does nothing until the global batch is complete."""
        if self._steps.global_batch is None:
            return
        original = stepper.step

        @functools.wraps(original)
        def step(_: Any, *values: Any, **options: Any) -> Any:
            if isinstance(stepper, Optimizer) and (values or options.get("closure")):
                raise UsageError("--global-batch: step(closure) is not supported. Call backward() before step()")
            return original(*values, **options) if self._steps.is_complete else None

        if isinstance(stepper, Optimizer):
            stepper.step = types.MethodType(step, stepper)  # type: ignore[method-assign]  # torch reads its function
        else:  # a scheduler's state_dict() would contain an attribute
            stepper.__class__ = type(type(stepper).__name__, (type(stepper),), {"step": step})

    @contextlib.contextmanager
    @override
    def no_sync(self) -> Iterator[None]:
        if self._steps.global_batch is not None:
            raise UsageError("--global-batch accumulates gradients itself. Leave no_sync() and accumulate() out")
        with super().no_sync():
            yield

    @override
    def _wrap(self, model: nn.Module, reached: Reached | None) -> Replica:
        replica = super()._wrap(model, reached)
        gradients = ElasticGradients(self._elastic, model, self._steps)
        if self._steps.global_batch is not None:
            if self._replicas:
                raise UsageError("--global-batch: several models are not supported. Make them parts of one model")
            assert reached is not None
            reached.average_later = gradients.reject_backward
        replica.register_comm_hook(None, gradients.hook)
        return replica

    @override
    def _row_tables(self) -> RowTables:
        raise UsageError(
            "--min-ranks with strategy all-reduce: not supported with Paceline's embeddings. Choose --strategy hybrid"
        )
