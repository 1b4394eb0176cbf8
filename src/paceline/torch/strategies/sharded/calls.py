"""Call PyTorch functions that do not support shards with complete tensors instead. Such a call gathers the shards in
the arguments, so every process must make it. If the function changes a tensor in place, each process keeps its part of
the result. The gradient of a gathered parameter is averaged over the processes.
"""

from __future__ import annotations

import warnings
from typing import Any, Final, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed import DistError
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.utils._pytree import tree_map_only

from paceline.errors import UsageError
from paceline.torch.strategies.base import Strategy
from paceline.torch.strategies.step_phases import tensors_in

_NUMBERS: Final = ("item", "tolist", "__bool__", "__float__", "__format__", "__index__", "__int__", "__reduce_ex__")
_RANDOM: Final = ("uniform_", "normal_", "bernoulli_", "exponential_", "random_", "rand_like", "randn_like", "dropout")
"""Endings of random functions' names. With shards, these functions would draw the same numbers for each shard."""
_IN_PLACE: Final = ("__iadd__", "__imul__", "__isub__", "__itruediv__", "__setitem__")
_strategies: WeakKeyDictionary[DeviceMesh, Strategy] = WeakKeyDictionary()


def compute_complete(mesh: DeviceMesh, strategy: Strategy) -> None:
    """For shards of `mesh`, let functions that do not support shards compute with complete tensors."""
    _strategies[mesh] = strategy
    # PyTorch warns of lists with both shards and unsharded tensors, but here such lists are correct.
    warnings.filterwarnings("ignore", "Found a non-scalar tensor with numel=1", UserWarning)
    DTensor.__torch_function__ = classmethod(_call)  # type: ignore[assignment, method-assign]


def as_shard(value: Any, like: Tensor) -> Any:
    """If `like` is sharded and `value` a complete tensor, return this rank's part of `value`, else `value` itself."""
    if not isinstance(like, DTensor) or not isinstance(value, Tensor) or isinstance(value, DTensor):
        return value
    if value.shape != like.shape:
        return value
    complete = value.to(like.device)
    return distribute_tensor(complete, like.device_mesh, like.placements, src_data_rank=None)


def refuse_copies(*_: Any) -> NoReturn:
    raise UsageError(
        "strategy sharded: copy.deepcopy(), AveragedModel() or torch.save() got a sharded model, whose copy would lack "
        "the other processes' shards: copy the model before prepare() and prepare the copy too, or save the model by "
        "strategy.save()"
    )


def _call(cls: type[DTensor], function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
    kwargs = kwargs or {}
    name = getattr(function, "__name__", "")
    with torch._C.DisableTorchFunctionSubclass():
        if name == "__get__":
            return function(*args, **kwargs)
        tensors = list(tensors_in((args, kwargs)))
        meshes = [tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)]
        strategy = next((_strategies[mesh] for mesh in meshes if mesh in _strategies), None)
        if strategy is None:
            return function(*args, **kwargs)
        target = args[0] if args else kwargs.get("tensor")
        _check(name, target, args, kwargs)
        if "foreach" in name:
            if "amp" in name:  # PyTorch uses the mesh of the first tensor, so it must be a shard
                args = (sorted(target, key=lambda tensor: not isinstance(tensor, DTensor)), *args[1:])
            with implicit_replication():  # allowed, because unsharded tensors are equal on all processes
                return function(*args, **kwargs)
        if name == "__set__":
            value = as_shard(args[1], target)
            if function != vars(torch._C.TensorBase)["data"].__set__ or (target.shape, target.dtype) != (
                value.shape,
                value.dtype,
            ):
                return function(target, value)
            return target.detach().copy_(value)
        grads = torch.is_grad_enabled()
        plain = [tensor for tensor in tensors if not isinstance(tensor, DTensor)]
        is_mixed = name != "backward" and any(tensor.dim() or (grads and tensor.requires_grad) for tensor in plain)
        is_mixed = is_mixed or (_is_in_place(name) and not isinstance(target, DTensor))
        if not is_mixed and name not in (*_NUMBERS, "__setitem__") and not name.endswith(_RANDOM):
            try:
                return _mark(function(*args, **kwargs), target)
            except DistError:
                raise
            except (NotImplementedError, RuntimeError):
                pass  # try again with complete tensors; an error that does not concern shards occurs again
        strategy._ranks.exchange_as(f"computes with complete parameters in {name}()", None)
        return _compute(strategy, function, name, args, kwargs)


def _compute(strategy: Strategy, function: Any, name: str, args: Any, kwargs: Any) -> Any:
    has_gradients = torch.is_grad_enabled() and name not in _NUMBERS

    def gather(shard: DTensor) -> Any:
        complete = shard.full_tensor()
        if not has_gradients or not complete.requires_grad:
            return complete.detach()
        return _MeanGradient.apply(complete, strategy)  # type: ignore[no-untyped-call]

    complete_args, complete_kwargs = tree_map_only(DTensor, gather, (args, kwargs))
    result = function(*complete_args, **complete_kwargs)
    if not _is_in_place(name):
        return result
    target, complete = (args[0], complete_args[0]) if args else (kwargs["tensor"], complete_kwargs["tensor"])
    if isinstance(target, DTensor):
        target.detach().copy_(as_shard(complete.detach(), target))
    return None if result is None else target


class _MeanGradient(torch.autograd.Function):
    """The identity function; its gradient is the mean of the gradients over the processes."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, strategy: Strategy) -> Tensor:
        ctx.strategy = strategy
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.strategy.reduce(gradient), None


def _is_in_place(name: str) -> bool:
    return name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))


def _check(name: str, target: Any, args: Any, kwargs: Any) -> None:
    """Raise UsageError for calls whose results with shards differ from the results with complete tensors."""
    if name in ("backward", "grad") and kwargs.get("inputs", args[1:2]):
        _refuse(f"{name}(inputs=...)", "has no gradients for sharded parameters: use loss.backward() without inputs")
    if name in ("numpy", "__array__"):
        _refuse("numpy()", "would return only a part: call full_tensor().numpy() on every process")
    if name == "register_hook" and target.is_leaf and target.requires_grad:
        _refuse(
            "register_hook() on a parameter",
            "would never be called, because backward leaves gradients in shards: use "
            "register_post_accumulate_grad_hook(), or change the gradients after backward()",
        )
    if _is_in_place(name) and getattr(target, "is_copy_of_part", False):
        _refuse(f"{name}() on a part of a sharded tensor", "changes a copy: assign the part, as in tensor[0] = values")


def _refuse(call: str, reason: str) -> NoReturn:
    raise UsageError(f"strategy sharded: {call} {reason}")


def _mark(result: Any, source: Any) -> Any:
    """Mark results that were gathered from shards of `source`: a change of such a result does not change `source`."""
    if isinstance(source, DTensor):
        is_cut = any(isinstance(placement, Shard) for placement in source.placements)
        for leaf in tensors_in(result):
            if isinstance(leaf, DTensor) and leaf is not source:
                is_copy = is_cut and not any(isinstance(own_placement, Shard) for own_placement in leaf.placements)
                leaf.is_copy_of_part = is_copy or getattr(source, "is_copy_of_part", False)  # type: ignore[attr-defined]
    return result
