"""Calls of a model without lasting effects."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn


@contextlib.contextmanager
def undone(module: nn.Module) -> Iterator[None]:
    """Restore buffers, gradients and the random state at the end."""
    kept = {name: buffer.clone() for name, buffer in module.named_buffers() if not buffer.is_meta}
    grads = [(parameter, parameter.grad) for parameter in module.parameters()]
    for parameter, _ in grads:
        parameter.grad = None
    try:
        devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
        with torch.random.fork_rng(devices):
            yield
    finally:
        for parameter, grad in grads:
            parameter.grad = grad
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                if name in kept and not torch.equal(buffer, kept[name]):  # else a pending backward may still use it
                    buffer.copy_(kept[name])
