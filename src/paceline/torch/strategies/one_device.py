"""The strategy ``one-device``: a plain PyTorch loop in one process on one device."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.environment import environment
from paceline.errors import UsageError
from paceline.meeting.rendezvous import find_rank
from paceline.torch.strategies.base import Strategy
from paceline.torch.strategies.ranks import Ranks


def only_rank(name: str) -> Ranks:
    """Return the ranks for a strategy with one process. Raises UsageError if a launcher has started more processes."""
    _, size = find_rank(environment())
    if size > 1:
        raise UsageError(
            f"strategy {name} has one process, but {size} were started. Start one process, or choose all-reduce, "
            "parameter-server or hybrid"
        )
    return Ranks()


class OneDevice(Strategy):
    """Runs the loop unchanged on one device, with embeddings' rows in this process.

    Tests compare other strategies with it.
    """

    name: ClassVar[str] = "one-device"
    takes_sparse: ClassVar[bool] = True

    def __init__(self, *, device: torch.device | str | None = None, seed: int = 0) -> None:
        super().__init__(only_rank(self.name), device=device, seed=seed)

    def _spread(self, models: list[nn.Module], optimizers: list[Optimizer]) -> tuple[list[nn.Module], list[Optimizer]]:
        if self.embedder is not None:
            self.embedder.step_with(optimizers)
        return models, optimizers
