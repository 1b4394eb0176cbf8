"""DistributedDataParallel as the strategies use it: one rank's copy of the model, told from the outside by little."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from paceline.errors import UsageError


class Replica(DistributedDataParallel):
    """DistributedDataParallel that looks like the model it wraps: attributes and state dict are the model's.

    Without gradients (evaluation) the model is called alone: a rank may do so as often as it likes.
    """

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Call the model; what gradients come of it are averaged."""
        if not torch.is_grad_enabled():
            return self.module(*inputs, **options)
        try:
            return super().forward(*inputs, **options)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if "finished reduction in the prior iteration" not in str(error):
                raise
            text = describe_unused(torch.distributed.get_rank(), list(without_gradient(self.module)))
        raise UsageError(text)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self._modules.get("module")
            if module is None:
                raise
            return getattr(module, name)

    def state_dict(self, *values: Any, **options: Any) -> Any:
        """Return the model's own state."""
        return self.module.state_dict(*values, **options)

    def load_state_dict(self, *values: Any, **options: Any) -> Any:
        """Load the model's own state."""
        return self.module.load_state_dict(*values, **options)


def without_gradient(model: nn.Module) -> Iterator[str]:
    """Yield the names of parameters that should have got a gradient and have none; anchors of embeddings aside."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.grad is None and parameter.numel():
            yield name


def raise_for_unused(model: nn.Module, optimizer: Optimizer, rank: int, leave: Callable[[], None]) -> None:
    """Have every ``optimizer.step()`` raise UsageError if a parameter has no gradient: reduction would wait for it.

    `leave` is called before: the other ranks, which do wait, learn by it that this one will not come.
    """
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad and each.numel()}

    def check(*_: Any) -> None:
        for parameter in trained.values():
            if parameter.grad is None and parameter.requires_grad:
                leave()
                raise_for_replaced(model, trained, rank)
                raise UsageError(describe_unused(rank, list(without_gradient(model))))

    optimizer.register_step_pre_hook(check)


def raise_for_replaced(model: nn.Module, prepared: Mapping[str, nn.Parameter], rank: int) -> None:
    """Raise UsageError if the model has another parameter now under one of the names of those that were `prepared`."""
    now = dict(model.named_parameters())
    for name, parameter in prepared.items():
        if name in now and now[name] is not parameter:
            raise UsageError(
                f"rank {rank}: parameter {name!r} was replaced by another one after prepare(), and the optimizer still "
                "has the first: make such changes before, or write into the parameter (weight.copy_(...))"
            )


def describe_unused(rank: int, names: list[str]) -> str:
    """Say which parameters had no part in a rank's loss."""
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    which = f"the parameters {shown}" if names else "some parameters"
    return (
        f"rank {rank}: {which} got no gradient from this backward pass, and the other ranks wait for it: leave them "
        "out of the model (or requires_grad_(False)), or choose AllReduce(find_unused_parameters=True)"
    )
