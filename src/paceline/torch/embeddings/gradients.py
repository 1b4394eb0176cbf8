"""The row gradients of one embedding between its backward passes and the optimizer's step."""

from __future__ import annotations

import copy
import threading
from typing import Any

import torch
from torch import nn

from paceline.errors import UsageError
from paceline.tables.types import Floats, Keys
from paceline.torch.embeddings.staging import HostCopy

RowGradient = tuple[Keys, Floats]
"""Distinct keys, uint64 [n], and their gradients, float32 [n, dim]."""


class AnchorGradient(torch.Tensor):
    """An anchor's gradient: it holds nothing, and refuses a ``GradScaler``, which cannot divide what the rows get."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch's; what it returns is no gradient of an anchor."""
        if func is torch._amp_foreach_non_finite_check_and_unscale_:
            raise UsageError(
                "GradScaler does not reach the gradients of embedding rows, which would be applied as many times too "
                "large as the loss was: train in bfloat16 (torch.autocast(dtype=torch.bfloat16)), which needs none"
            )
        if func is torch.linalg.vector_norm:  # which has no largest element
            return torch.zeros((), device=args[0].device)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Return a plain tensor: a copy is no anchor's."""
        found: torch.Tensor = copy.deepcopy(self.as_subclass(torch.Tensor), memo)
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Be saved as a plain tensor."""
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


class RowGradients:
    """What backward passes have found for the rows of one embedding.

    They live and die with the gradient of the embedding's anchor, an empty parameter that the user's optimizer has: it
    is None after ``zero_grad()``, or (``set_to_none=False``) was written to. Several threads may add at the same time.
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
        """Return what an optimizer's step is to apply: all since the last ``zero_grad()``, as torch's gradients are.

        Where no optimizer has the anchor, nobody zeroes it: then what was taken is forgotten.
        """
        with self._lock:
            if self._anchor.grad is None:
                self._found.clear()
            found = [(keys, copied.wait()) for keys, copied in self._found]
            if not self._keeps:
                self._found.clear()
            return found

    def _is_zeroed(self) -> bool:
        # Who writes to an empty gradient: backward, whose writes are noted here, and zero_(). (clip_grad_norm_ too; but
        # nobody goes on accumulating after it.)
        return self._anchor.grad is None or self._anchor.grad._version != self._version

    def _accumulated(self, anchor: torch.Tensor) -> None:
        with self._lock:
            if anchor.grad is not None:
                if not isinstance(anchor.grad, AnchorGradient):  # with create_graph=True backward makes another one
                    anchor.grad = anchor.grad.detach().as_subclass(AnchorGradient)
                self._version = anchor.grad._version
