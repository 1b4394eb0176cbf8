"""Measure the additional time of a step whose batch is divided into microbatches, as in a pipeline."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from paceline.torch.strategies.splitting import split

_PARTS: Final = 8
_REPEATS: Final = 3
_LONG_S: Final = 1.0
"""Longer batches are not measured, because microbatches add little to them."""


class MicrobatchTimes:
    """Stores the arguments of the model's last call, and runs the model on parts of these arguments."""

    def __init__(self, module: nn.Module, synchronize: Callable[[], None]) -> None:
        """`synchronize` waits until the device of the model has ended its work."""
        self._module, self._synchronize = module, synchronize
        self._arguments: tuple[Any, Any] | None = None
        self._hook = module.register_forward_pre_hook(self._keep, with_kwargs=True)

    def _keep(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._arguments = (args, kwargs)

    def measure(self) -> float:
        """Return the additional seconds of each microbatch; 0 for a model whose batches cannot be divided.

        The gradients are added to those of the model, and buffers change.
        """
        self._hook.remove()
        if self._arguments is None:
            return 0.0
        leaves, structure = pytree.tree_flatten(self._arguments)
        try:
            parts = split(leaves, _PARTS)
            whole_s = self._run_s([leaves], structure)
            if len(parts) == 1 or whole_s > _LONG_S:
                return 0.0
            times = [(self._run_s([leaves], structure), self._run_s(parts, structure)) for _ in range(1 + _REPEATS)]
        except (Exception, SystemExit):  # the model's own error, because it needs the whole batch
            return 0.0
        more_s = statistics.median(divided_s - whole_s for whole_s, divided_s in times[1:])
        return max(more_s, 0.0) / (len(parts) - 1)

    def _run_s(self, parts: Sequence[Sequence[Any]], structure: Any) -> float:
        """Return the seconds of the forward and backward of each part."""
        began_s = time.perf_counter()
        for part in parts:
            args, kwargs = pytree.tree_unflatten([*part], structure)
            ends = [
                leaf
                for leaf in pytree.tree_leaves(self._module(*args, **kwargs))
                if isinstance(leaf, Tensor) and leaf.requires_grad
            ]
            torch.autograd.backward(ends, [torch.ones_like(end) for end in ends])
        self._synchronize()
        return time.perf_counter() - began_s
