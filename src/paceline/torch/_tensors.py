"""Tensors as our collectives take them: of a dtype that they know, contiguous, and several behind one another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import torch
from torch import Tensor

from paceline.kernels.combine import DTYPES

After: TypeAlias = Callable[[], None]
"""What remains to be done when a call is: a result is copied to where it was wanted."""

_KNOWN: Final = frozenset(getattr(torch, name) for name in DTYPES)
_SAME_SIZE: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def movable(tensor: Tensor) -> Tensor:
    """Return the tensor, or the same memory as one of a dtype that can be moved, though perhaps not reduced."""
    if tensor.dtype in _KNOWN:
        return tensor
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj() if tensor.is_conj() else tensor)
    return tensor.view(_SAME_SIZE[tensor.element_size()])


def source(tensor: Tensor) -> Tensor:
    """Return the items of a tensor as a contiguous vector, copied if need be."""
    return movable(tensor).reshape(-1)


def target(tensor: Tensor) -> tuple[Tensor, After | None]:
    """Return a contiguous vector to write into, and what remains then."""
    tensor = movable(tensor)
    if tensor.is_contiguous():
        return tensor.view(-1), None
    vector = tensor.new_empty(tensor.numel())
    return vector, lambda: _copy(vector, [tensor])


def sources(tensors: Sequence[Tensor]) -> Tensor:
    """Return the items of several tensors behind one another; no copy if they already lie so."""
    tensors = [movable(tensor) for tensor in tensors]
    whole = _one_behind_the_other(tensors)
    return torch.cat([tensor.reshape(-1) for tensor in tensors]) if whole is None else whole


def targets(tensors: Sequence[Tensor]) -> tuple[Tensor, After | None]:
    """Return a contiguous vector for the items of several tensors, and what remains when it is written."""
    tensors = [movable(tensor) for tensor in tensors]
    whole = _one_behind_the_other(tensors)
    if whole is not None:
        return whole, None
    vector = tensors[0].new_empty(sum(tensor.numel() for tensor in tensors))
    return vector, lambda: _copy(vector, tensors)


def sizes(tensors: Sequence[Tensor]) -> list[int] | None:
    """Return the number of items of every tensor; None if it is the same for all."""
    found = counts(tensors)
    return None if len(set(found)) == 1 else found


def counts(tensors: Sequence[Tensor]) -> list[int]:
    """Return the number of items of every tensor."""
    return [movable(tensor).numel() for tensor in tensors]


def one_after_another(afters: Sequence[After | None]) -> After | None:
    """Return all that remains of several calls, None for nothing."""
    remaining = [after for after in afters if after is not None]
    if not remaining:
        return None

    def all_of_them() -> None:
        for after in remaining:
            after()

    return all_of_them


def _one_behind_the_other(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return the vector that consists of the tensors, as the parts of :func:`torch.chunk` do; None if there is none."""
    first = tensors[0]
    address, storage = first.data_ptr(), first.untyped_storage().data_ptr()
    for tensor in tensors:
        if (
            tensor.dtype != first.dtype
            or tensor.data_ptr() != address
            or not tensor.is_contiguous()
            or tensor.untyped_storage().data_ptr() != storage
        ):
            return None
        address += tensor.numel() * tensor.element_size()
    count = (address - first.data_ptr()) // first.element_size()
    return first.detach().as_strided((count,), (1,))


def _copy(vector: Tensor, tensors: Sequence[Tensor]) -> None:
    start = 0
    with torch.no_grad():
        for tensor in tensors:
            end = start + tensor.numel()
            tensor.copy_(vector[start:end].view(tensor.shape))
            start = end
