"""Which parameters backward has reached since the last step, and whether their gradients are those of all ranks.

DistributedDataParallel averages in the first backward after a forward, and says nothing about another one, or about
gradients that come in another way. What it leaves out is averaged here, or refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from paceline.collectives import Group
from paceline.errors import UsageError
from paceline.torch.strategies.base import warn

_AT_ONCE = 1 << 20  # elements
_NUM_CHECKED = 256  # elements of each gradient: one that is not finite spreads through the layers


class Reached:
    """Watches the parameters of a model that DistributedDataParallel wraps, in one process of several."""

    def __init__(self, rank: int, group: Group, model: nn.Module) -> None:
        self.model = model
        self.prepared = {name: each for name, each in model.named_parameters() if each.numel()}
        self._rank = rank
        self._group = group
        self._parameters: list[nn.Parameter] = []
        self._hooks: list[Any] = []
        self._since_step: set[nn.Parameter] = set()
        self._sums: dict[nn.Parameter, Tensor] = {}  # of the first elements of this rank's own gradients
        self._has_warned = False
        self._is_averaged = False  # by DistributedDataParallel, in the next backward
        self._is_held = False
        self._backward = -1  # the number that torch gives to the one whose end is awaited

    def watch(self, parameters: list[nn.Parameter]) -> None:
        """Watch `parameters` from now on, and no others."""
        self.close()
        self._parameters = parameters
        for each in parameters:
            self._hooks.append(each.register_post_accumulate_grad_hook(self._reach))  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Watch nothing."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def forward(self, *, syncs: bool) -> None:
        """Know that a forward has begun, whose backward averages gradients, or (in ``no_sync``) holds them."""
        self._is_averaged, self._is_held = syncs, not syncs
        self._sums.clear()

    def has_reached(self, parameter: nn.Parameter) -> bool:
        """Whether backward has left a gradient in a parameter since the last step."""
        return parameter in self._since_step

    def check(self, parameters: set[nn.Parameter]) -> None:
        """Raise UsageError if `parameters` have gradients, and no backward has left any."""
        own = parameters.intersection(self._parameters)
        if not self._since_step and any(each.grad is not None for each in own):
            raise UsageError(
                f"rank {self._rank}: step() takes gradients that backward() has not left, so that they are this rank's "
                "own: call backward() on the loss instead of setting them by hand"
            )

    def warn_of_non_finite(self) -> None:
        """Report once a gradient of this rank that is not finite, and that the optimizer's step takes."""
        if not self._sums or self._has_warned or math.isfinite(sum(map(Tensor.item, self._sums.values()))):
            return
        self._has_warned = True
        found, value = next((each, value.item()) for each, value in self._sums.items() if not value.isfinite())
        if not found.detach().isfinite().all():
            return  # the fault is an earlier one, perhaps of another rank
        name = next(name for name, each in self.prepared.items() if each is found)
        warn(
            f"rank {self._rank}: the gradient of {name!r} contains {value}, and so does the mean over the ranks that "
            "each step takes: look for a diverging loss or for such values in this rank's batch (reported once)"
        )

    def stepped(self, parameters: set[nn.Parameter]) -> None:
        """Know that the optimizer of `parameters` has made its step."""
        self._since_step -= parameters

    def _reach(self, parameter: nn.Parameter) -> None:
        self._since_step.add(parameter)
        grad = parameter.grad
        if torch.is_grad_enabled():
            raise UsageError(
                f"rank {self._rank}: backward(create_graph=True) leaves gradients with a graph, which the ranks cannot "
                "average: compute them by torch.autograd.grad(loss, parameters, create_graph=True), and call "
                "backward() once, on the whole loss"
            )
        if not self._has_warned and grad is not None:
            self._note_sum(parameter, grad)
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:
            self._backward = backward
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)

    def _note_sum(self, parameter: nn.Parameter, grad: Tensor) -> None:
        if grad.is_cpu and grad.is_floating_point() and grad.layout is torch.strided:
            self._sums[parameter] = (grad if grad.numel() <= _NUM_CHECKED else grad.reshape(-1)[:_NUM_CHECKED]).sum()

    def _backward_ended(self) -> None:
        if not self._is_averaged and not self._is_held:
            average_gradients(self._group, self._parameters)
        self._is_averaged = False


def refuse_steps_in_backward(rank: int, model: nn.Module, before: Any = None) -> Any:
    """Have optimizers of the model's parameters raise UsageError for a step within backward; return the hook's handle.

    The gradients are still this rank's own there, and the ranks would move apart. The hook of `before`, for fewer
    models, is removed.
    """
    if before is not None:
        before.remove()
    own = {id(each) for each in model.parameters()}

    def check(optimizer: Optimizer, *_: Any) -> None:
        if torch._C._current_graph_task_id() != -1 and any(
            id(each) in own for group in optimizer.param_groups for each in group["params"]
        ):
            raise UsageError(
                f"rank {rank}: an optimizer's step() was called in a hook of backward(), where gradients are not yet "
                "the mean over the ranks: call step() after backward(), or take the strategy sharded or mirrored"
            )

    return register_optimizer_step_pre_hook(check)


@torch.no_grad()
def average_gradients(group: Group, parameters: list[nn.Parameter]) -> None:
    """Make gradients their mean over all ranks, on each; those that are on some ranks count as zero on the others."""
    flags = torch.tensor([each.grad is not None for each in parameters], dtype=torch.int32)
    are_there = group.all_reduce(flags, "max").tolist()
    chunk: list[nn.Parameter] = []
    for parameter in (each for each, is_there in zip(parameters, are_there, strict=True) if is_there):
        if chunk and sum(each.numel() for each in chunk) + parameter.numel() > _AT_ONCE:
            _average(group, chunk)
            chunk = []
        chunk.append(parameter)
    if chunk:
        _average(group, chunk)


def _average(group: Group, parameters: list[nn.Parameter]) -> None:
    grads = [torch.zeros_like(each) if each.grad is None else each.grad for each in parameters]
    dense = [each if each.layout is torch.strided else each.to_dense() for each in grads]
    flat = torch.cat([each.detach().to("cpu", torch.float32).reshape(-1) for each in dense])
    group.all_reduce(flat, "mean", out=flat)
    parts = torch.split(flat, [each.numel() for each in parameters])
    for parameter, grad, part in zip(parameters, dense, parts, strict=True):
        grad.copy_(part.view(grad.shape))
        parameter.grad = grad


def mean_of_closure(group: Group, closure: Callable[[], Any]) -> Callable[[], Any]:
    """Return a closure that returns the mean loss over all ranks: optimizers that compare losses do so alike."""

    def compute() -> Any:
        loss = closure()
        if loss is None:
            return None
        wide = torch.as_tensor(loss).detach().to("cpu", torch.float64, copy=True)
        mean = group.all_reduce(wide, "mean")
        return mean.to(loss.device, loss.dtype) if isinstance(loss, Tensor) else type(loss)(mean.item())

    return compute
