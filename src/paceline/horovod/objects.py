"""Send parameters, states of optimizers and Python objects, without pickle."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from paceline.errors import UsageError
from paceline.horovod.calls import synchronize
from paceline.horovod.context import current
from paceline.horovod.exchanges import allgather, broadcast_, broadcast_async_
from paceline.horovod.process_sets import ProcessSet, global_process_set
from paceline.rpc.allowed import Allowed
from paceline.rpc.wire.codec import Decoding, Encoding
from paceline.transport import PADS

_FAILED: Final = -1
"""The size that a rank sends if it cannot encode its object. In this case, all ranks raise an error."""


def broadcast_parameters(params: Mapping[str, Tensor] | Iterable[Any], root_rank: int) -> None:
    """Copy the tensors of rank `root_rank` to all ranks.

    `params` is a model's ``state_dict()`` or ``named_parameters()``, or a list of tensors.
    """
    if isinstance(params, Mapping):
        pairs = sorted(params.items())
    elif isinstance(params, Iterable):
        pairs = [pair if isinstance(pair, tuple) else (None, pair) for pair in params]
    else:
        raise UsageError(f"invalid params of type: {type(params)}. Pass a state_dict() or named_parameters()")
    handles = [broadcast_async_(tensor, root_rank, name) for name, tensor in pairs]
    for handle in handles:
        synchronize(handle)


def check_optimizer(optimizer: Any) -> None:
    """Raise UsageError for an object without parameter groups, such as a model."""
    if not hasattr(optimizer, "param_groups"):
        raise UsageError(f"got {type(optimizer).__name__}, expected an optimizer of torch.optim. Pass the optimizer")


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int, model: Any = None) -> None:
    """Copy the state and the options of the optimizer of rank `root_rank` to all ranks.

    As in Horovod, parameters without a gradient get zeros as their gradients. `model` has no effect: Horovod needs it
    for a step of the optimizer, which Paceline does not take.
    """
    check_optimizer(optimizer)
    is_root = current().group.rank == root_rank
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
    state = broadcast_object(optimizer.state_dict() if is_root else None, root_rank)
    if not is_root:
        optimizer.load_state_dict(state)


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the object of rank `root_rank`. It may contain numbers, text, containers, arrays, tensors and dataclasses.

    Tensors on other devices arrive on the CPU. Raises UsageError for objects of other types, on all ranks.
    """
    is_root = current().group.rank == root_rank
    data, error = _encode(obj) if is_root else (torch.empty(0, dtype=torch.uint8), None)
    size = torch.tensor([_FAILED if error is not None else data.numel()])
    _check_sizes(broadcast_(size, root_rank, name and f"{name}.sz", process_set), [root_rank], error)
    if not is_root:
        data = torch.empty(int(size), dtype=torch.uint8)
    broadcast_(data, root_rank, name and f"{name}.t", process_set)
    return obj if is_root else _decode(data)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Return the objects of all ranks. See :func:`broadcast_object` for their types."""
    data, error = _encode(obj)
    size = torch.tensor([_FAILED if error is not None else data.numel()])
    sizes = allgather(size, name and f"{name}.sz", process_set)
    _check_sizes(sizes, process_set.ranks, error)
    gathered = allgather(data, name and f"{name}.t", process_set)
    return [_decode(part.clone()) for part in gathered.split(sizes.tolist())]


def _encode(value: Any) -> tuple[Tensor, UsageError | None]:
    """Return the encoded value: the size of the msgpack part, this part padded to 8 bytes, and the arrays."""
    encoding = Encoding()
    try:
        meta = encoding.encode(tree_map(_on_cpu, value), "the object")
    except UsageError as error:
        return torch.empty(0, dtype=torch.uint8), error
    header = len(meta).to_bytes(8, "little")
    parts: list[Any] = [header, meta, PADS[-len(meta) & 7], *encoding.parts]
    whole = bytearray().join(parts)
    return torch.frombuffer(whole, dtype=torch.uint8), None


def _on_cpu(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value


def _decode(data: Tensor) -> Any:
    array: Any = data.numpy()
    view = memoryview(array)
    end = 8 + int.from_bytes(view[:8], "little")
    return Decoding(view[end + (-end & 7) :], Allowed(["__main__"])).decode(view[8:end])


def _check_sizes(sizes: Tensor, ranks: list[int], error: UsageError | None) -> None:
    if error is not None:
        raise error
    failed = [rank for rank, size in zip(ranks, sizes.tolist(), strict=True) if size == _FAILED]
    if failed:
        raise UsageError(f"rank {failed[0]} cannot send its object; see the error of this rank")
