"""Reductions of PyTorch as reductions of Paceline."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.distributed import ReduceOp

from paceline.collectives import Group
from paceline.errors import UsageError
from paceline.torch.backend import tensors as _tensors

_RED_OP_TYPE: Any = ReduceOp.RedOpType
NAMES: Final[dict[int, str]] = {
    int(_RED_OP_TYPE.SUM): "sum",
    int(_RED_OP_TYPE.AVG): "mean",
    int(_RED_OP_TYPE.PRODUCT): "product",
    int(_RED_OP_TYPE.MIN): "min",
    int(_RED_OP_TYPE.MAX): "max",
    int(_RED_OP_TYPE.BAND): "bitwise_and",
    int(_RED_OP_TYPE.BOR): "bitwise_or",
    int(_RED_OP_TYPE.BXOR): "bitwise_xor",
}
"""By the number of the operation, which is the hash of a ReduceOp: the fastest access."""


def reducible(tensor: Tensor, name: str, *, is_target: bool) -> Tensor:
    """Return the tensor, or for complex sums a view of its memory."""
    if tensor.is_complex() and name in ("sum", "mean"):
        return _tensors.writable(tensor) if is_target else _tensors.movable(tensor)
    return tensor


def with_op(op: Any) -> Any:
    options = c10d.AllreduceOptions()
    options.reduceOp = op
    return options


def sum_sparse(group: Group, tensor: Tensor, op: str) -> None:
    """Sum a sparse COO tensor over all ranks in place, by gathering indices and values. The result is coalesced."""
    if op != "sum":
        raise UsageError(f"got the reduction {op!r} for a sparse tensor, expected SUM")
    if tensor.layout != torch.sparse_coo:
        raise UsageError(f"got a tensor of layout {tensor.layout}, expected a dense one or sparse COO")
    own = tensor.coalesce()
    indices, values = own.indices(), own.values()
    num_dims, num = indices.shape
    is_complex = values.is_complex()
    counts = group.gather_sizes(values)
    all_indices = torch.as_tensor(group.all_gather(indices.t().contiguous(), sizes=counts))
    moved: Any = torch.view_as_real(values) if is_complex else values
    all_values = group.all_gather(moved.contiguous(), sizes=counts)
    if is_complex:
        all_values = torch.view_as_complex(all_values)
    total = torch.sparse_coo_tensor(
        all_indices.view(-1, num_dims).t(), all_values, tensor.shape, dtype=tensor.dtype, check_invariants=False
    )
    assert all_indices.shape[0] == sum(counts) >= num
    with torch.no_grad():
        tensor.copy_(total.coalesce())


def op_and_factor(op: Any) -> tuple[str, Any]:
    """Return Paceline's name of a reduction, and the factor of its input, or None."""
    name = NAMES.get(hash(op))
    if name is not None:
        return name, None
    if op == _RED_OP_TYPE.PREMUL_SUM:
        return "sum", op.__getstate__()[1]
    raise UsageError(
        f"got the reduce operation {op}, expected SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR, PREMUL_SUM"
    )


def scaled(tensor: Tensor, factor: Any) -> Tensor:
    return tensor if factor is None else tensor * factor
