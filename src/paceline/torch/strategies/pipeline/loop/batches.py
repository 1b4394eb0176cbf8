"""Batches and their microbatches: rows in the first dimension of tensors."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.errors import UsageError


def batch_size(leaves: Sequence[Any]) -> int:
    """Return the number of rows of a batch: the length of the first tensor with a dimension. Raises UsageError."""
    size = next((len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()), None)
    if not size:
        raise UsageError(
            f"the model was called with {'an empty batch' if size == 0 else 'no tensor with rows'}: a pipeline cuts "
            "batches along the first dimension. Pass a batch of 1 or more examples"
        )
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.layout is not torch.strided and len(leaf) == size:
            raise UsageError(
                f"the model was called with a tensor of layout {str(leaf.layout).removeprefix('torch.')}, which "
                f"microbatches cannot cut, with the batch's {size} rows. Pass a dense tensor, or make it an attribute "
                "of the model if all examples share it"
            )
    return size


def describe_cut(arguments: Mapping[str, Any], size: int) -> str:
    """Return a text that lists the arguments that are cut into microbatches, and the others; "" if all are cut."""
    tensors = [
        (name, leaf)
        for name, value in arguments.items()
        for leaf in torch.utils._pytree.tree_leaves(value)
        if isinstance(leaf, Tensor) and leaf.dim()
    ]
    cut = [f"{name} {list(tensor.shape)}" for name, tensor in tensors if len(tensor) == size]
    whole = [f"{name} {list(tensor.shape)}" for name, tensor in tensors if len(tensor) != size]
    if not whole:
        return ""
    as_long = [f"{n}'s dimension {t.shape.index(size)}" for n, t in tensors if len(t) != size and size in t.shape]
    hint = f"; if {' and '.join(as_long)} is the batch, put it first, and transpose within the model"
    return (
        f"; microbatches cut {', '.join(cut)} along the first dimension, which must be the batch, and contain the "
        f"whole of {', '.join(whole)}{hint if as_long else ''}"
    )


def cut_rows(value: Any, size: int, parts: int) -> list[Any]:
    bounds = row_bounds(size, parts)

    def part_of(leaf: Any, first: int, end: int) -> Any:
        return leaf[first:end] if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == size else leaf

    tree_map = torch.utils._pytree.tree_map
    return [tree_map(lambda leaf, a=a, b=b: part_of(leaf, a, b), value) for a, b in itertools.pairwise(bounds)]


def row_bounds(size: int, parts: int) -> list[int]:
    """Return the bounds of `parts` parts of `size` rows. If parts cannot be equal, the first ones have one row more."""
    small, larger = divmod(size, parts)
    return [part * small + min(part, larger) for part in range(parts + 1)]


def add_numbers(parts: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    # Skip parts with weight 0, because the mean of an empty part is NaN.
    total = sum(part * weight for part, weight in zip(parts, weights, strict=True) if weight)
    return torch.as_tensor(total, dtype=parts[0].dtype)
