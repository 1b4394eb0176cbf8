"""Convert parameters to shards for ``fully_shard``, and shards back to complete values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from paceline.errors import UsageError
from paceline.torch.strategies.sharded.calls import as_shard

_WITHOUT_SHARDS: Final = tuple(
    getattr(torch.optim, name)
    for name in ("LBFGS", "SparseAdam", "Adafactor", "Muon", "Rprop")
    if hasattr(torch.optim, name)
)
"""Optimizers that need complete parameters, or that use operations without support for shards in PyTorch."""


class ReplacedParameter(nn.Parameter):
    """A parameter that was replaced by a shard. It is empty, and access to its gradient raises UsageError."""

    @property
    def grad(self) -> NoReturn:  # type: ignore[override]
        raise UsageError(
            "this parameter was read before prepare(), which replaced it by a shard: read model.parameters() after "
            "prepare()"
        )


def check_parameters(model: nn.Module) -> None:
    """Raise UsageError for a model that has no parameters, or has parameter hooks, several dtypes or sparse layers."""
    if not any(True for _ in model.parameters()):
        raise UsageError("strategy sharded: the model has no parameters, so there is nothing to shard")
    for name, parameter in model.named_parameters():
        hooks = parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
        if hooks and parameter.numel():
            raise UsageError(
                f"strategy sharded: parameter {name!r} has a hook, which its shard would lose: register it after "
                "prepare(), by register_post_accumulate_grad_hook()"
            )
    trained = [(name, parameter.dtype) for name, parameter in model.named_parameters() if parameter.requires_grad]
    for name, dtype in trained:
        if dtype != trained[0][1]:
            first, kind = trained[0]
            raise UsageError(
                f"strategy sharded: {first!r} is {str(kind)[6:]} and {name!r} {str(dtype)[6:]}: parameters that are "
                "gathered together need one dtype; convert one (model.float())"
            )
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise UsageError(
                f"strategy sharded: {name or 'the model'} has sparse=True, but only dense gradients are sharded: leave "
                "sparse out, or use paceline.torch.Embedding under --strategy hybrid"
            )


def check_optimizers(optimizers: Iterable[Optimizer], models: nn.Module) -> None:
    """Raise UsageError for an optimizer that does not support shards, or has parameters outside the models."""
    own = {id(parameter) for parameter in models.parameters()}
    for optimizer in optimizers:
        _check_optimizer(optimizer, own)


def _check_optimizer(optimizer: Optimizer, own: set[int]) -> None:
    groups = optimizer.param_groups
    if isinstance(optimizer, _WITHOUT_SHARDS):
        raise UsageError(
            f"strategy sharded: {type(optimizer).__name__} does not support shards: use an optimizer that updates each "
            "element by its own gradient, such as SGD, Adam or AdamW"
        )
    if isinstance(optimizer, (torch.optim.SGD, torch.optim.Adagrad)) and any(group.get("fused") for group in groups):
        raise UsageError(
            f"strategy sharded: {type(optimizer).__name__}(fused=True) does not support shards: leave it out"
        )
    if any(id(parameter) not in own for group in groups for parameter in group["params"]):
        raise UsageError(
            "strategy sharded: the optimizer has a parameter that the model does not have, so its gradient would not "
            "be averaged: make it a part of the model"
        )


def replace(optimizer: Optimizer, shards: Mapping[int, nn.Parameter]) -> None:
    """Replace an optimizer's parameters, and their state, by `shards`. The keys are the ids of the parameters."""
    for group in optimizer.param_groups:
        group["params"] = [shards.get(id(parameter), parameter) for parameter in group["params"]]
    for parameter in [parameter for parameter in optimizer.state if id(parameter) in shards]:
        shard = shards[id(parameter)]
        optimizer.state[shard] = {key: as_shard(value, shard) for key, value in optimizer.state.pop(parameter).items()}


def retire(parameters: Iterable[nn.Parameter]) -> None:
    """Free complete parameters that were replaced by shards. Later access to their gradients raises UsageError."""
    for parameter in parameters:
        parameter.grad = None
        parameter.data = torch.empty(0, dtype=parameter.dtype)
        parameter.__class__ = ReplacedParameter


def shard_values(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Convert complete values in `state` to shards (a hook before ``load_state_dict`` of modules with parameters)."""
    for name, parameter in module._parameters.items():
        if parameter is not None and prefix + name in state:
            state[prefix + name] = as_shard(state[prefix + name], parameter)


def shard_state(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Convert complete values in `state` to shards (a hook before an optimizer's ``load_state_dict``)."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    shards = {
        number: {key: as_shard(value, parameters[number]) for key, value in entries.items()}
        for number, entries in state["state"].items()
    }
    return {**state, "state": shards}


def as_complete(value: Any, *, keep: bool) -> Any:
    """If `keep`, return a complete copy of a sharded tensor on the CPU. Every rank must call this function."""
    if not isinstance(value, DTensor):
        return value
    complete: Tensor = value.full_tensor().detach()
    return complete.to("cpu") if keep else None


@torch.no_grad()
def clip_shards(parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float, group: Any) -> Tensor:
    """Clip gradients by their total norm, and return the norm. One all-reduce over `group` adds the shards' norms."""
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    device = grads[0].device if grads else torch.device("cpu")
    is_largest = norm_type == float("inf")
    # sums of norm**norm_type (for an infinite norm: maxima) over the shards, and over the unsharded gradients
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    locals_ = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
    for grad, local in zip(grads, locals_, strict=True):
        if local.numel():
            norm = torch.linalg.vector_norm(local, norm_type, dtype=torch.float32).double()
            total = totals[0 if isinstance(grad, DTensor) else 1]
            total.copy_(torch.maximum(total, norm) if is_largest else total + norm**norm_type)
    op = torch.distributed.ReduceOp.MAX if is_largest else torch.distributed.ReduceOp.SUM
    torch.distributed.all_reduce(totals[:1], op, group=group)
    norm = totals.max() if is_largest else totals.sum() ** (1.0 / norm_type)
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for local in locals_:
        local.mul_(factor.to(local.dtype))
    return norm.to(torch.get_default_dtype())


def without_views(module: nn.Module, inputs: Any, output: Any) -> Any:
    """Copy the views in an output, because an in-place change of a view would remove the hook of ``fully_shard``."""
    return tree_map_only(
        Tensor, lambda tensor: tensor.clone() if tensor._is_view() and tensor.requires_grad else tensor, output
    )


@torch.no_grad()
def share_buffers(module: nn.Module, _: Any) -> None:
    """Copy rank 0's persistent buffers to all ranks before a forward in training, as in DistributedDataParallel."""
    if not (module.training and torch.is_grad_enabled()):
        return
    by_kind: dict[torch.dtype, list[Tensor]] = {}
    for submodule in module.modules():
        for name, buffer in submodule._buffers.items():
            if buffer is not None and buffer.numel() and name not in submodule._non_persistent_buffers_set:
                by_kind.setdefault(buffer.dtype, []).append(buffer)
    for buffers in by_kind.values():
        flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
        torch.distributed.broadcast(flat, 0)
        for buffer, values in zip(buffers, torch.split(flat, [buffer.numel() for buffer in buffers]), strict=True):
            buffer.copy_(values.view(buffer.shape))
