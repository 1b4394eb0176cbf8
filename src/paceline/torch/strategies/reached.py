"""Record parameters with new gradients since the last step, and average gradients that torch does not average.

DistributedDataParallel averages gradients only in the first backward after a forward, and silently ignores others. This
module averages or rejects the gradients of later backwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from paceline.collectives import Group
from paceline.errors import UsageError
from paceline.torch.strategies.base import warn
from paceline.torch.strategies.step_phases import begin_exchange

_AT_ONCE = 1 << 20  # maximum number of elements in one all-reduce, unless a parameter is larger
_NUM_CHECKED = 256  # elements of each gradient that are checked for NaN, which usually spreads to all elements


class Reached:
    """Records on one rank which parameters of a DistributedDataParallel model have new gradients."""

    def __init__(self, rank: int, group: Group, model: nn.Module) -> None:
        self.model = model
        self.prepared = {name: parameter for name, parameter in model.named_parameters() if parameter.numel()}
        self._rank = rank
        self._parameters: list[nn.Parameter] = []
        self._hooks: list[Any] = []
        self._since_step: set[nn.Parameter] = set()
        self._sums: dict[nn.Parameter, Tensor] = {}  # sums of the first elements of this rank's own gradients
        self._has_warned = False
        self._is_averaged = False  # whether DistributedDataParallel averages in the next backward
        self._is_held = False
        self._backward = -1  # torch's number of the last backward
        self.average_later: Callable[[list[nn.Parameter]], None] = lambda parameters: average_gradients(
            group, parameters
        )
        """Averages the gradients of later backwards."""

    def watch(self, parameters: list[nn.Parameter]) -> None:
        self.close()
        self._parameters = parameters
        for parameter in parameters:
            self._hooks.append(parameter.register_post_accumulate_grad_hook(self._reach))  # type: ignore[no-untyped-call]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def forward(self, *, syncs: bool) -> None:
        """Record the start of a forward. With `syncs`, its backward averages gradients. Else it only adds to them."""
        self._is_averaged, self._is_held = syncs, not syncs
        self._sums.clear()

    def has_reached(self, parameter: nn.Parameter) -> bool:
        return parameter in self._since_step

    def check(self, parameters: set[nn.Parameter]) -> None:
        """Raise UsageError if `parameters` have gradients that no backward has computed."""
        own = parameters.intersection(self._parameters)
        if not self._since_step and any(parameter.grad is not None for parameter in own):
            raise UsageError(
                f"rank {self._rank}: step() got gradients that backward() has not computed, so they differ between "
                "ranks: call backward() on the loss instead of setting gradients"
            )

    def warn_of_non_finite(self) -> None:
        """Warn once if this rank has contributed a gradient with NaN or infinity to the step."""
        if not self._sums or self._has_warned or math.isfinite(sum(map(Tensor.item, self._sums.values()))):
            return
        self._has_warned = True
        found, value = next(
            (parameter, value.item()) for parameter, value in self._sums.items() if not value.isfinite()
        )
        if not found.detach().isfinite().all():
            return  # an earlier step, perhaps by another rank's gradient, made it non-finite
        name = next(name for name, parameter in self.prepared.items() if parameter is found)
        warn(
            f"rank {self._rank}: the gradient of {name!r} contains {value}, and so does the mean over the ranks in "
            "every step: look for a diverging loss or for such values in this rank's batch (reported once)"
        )

    def stepped(self, parameters: set[nn.Parameter]) -> None:
        self._since_step -= parameters

    def _reach(self, parameter: nn.Parameter) -> None:
        self._since_step.add(parameter)
        grad = parameter.grad
        if torch.is_grad_enabled():
            raise UsageError(
                f"rank {self._rank}: backward(create_graph=True) creates gradients with a graph, which cannot be "
                "averaged over the ranks: compute them by torch.autograd.grad(loss, parameters, create_graph=True), "
                "and call backward() once, on the complete loss"
            )
        if not self._has_warned and grad is not None:
            self._record_sum(parameter, grad)
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:
            self._backward = backward
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)

    def _record_sum(self, parameter: nn.Parameter, grad: Tensor) -> None:
        if grad.is_cpu and grad.is_floating_point() and grad.layout is torch.strided:
            self._sums[parameter] = (grad if grad.numel() <= _NUM_CHECKED else grad.reshape(-1)[:_NUM_CHECKED]).sum()

    def _backward_ended(self) -> None:
        # torch calls this function before DistributedDataParallel's, which waits for the averages.
        begin_exchange(is_for_all=self._is_averaged)
        if not self._is_averaged and not self._is_held:
            self.average_later(self._parameters)
        self._is_averaged = False


def refuse_steps_in_backward(rank: int, model: nn.Module, before: Any = None) -> Any:
    """Make optimizers of `model` reject steps within backward. Replace the hook `before`; return the new hook."""
    if before is not None:
        before.remove()
    own = {id(parameter) for parameter in model.parameters()}

    def check(optimizer: Optimizer, *_: Any) -> None:
        if torch._C._current_graph_task_id() != -1 and any(
            id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]
        ):
            raise UsageError(
                f"rank {rank}: an optimizer's step() was called in a hook of backward(), before gradients are averaged "
                "over the ranks: call step() after backward(), or choose the strategy sharded or mirrored"
            )

    return register_optimizer_step_pre_hook(check)


@torch.no_grad()
def average_gradients(group: Group, parameters: list[nn.Parameter]) -> None:
    """Average gradients over all ranks. If only some ranks have a gradient, it counts as zero on the others."""
    flags = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.int32)
    is_present = group.all_reduce(flags, "max").tolist()
    average_present(group, [parameter for parameter, has in zip(parameters, is_present, strict=True) if has])


def average_present(
    group: Group,
    parameters: Sequence[nn.Parameter],
    gradient_of: Callable[[nn.Parameter], Tensor | None] = lambda parameter: parameter.grad,
    set_gradient: Callable[[nn.Parameter, Tensor], None] = lambda parameter, grad: setattr(parameter, "grad", grad),
) -> None:
    """Average the gradients of all `parameters` over all ranks. A missing gradient counts as zero."""
    chunk: list[nn.Parameter] = []
    for parameter in parameters:
        if chunk and sum(member.numel() for member in chunk) + parameter.numel() > _AT_ONCE:
            _average(group, chunk, gradient_of, set_gradient)
            chunk = []
        chunk.append(parameter)
    if chunk:
        _average(group, chunk, gradient_of, set_gradient)


@torch.no_grad()
def _average(
    group: Group,
    parameters: Sequence[nn.Parameter],
    gradient_of: Callable[[nn.Parameter], Tensor | None],
    set_gradient: Callable[[nn.Parameter, Tensor], None],
) -> None:
    sizes = [parameter.numel() for parameter in parameters]
    flat = torch.zeros(sum(sizes), dtype=torch.float32)
    parts = torch.split(flat, sizes)
    for parameter, part in zip(parameters, parts, strict=True):
        grad = gradient_of(parameter)
        if grad is not None:
            dense = grad.detach() if grad.layout is torch.strided else grad.detach().to_dense()
            part.copy_(dense.reshape(-1))
    group.all_reduce(flat, "mean", out=flat)
    for parameter, part in zip(parameters, parts, strict=True):
        grad = gradient_of(parameter)
        if grad is not None and grad.layout is torch.strided:
            grad.copy_(part.view(grad.shape))
        else:
            set_gradient(parameter, part.view(parameter.shape).to(parameter, copy=True))


def mean_of_closure(group: Group, closure: Callable[[], Any]) -> Callable[[], Any]:
    """Return a closure that computes the mean loss over all ranks, so that all ranks' optimizers see the same loss."""

    def compute() -> Any:
        loss = closure()
        if loss is None:
            return None
        wide = torch.as_tensor(loss).detach().to("cpu", torch.float64, copy=True)
        mean = group.all_reduce(wide, "mean")
        return mean.to(loss.device, loss.dtype) if isinstance(loss, Tensor) else type(loss)(mean.item())

    return compute
