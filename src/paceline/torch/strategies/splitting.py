"""Split a batch into parts, and join the parts' outputs. Batches and outputs are flat lists of leaves. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from paceline.errors import UsageError


def split(leaves: Sequence[Any], num_parts: int) -> list[list[Any]]:
    """Split every tensor along dimension 0 by ``torch.chunk``. Return the leaves of each part.

    There may be fewer parts than `num_parts` (10 rows in 8 parts are 2,2,2,2,2), but no empty part. Every part gets the
    tensors without dimensions and the other values. If no tensor has a dimension, there is one part. Raises UsageError
    for unequal sizes and an empty batch.
    """
    shapes = [tuple(leaf.shape) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()]
    if not shapes:
        return [list(leaves)]
    size = shapes[0][0]
    if any(shape[0] != size for shape in shapes):
        raise UsageError(
            f"the model was called with tensors of shapes {_listed(shapes)}: replicas split every tensor along its "
            "first dimension, which must be the batch. Make a value of all examples a buffer of the model"
        )
    if size == 0:
        raise UsageError(
            "the model was called with a batch of 0 examples: replicas need 1 or more. Skip the empty batch"
        )
    layouts = [leaf.layout for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.layout is not torch.strided]
    if layouts:
        raise UsageError(
            f"the model was called with a tensor of layout {str(layouts[0]).removeprefix('torch.')}, which replicas "
            "cannot split. Pass a dense tensor, or make it an attribute of the model if all examples share it"
        )
    rows = -(-size // num_parts)
    columns = [
        leaf.chunk(num_parts) if isinstance(leaf, torch.Tensor) and leaf.dim() else [leaf] * -(-size // rows)
        for leaf in leaves
    ]
    return [list(part) for part in zip(*columns, strict=True)]


def num_rows(part: Sequence[Any]) -> int | None:
    return next((len(leaf) for leaf in part if isinstance(leaf, torch.Tensor) and leaf.dim()), None)


def check_outputs(parts: Sequence[Sequence[Any]], sizes: Sequence[int | None]) -> None:
    """Raise UsageError if the outputs of the parts, which have `sizes` examples, cannot be joined along dimension 0."""
    for column in zip(*parts, strict=True):
        first = column[0]
        if isinstance(first, torch.Tensor):
            if not all(isinstance(leaf, torch.Tensor) and leaf.dim() == first.dim() for leaf in column):
                raise UsageError(
                    f"the outputs of a batch's parts differ in kind: {_listed([_kind(leaf) for leaf in column])}. "
                    "Return the same kind from each forward"
                )
            if first.dim():
                _check_rows(column, sizes)
        elif not all(isinstance(leaf, type(first)) for leaf in column) or not (
            first is None or (isinstance(first, (bool, int, float, str)) and all(leaf == first for leaf in column))
        ):
            found = _listed([_kind(leaf) for leaf in column])
            raise UsageError(
                f"the parts of a batch returned {found}, which cannot be joined. Return tensors, alone or in tuples, "
                "lists and dictionaries"
            )


def gather(column: Sequence[torch.Tensor], device: torch.device, shares: Sequence[float] = ()) -> torch.Tensor:
    """Join the tensors of all parts on `device`. Raises UsageError for integers that differ.

    Numbers, such as losses, become their mean over the examples. `shares` are the parts' fractions of the batch.
    """
    moved = [tensor.to(device, non_blocking=tensor.is_cuda and device.type == "cuda") for tensor in column]
    if moved[0].dim():
        return torch.cat(moved)
    if moved[0].is_floating_point() or moved[0].is_complex():
        return torch.stack([number * share for number, share in zip(moved, shares, strict=True)]).sum(0)
    if any(not torch.equal(number, moved[0]) for number in moved):
        raise UsageError(
            f"the parts of a batch returned the integers {_listed([number.item() for number in moved])}, but their "
            "mean may not be an integer. Return one number for each example, or a float"
        )
    return moved[0].clone()


def scatter(gradient: torch.Tensor, like: Sequence[torch.Tensor], shares: Sequence[float] = ()) -> list[torch.Tensor]:
    """Return the gradients of the parts that :func:`gather` joined, each on the device of the part in `like`."""
    if like[0].dim():
        parts: Sequence[torch.Tensor] = gradient.split_with_sizes([len(tensor) for tensor in like])
    else:
        parts = [gradient * share for share in shares]
    return [part.to(tensor.device) for part, tensor in zip(parts, like, strict=True)]


def shares_of(sizes: Sequence[int | None]) -> list[float]:
    known = [size or 1 for size in sizes]
    return [size / sum(known) for size in known]


def _check_rows(column: Sequence[torch.Tensor], sizes: Sequence[int | None]) -> None:
    if None in sizes:
        return
    rows = [len(tensor) for tensor in column]
    factor, remainder = divmod(rows[0], sizes[0] or 1)
    if remainder or any(n != factor * (size or 1) for n, size in zip(rows, sizes, strict=True)):
        raise UsageError(
            f"the model returned a tensor of shape {tuple(column[0].shape)} for {sizes[0]} examples: the outputs of "
            "a batch's parts are joined along the first dimension, which must be the batch. Put the batch first "
            "(batch_first=True), or return a number"
        )


def _kind(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"a tensor of shape {tuple(leaf.shape)}"
    is_plain = leaf is None or isinstance(leaf, (bool, int, float, str))
    return str(leaf) if is_plain else f"an object of the class {type(leaf).__name__}"


def _listed(found: Sequence[Any]) -> str:
    return ", ".join(str(one) for one in found[:4]) + (", …" if len(found) > 4 else "")
