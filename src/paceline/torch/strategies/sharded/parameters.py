"""Parameters as shards: from the whole ones of the program to those of ``fully_shard``, and back to whole values."""

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
"""They compute with whole parameters, or with operations that PyTorch does not have for shards."""


class ReplacedParameter(nn.Parameter):
    """What a parameter becomes whose place a shard has taken: it is empty, and to ask for its gradient is refused."""

    @property
    def grad(self) -> NoReturn:  # type: ignore[override]
        """Raise UsageError: it will never have one."""
        raise UsageError(
            "this parameter was taken before prepare(), which has put a shard in its place: take model.parameters() "
            "after prepare()"
        )


def check_parameters(model: nn.Module) -> None:
    """Raise UsageError for a model that cannot be sharded: none, unlike parameters, sparse ones."""
    if not any(True for _ in model.parameters()):
        raise UsageError("strategy sharded: the model has no parameters, so that there is nothing to shard")
    for name, parameter in model.named_parameters():
        hooks = parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
        if hooks and parameter.numel():
            raise UsageError(
                f"strategy sharded: parameter {name!r} has a hook, which its shard would not have: register it after "
                "prepare(), by register_post_accumulate_grad_hook()"
            )
    trained = [(name, each.dtype) for name, each in model.named_parameters() if each.requires_grad]
    for name, dtype in trained:
        if dtype != trained[0][1]:
            first, kind = trained[0]
            raise UsageError(
                f"strategy sharded: {first!r} is {str(kind)[6:]} and {name!r} {str(dtype)[6:]}: parameters that are "
                "gathered together need one dtype; convert one of them (model.float())"
            )
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise UsageError(
                f"strategy sharded: {name or 'the model'} has sparse=True, and only dense gradients are sharded: leave "
                "sparse out, or take paceline.torch.Embedding under --strategy hybrid"
            )


def check_optimizers(optimizers: Iterable[Optimizer], models: nn.Module) -> None:
    """Raise UsageError for an optimizer that does not compute with shards, or has parameters of no model."""
    own = {id(each) for each in models.parameters()}
    for optimizer in optimizers:
        _check_optimizer(optimizer, own)


def _check_optimizer(optimizer: Optimizer, own: set[int]) -> None:
    groups = optimizer.param_groups
    if isinstance(optimizer, _WITHOUT_SHARDS):
        raise UsageError(
            f"strategy sharded: {type(optimizer).__name__} does not compute with shards: take an optimizer that "
            "updates each element by its own gradient, as SGD, Adam or AdamW do"
        )
    if isinstance(optimizer, (torch.optim.SGD, torch.optim.Adagrad)) and any(group.get("fused") for group in groups):
        raise UsageError(f"strategy sharded: {type(optimizer).__name__}(fused=True) does not take shards: leave it out")
    if any(id(each) not in own for group in groups for each in group["params"]):
        raise UsageError(
            "strategy sharded: the optimizer has a parameter that the model does not have, so that nobody would "
            "average its gradient: make it a part of the model"
        )


def replace(optimizer: Optimizer, shards: Mapping[int, nn.Parameter]) -> None:
    """Give an optimizer the `shards` for the parameters that it had, by their identity, with their state."""
    for group in optimizer.param_groups:
        group["params"] = [shards.get(id(parameter), parameter) for parameter in group["params"]]
    for parameter in [each for each in optimizer.state if id(each) in shards]:
        shard = shards[id(parameter)]
        optimizer.state[shard] = {key: as_shard(value, shard) for key, value in optimizer.state.pop(parameter).items()}


def retire(parameters: Iterable[nn.Parameter]) -> None:
    """Free whole parameters that shards have replaced; who still asks one for its gradient is told."""
    for parameter in parameters:
        parameter.grad = None
        parameter.data = torch.empty(0, dtype=parameter.dtype)
        parameter.__class__ = ReplacedParameter


def shard_values(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Have ``load_state_dict`` take whole values for shards: a hook of each module that has parameters."""
    for name, parameter in module._parameters.items():
        if parameter is not None and prefix + name in state:
            state[prefix + name] = as_shard(state[prefix + name], parameter)


def shard_state(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Have an optimizer's ``load_state_dict`` take whole values for shards: a hook of it."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    shards = {
        number: {key: as_shard(value, parameters[number]) for key, value in entries.items()}
        for number, entries in state["state"].items()
    }
    return {**state, "state": shards}


def as_whole(value: Any, *, keep: bool) -> Any:
    """Return the whole of a sharded tensor, on the CPU, on ranks that `keep` it; every rank calls it.

    Anything else is returned as it is.
    """
    if not isinstance(value, DTensor):
        return value
    whole: Tensor = value.full_tensor().detach()
    return whole.to("cpu") if keep else None


@torch.no_grad()
def clip_shards(parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float, group: Any) -> Tensor:
    """Clip gradients by the norm of all of them, of which shards are summed over `group`; return it. One message."""
    grads = [each.grad for each in parameters if each.grad is not None]
    device = grads[0].device if grads else torch.device("cpu")
    is_largest = norm_type == float("inf")
    totals = torch.zeros(2, dtype=torch.float64, device=device)  # of shards, and of gradients that every process has
    locals_ = [each.to_local() if isinstance(each, DTensor) else each for each in grads]
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
    """Return a module's output with copies for views: a hook of each unit, before those of ``fully_shard``.

    Its hooks for backward are lost where the program changes a view in place (``x += y``).
    """
    return tree_map_only(Tensor, lambda each: each.clone() if each._is_view() and each.requires_grad else each, output)


@torch.no_grad()
def share_buffers(module: nn.Module, _: Any) -> None:
    """Give every rank rank 0's buffers before a forward of training: those that a checkpoint holds (statistics).

    So does DistributedDataParallel.
    """
    if not (module.training and torch.is_grad_enabled()):
        return
    by_kind: dict[torch.dtype, list[Tensor]] = {}
    for each in module.modules():
        for name, buffer in each._buffers.items():
            if buffer is not None and buffer.numel() and name not in each._non_persistent_buffers_set:
                by_kind.setdefault(buffer.dtype, []).append(buffer)
    for buffers in by_kind.values():
        flat = torch.cat([each.reshape(-1) for each in buffers])
        torch.distributed.broadcast(flat, 0)
        for buffer, values in zip(buffers, torch.split(flat, [each.numel() for each in buffers]), strict=True):
            buffer.copy_(values.view(buffer.shape))
