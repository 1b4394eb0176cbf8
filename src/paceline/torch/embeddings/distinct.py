"""Find the distinct keys of a lookup."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from paceline.errors import UsageError
from paceline.kernels.dedup import dedup, scratch_size, sum_rows
from paceline.tables.types import Floats, Keys


class DistinctKeys:
    """A lookup's keys `flat` (uint64 [n]), its distinct keys `unique`, and indexes: ``unique[inverse] == flat``."""

    __slots__ = ("flat", "inverse", "unique")

    def __init__(self, flat: Keys) -> None:
        self.flat = flat
        self.unique, self.inverse = find_distinct(flat)


def find_distinct(keys: Keys) -> tuple[Keys, npt.NDArray[np.int32]]:
    """Return the distinct keys in order of first appearance, and each key's index among them (int32 [n])."""
    unique, inverse = np.empty(len(keys), np.uint64), np.empty(len(keys), np.int32)
    count = dedup(keys, np.empty(scratch_size(len(keys)), np.int32), unique, inverse)
    return unique[:count], inverse


def sum_equal_keys(keys: Sequence[Keys], grads: Sequence[Floats], dim: int) -> tuple[Keys, Floats]:
    """Return the distinct keys, and for each key the sum of its gradients in the given order, float32 [n, dim]."""
    unique, inverse = find_distinct(np.concatenate(keys))
    summed = np.empty(len(unique) * dim, np.float32)
    sum_rows(inverse, np.concatenate(grads).reshape(-1), dim, summed)
    return unique, summed.reshape(-1, dim)


def keys_of(tensor: torch.Tensor) -> Keys:
    """Copy a tensor of keys to a new uint64 [n] array. Raises UsageError unless the tensor is int64 or uint64."""
    if tensor.dtype is not torch.int64 and tensor.dtype is not torch.uint64:
        raise UsageError(
            f"keys of an embedding are {str(tensor.dtype).removeprefix('torch.')}: expected int64 or uint64. Convert "
            "with keys.long()"
        )
    flat = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format).view(-1)
    array: Keys = flat.numpy().view(np.uint64)
    return array
