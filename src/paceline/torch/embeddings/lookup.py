"""Add lookups to the autograd graph: forward returns rows, and backward reports the rows' gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from paceline.kernels.dedup import sum_rows, take_rows
from paceline.tables.types import Floats, Keys
from paceline.torch.embeddings.distinct import DistinctKeys
from paceline.torch.embeddings.gradients import to_device

OnGradient = Callable[[Keys, torch.Tensor], None]
"""A function that backward calls with distinct keys (uint64 [n]) and their gradients (float32 [n, dim])."""


class Rows(torch.autograd.Function):
    """Copy the distinct rows (float32 [u, dim]) to the anchor's device. Backward calls `on_gradient`."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, keys: DistinctKeys, rows: Floats, on_gradient: OnGradient
    ) -> torch.Tensor:
        ctx.keys, ctx.on_gradient, ctx.anchor_like = keys, on_gradient, anchor.new_empty(0)
        return to_device(rows, anchor.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        ctx.on_gradient(ctx.keys.unique, grads[0])
        return ctx.anchor_like, None, None, None


class Gather(torch.autograd.Function):
    """Return the row of every key, float32 [n, dim], on the CPU. Backward calls `on_gradient`."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, keys: DistinctKeys, rows: Floats, on_gradient: OnGradient
    ) -> torch.Tensor:
        ctx.keys, ctx.on_gradient, ctx.anchor_like = keys, on_gradient, anchor.new_empty(0)
        dim = rows.shape[1]
        out = np.empty((len(keys.flat), dim), np.float32)
        # The kernel is compiled for int64. For another type, it would be compiled now, for half a second.
        take_rows(rows.reshape(-1), keys.inverse.astype(np.int64), dim, out.reshape(-1))
        return torch.from_numpy(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        dim = grads[0].shape[1]
        flat_grads = np.ascontiguousarray(grads[0].numpy()).reshape(-1)
        summed = np.empty(len(ctx.keys.unique) * dim, np.float32)
        sum_rows(ctx.keys.inverse, flat_grads, dim, summed)
        ctx.on_gradient(ctx.keys.unique, torch.from_numpy(summed.reshape(-1, dim)))
        return ctx.anchor_like, None, None, None


def rows_of(anchor: torch.Tensor, keys: DistinctKeys, rows: Floats, on_gradient: OnGradient) -> torch.Tensor:
    """Return the distinct rows, float32 [u, dim], as a node of the autograd graph."""
    found: torch.Tensor = Rows.apply(anchor, keys, rows, on_gradient)  # type: ignore[no-untyped-call]
    return found


def gather(anchor: torch.Tensor, keys: DistinctKeys, rows: Floats, on_gradient: OnGradient) -> torch.Tensor:
    """Return the row of every key, float32 [n, dim], as a node of the autograd graph."""
    if anchor.device.type == "cpu":
        found: torch.Tensor = Gather.apply(anchor, keys, rows, on_gradient)  # type: ignore[no-untyped-call]
        return found
    places = torch.from_numpy(keys.inverse).to(anchor.device)
    return torch.nn.functional.embedding(places, rows_of(anchor, keys, rows, on_gradient))
