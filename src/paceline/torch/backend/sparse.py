"""All-reduce of sparse tensors: everybody gets everybody's indices and values, and adds up those of equal indices."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline.collectives import Group
from paceline.errors import UsageError


def all_reduce_sparse(group: Group, tensor: Tensor, op: str) -> None:
    """Sum a sparse COO tensor of equal shape over all ranks, in place; it is coalesced then."""
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
