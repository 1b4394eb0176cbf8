"""Store the gradients of embedding rows until the optimizer's step; copy rows and gradients between host and CUDA."""

from __future__ import annotations

import copy
import threading
from typing import Any

import numpy as np
import torch
from torch import nn

from paceline.errors import UsageError
from paceline.tables.types import Floats, Keys

_SIDE_STREAMS: dict[torch.device, torch.cuda.Stream] = {}


def to_device(rows: Floats, device: torch.device) -> torch.Tensor:
    """Return rows as a tensor on `device`. On the CPU it shares memory with `rows`; on CUDA a side stream copies it."""
    tensor = torch.from_numpy(rows)
    if device.type != "cuda":
        return tensor if device.type == "cpu" else tensor.to(device)
    side = _SIDE_STREAMS.get(device)
    if side is None:
        side = _SIDE_STREAMS[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    pinned = tensor.pin_memory()
    with torch.cuda.stream(side):
        copy = pinned.to(device, non_blocking=True)
    current = torch.cuda.current_stream(device)
    current.wait_stream(side)
    copy.record_stream(current)
    return copy


class HostCopy:
    """A copy of a tensor from a device to the host, perhaps in flight; :meth:`wait` returns the copy as an array."""

    __slots__ = ("_copied", "_tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._copied: torch.cuda.Event | None = None
        if tensor.device.type == "cuda":
            self._tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._tensor.copy_(tensor, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(tensor.device))
        else:
            self._tensor = tensor.cpu()

    def wait(self) -> Floats:
        """Return the values, float32 and contiguous."""
        if self._copied is not None:
            self._copied.synchronize()
        array: Floats = np.ascontiguousarray(self._tensor.numpy(), np.float32)
        return array


RowGradient = tuple[Keys, Floats]
"""Distinct keys (uint64 [n]) and their gradients (float32 [n, dim])."""


class AnchorGradient(torch.Tensor):
    """The empty gradient of an anchor. Raises UsageError for a ``GradScaler``, which cannot unscale rows' gradients."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch._amp_foreach_non_finite_check_and_unscale_:
            raise UsageError(
                "GradScaler does not unscale the gradients of embedding rows. They would be too large by the loss "
                "scale. Train in bfloat16 (torch.autocast(dtype=torch.bfloat16)) without a scaler"
            )
        if not all(issubclass(cls, kind) for kind in types):
            return NotImplemented  # shards compute with other tensors
        if func is torch.linalg.vector_norm:  # torch's function fails for the maximum norm of an empty tensor
            return torch.zeros((), device=args[0].device)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        found: torch.Tensor = copy.deepcopy(self.as_subclass(torch.Tensor), memo)
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


class RowGradients:
    """Collects the gradients of one embedding's rows from backward passes. Thread-safe.

    The embedding's anchor is an empty parameter in the user's optimizer. ``zero_grad()`` sets the anchor's gradient to
    None or, with ``set_to_none=False``, gives it a new version. In both cases the collected gradients become invalid.
    """

    def __init__(self, anchor: nn.Parameter, *, keeps: bool) -> None:
        self._anchor = anchor
        self._keeps = keeps
        self._lock = threading.Lock()
        self._found: list[tuple[Keys, HostCopy]] = []
        self._version = -1
        anchor.register_post_accumulate_grad_hook(self._accumulated)  # type: ignore[no-untyped-call]

    def add(self, keys: Keys, grads: torch.Tensor) -> None:
        """Add the gradients (float32 [n, dim]) of distinct `keys`."""
        copied = HostCopy(grads)
        with self._lock:
            if self._is_zeroed():
                self._found.clear()
            if self._anchor.grad is None:
                self._anchor.grad = torch.zeros_like(self._anchor).as_subclass(AnchorGradient)
            self._version = self._anchor.grad._version
            self._found.append((keys, copied))

    def take(self) -> list[RowGradient]:
        """Return the gradients since ``zero_grad()`` for an optimizer's step.

        Without `keeps` (no optimizer has the anchor), also drop them, because ``zero_grad()`` then resets no anchor.
        """
        with self._lock:
            if self._anchor.grad is None:
                self._found.clear()
            found = [(keys, copied.wait()) for keys, copied in self._found]
            if not self._keeps:
                self._found.clear()
            return found

    def _is_zeroed(self) -> bool:
        # Backward and zero_() both change the version of the anchor's gradient. self._version is the version after the
        # last backward, so another version shows a zero_(). clip_grad_norm_ changes the version too, but a program
        # calls zero_grad() between clip_grad_norm_ and the next backward.
        return self._anchor.grad is None or self._anchor.grad._version != self._version

    def _accumulated(self, anchor: torch.Tensor) -> None:
        with self._lock:
            if anchor.grad is not None:
                if not isinstance(anchor.grad, AnchorGradient):  # create_graph=True makes backward replace the gradient
                    anchor.grad = anchor.grad.detach().as_subclass(AnchorGradient)
                self._version = anchor.grad._version
