"""Reset the state of ``fully_shard`` after a forward or backward pass that raised an exception.

Otherwise ``fully_shard`` would continue the unfinished pass. A unit would stay gathered with old values, or the ranks
would not average and divide its gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from paceline.errors import UsageError


class Unfinished:
    """Resets a model's ``fully_shard`` state, but not ``.grad``, before the first forward after a pass that failed.

    The pass must have failed on every process.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model: Any = model
        self._is_forward = False
        self._is_backward = False

    @classmethod
    def watch(cls, model: nn.Module) -> Unfinished:
        watching = cls(model)
        model.register_forward_pre_hook(watching._begin_forward, prepend=True)
        model.register_forward_hook(watching._end_forward)
        return watching

    def _begin_forward(self, *_: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            return  # backward repeats a checkpointed forward: not a new pass
        if self._is_forward or self._is_backward:
            self._reset()
        self._is_forward = True

    def _reset(self) -> None:
        self._model.reset_iter_state()
        units: list[Any] = [module for module in self._model.modules() if isinstance(module, FSDPModule)]
        for unit in units:
            unit.unshard()  # makes gradients of complete parameters accessible
            for parameter in unit.parameters():
                if not isinstance(parameter, DTensor):
                    parameter.grad = None
            unit.reshard()
        self._is_backward = False

    def _end_forward(self, _: nn.Module, inputs: Any, output: Any) -> None:
        self._is_forward = False
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(self._begin_backward)  # type: ignore[no-untyped-call]

    def _begin_backward(self, _: Tensor) -> None:
        if torch.is_grad_enabled():
            raise UsageError(
                "strategy sharded: backward or torch.autograd.grad() was called with create_graph=True, but sharded "
                "parameters have no second derivatives: leave create_graph out, or choose the strategy all-reduce"
            )
        if not self._is_backward:
            self._is_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        self._is_backward = False
