"""Manage the parameters on a process of a pipeline: values for its own stages, placeholders for other stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.errors import UsageError
from paceline.torch.strategies.all_reduce import describe_entry
from paceline.torch.strategies.deferred import stand_in
from paceline.torch.strategies.pipeline.run.partition import Partition, shared_parameters

NormOf = Callable[[str, float], float]
"""A function that returns the norm of a parameter's gradient, given the parameter's name and the norm's order."""

_PLAIN: Final = (
    "shape", "size", "dim", "ndim", "numel", "dtype", "device", "layout", "is_sparse", "requires_grad", "grad_fn",
    "is_leaf", "is_cuda", "grad", "is_floating_point", "is_complex", "is_cpu", "is_nested", "_is_view",
)  # fmt: skip


class AbsentGrad(torch.Tensor):
    """The gradient of a parameter of another process. This object has the gradient's shape and norms, but no values.

    Norm functions such as ``torch.nn.utils.clip_grad_norm_`` work as in one process. An elementwise change in place has
    no effect here, because the process that has the gradient makes the same call.
    """

    @staticmethod
    def __new__(cls, parameter: Tensor, name: str, norm_of: NormOf) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, list(parameter.shape), dtype=parameter.dtype, device=parameter.device
        )

    def __init__(self, parameter: Tensor, name: str, norm_of: NormOf) -> None:
        self.parameter_name, self.norm_of = name, norm_of

    def norm_value(self, order: Any) -> Tensor:
        order = 2.0 if order in (None, "fro") else float(order)
        with torch._C.DisableTorchFunctionSubclass():
            dtype = self.dtype
        return torch.tensor(self.norm_of(self.parameter_name, order), dtype=dtype)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run functions that need no values, and compute norms; raise UsageError for all other functions."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__"):
            name = getattr(getattr(func, "__self__", None), "__name__", "")
        if name in _PLAIN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        owner = args[0] if args else None
        if name in ("vector_norm", "linalg_vector_norm", "norm") and isinstance(owner, AbsentGrad):
            return owner.norm_value(args[1] if len(args) > 1 else kwargs.get("ord", kwargs.get("p")))
        if name == "_foreach_norm":
            order = args[1] if len(args) > 1 else kwargs.get("ord")
            return tuple(
                grad.norm_value(order)
                if isinstance(grad, AbsentGrad)
                else torch.linalg.vector_norm(grad, 2.0 if order is None else order)
                for grad in args[0]
            )
        if name.endswith("_") and not name.endswith("__") and not name.startswith("_amp"):
            return _change_local(func, args, kwargs)
        leaves = torch.utils._pytree.tree_leaves((args, kwargs))
        absent = next(leaf for leaf in leaves if isinstance(leaf, AbsentGrad))
        raise UsageError(
            f"{name}() got the gradient of {absent.parameter_name!r}, which is on another process of the pipeline. "
            "Only its norm and changes in place are available: use a hook of the parameter for other computations"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise UsageError(f"{func} got a gradient that is on another process of the pipeline")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"AbsentGrad({self.parameter_name!r}, on another process)"


def _change_local(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    first = args[0]
    if not isinstance(first, (list, tuple)):
        return first
    local = [number for number, grad in enumerate(first) if not isinstance(grad, AbsentGrad)]

    def local_of(value: Any) -> Any:
        if isinstance(value, (list, tuple)) and len(value) == len(first):
            return [value[number] for number in local]
        return value

    if local:
        func(*map(local_of, args), **{key: local_of(value) for key, value in kwargs.items()})
    return None


class Ownership:
    """Manages the parameters and buffers of a pipelined model on one rank."""

    def __init__(self, module: nn.Module, optimizer: Optimizer | None, partition: Partition, rank: int) -> None:
        places = partition.routes.places
        self._module = module
        self._optimizer = optimizer
        self._rank = rank
        self._ranks = {
            name: sorted({places[stage] for stage in stages})
            for name, stages in (*partition.parameters.items(), *partition.buffers.items())
        }
        self._shared = shared_parameters(partition.parameters, places)
        self._earlier_grads: dict[str, Tensor | None] = {}
        self.is_released = False
        self.known_norms: dict[float, dict[str, float]] = {}
        """Norms of the gradients by the norm's order and parameter, for the orders used since the last backward."""

    def is_local(self, name: str) -> bool:
        return self._rank in self._ranks[name]

    def keeper(self, name: str) -> int:
        return self._ranks[name][0]

    def local_ids(self) -> set[int]:
        tensors = (*self._module.named_parameters(), *self._module.named_buffers())
        return {id(tensor) for name, tensor in tensors if self.is_local(name)}

    def own_parameters(self) -> list[nn.Parameter]:
        return [parameter for name, parameter in self._module.named_parameters() if self.is_local(name)]

    def release(self) -> None:
        """Free the parameters that only other ranks need. They keep their shape, and each of their values is NaN."""
        for name, parameter in self._module.named_parameters():
            if not self.is_local(name):
                parameter.data = stand_in(parameter)
                parameter.grad = None
                if self._optimizer is not None:
                    self._optimizer.state.pop(parameter, None)
        self.is_released = True

    def hold_all(self) -> None:
        for name, parameter in self._module.named_parameters():
            if not self.is_local(name) and self.is_released:
                parameter.data = torch.zeros(parameter.shape, dtype=parameter.dtype)
        self.is_released = False

    def gather_values(self, group: Any) -> None:
        """Collect all parameters and buffers on rank 0. Every rank of the pipeline must call this method."""
        tensors = dict((*self._module.named_parameters(), *self._module.named_buffers()))
        if self._rank == 0:
            self.hold_all()
        for name, tensor in tensors.items():
            keeper = self.keeper(name)
            if keeper == 0 or not tensor.numel():
                continue
            if self._rank == keeper:
                dist.send(tensor.detach().contiguous(), group=group, group_dst=0)
            elif self._rank == 0:
                buffer = torch.empty_like(tensor, memory_format=torch.contiguous_format)
                dist.recv(buffer, group=group, group_src=keeper)
                with torch.no_grad():
                    tensor.copy_(buffer)

    def before_backward(self) -> None:
        """Store the earlier gradients of shared parameters, because :meth:`after_backward` sums only new gradients."""
        self.known_norms.clear()
        for name in self._shared:
            parameter = self._module.get_parameter(name)
            if self.is_local(name):
                self._earlier_grads[name], parameter.grad = parameter.grad, None

    def after_backward(self, group: Any, norm_of: NormOf) -> None:
        """Sum the new gradients of shared parameters over their ranks. Give other ranks' parameters an AbsentGrad."""
        for name, ranks in self._shared.items():
            if self._rank in ranks:
                parameter = self._module.get_parameter(name)
                if parameter.requires_grad:
                    total = _summed(parameter, ranks, self._rank, group)
                    earlier = self._earlier_grads.pop(name, None)
                    parameter.grad = total if earlier is None else earlier.add_(total)
        for name, parameter in self._module.named_parameters():
            if not self.is_local(name) and parameter.requires_grad:
                parameter.grad = AbsentGrad(parameter, name, norm_of)

    def before_step(self) -> None:
        """Remove the gradients of other ranks' parameters, so that the optimizer skips these parameters."""
        for name, parameter in self._module.named_parameters():
            if not self.is_local(name):
                parameter.grad = None

    def norms(self, order: float) -> dict[str, float]:
        return {
            name: float(torch.linalg.vector_norm(parameter.grad, order))
            for name, parameter in self._module.named_parameters()
            if self.keeper(name) == self._rank and parameter.grad is not None
        }


def _summed(parameter: nn.Parameter, ranks: Sequence[int], rank: int, group: Any) -> Tensor:
    grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach().contiguous()
    first, *followers = ranks
    if rank != first:
        dist.send(grad, group=group, group_dst=first)
        total = torch.empty_like(grad)
        dist.recv(total, group=group, group_src=first)
        return total
    total, buffer = grad.clone(), torch.empty_like(grad)
    for source in followers:
        dist.recv(buffer, group=group, group_src=source)
        total += buffer
    for destination in followers:
        dist.send(total, group=group, group_dst=destination)
    return total


def gather_state(
    state: Mapping[int, Mapping[str, Any]], keepers: Sequence[int], rank: int, pg: Any
) -> dict[int, dict[str, Any]]:
    """Return the optimizer state of all parameters by number, on rank 0. Rank `keepers[i]` has parameter i's state."""
    own = {number: entries for number, entries in state.items() if keepers[number] == rank}
    described = [
        [number, name, describe_entry(value)] for number, entries in own.items() for name, value in entries.items()
    ]
    gathered: dict[int, dict[str, Any]] = {}
    for source, rows in enumerate(pg.group.all_gather_objects(described)):
        for number, name, (kind, value) in rows:
            if kind != "value":
                tensor = torch.empty(value, dtype=getattr(torch, kind))
                if source == rank == 0:
                    tensor = own[number][name]
                elif rank == source:
                    dist.send(own[number][name].detach().contiguous(), group=pg, group_dst=0)
                elif rank == 0:
                    dist.recv(tensor, group=pg, group_src=source)
                value = tensor
            gathered.setdefault(number, {})[name] = value
    return gathered
