"""Forward and backward passes that raise, and what ``fully_shard`` has to be told before the next one.

It keeps track of where an iteration is. After a pass that did not come to its end it would take up what was left there:
a unit stays gathered, with the values of before the step, or its gradient is not scattered any more.
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
    """Watches the passes through a sharded model, and has it begin anew after one that has raised.

    Every process must have left the pass; what it has left in ``.grad`` stays there.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model: Any = model
        self._is_forward = False
        self._is_backward = False

    @classmethod
    def watch(cls, model: nn.Module) -> Unfinished:
        """Watch a model, to which ``fully_shard`` has been applied."""
        watching = cls(model)
        model.register_forward_pre_hook(watching._begin_forward, prepend=True)
        model.register_forward_hook(watching._end_forward)
        return watching

    def _begin_forward(self, *_: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            return  # a checkpointed forward, repeated within backward
        if self._is_forward or self._is_backward:
            self._begin_anew()
        self._is_forward = True

    def _begin_anew(self) -> None:
        self._model.reset_iter_state()
        units: list[Any] = [each for each in self._model.modules() if isinstance(each, FSDPModule)]
        for unit in units:
            unit.unshard()  # the whole parameters have the gradients that backward has left and not scattered
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
                "strategy sharded: backward or torch.autograd.grad() was called with create_graph=True, and parameters "
                "in shards have no gradients of gradients: leave create_graph out, or take the strategy all-reduce"
            )
        if not self._is_backward:
            self._is_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        self._is_backward = False
