"""A script for ``paceline explain``: train synthetic perceptrons, to measure the strategies' costs on this machine.

``python -m paceline.torch.calibration MODEL...`` trains one model after another. The profiler ends each training.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from paceline.environment import environment
from paceline.torch.embeddings.modules import Embedding
from paceline.torch.strategies.base import Strategy
from paceline.torch.strategies.choosing import make_profiler, strategy

MODELS: Final = {"few": (8, 4), "many": (16, 40), "large": (1024, 4), "rows": (16, 4)}
"""Width and number of the layers: few small parameters, many small parameters, few large ones, and many rows."""
_NUM_ROWS: Final = 100_000
_LOOKUPS: Final = 512
"""Rows that an example of the model with rows looks up."""
_BATCH_SIZE: Final = 16
_NUM_BATCHES: Final = 50
_EPOCHS: Final = 100
_DIRECTORY: Final = "PACELINE_PROFILE"


def main() -> None:
    """Train the models that the arguments name. With the profile's directory ``X/0``, each uses ``X/MODEL/0``."""
    directory, chosen = Path(os.environ[_DIRECTORY]), strategy()
    for name in sys.argv[1:]:
        os.environ[_DIRECTORY] = str(directory.parent / name / directory.name)
        if chosen.world_size == 1:
            chosen = strategy()  # without the layers of the former model; several ranks have one strategy
        chosen.profiler = make_profiler(chosen, environment())
        with contextlib.suppress(SystemExit):
            train(chosen, name)


class RowSums(nn.Module):
    """The sum of each example's rows of a sparse table."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.rows = Embedding(width)

    def forward(self, keys: Tensor) -> Tensor:
        total: Tensor = self.rows(keys).sum(1)
        return total


def train(chosen: Strategy, name: str) -> None:
    """Train a model until the profiler raises SystemExit."""
    width, depth = MODELS[name]
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(width, width) for _ in range(depth)]
    inputs = torch.randn(_BATCH_SIZE * _NUM_BATCHES, width)
    if name == "rows":
        layers.insert(0, RowSums(width))
        inputs = torch.randint(0, _NUM_ROWS, (len(inputs), _LOOKUPS))
    model: nn.Module = nn.Sequential(*layers)
    data = TensorDataset(inputs)
    model, optimizer, loader = chosen.prepare(
        model, torch.optim.Adam(model.parameters(), lr=1e-4), DataLoader(data, _BATCH_SIZE, drop_last=True)
    )
    for _ in range(_EPOCHS):
        for (inputs,) in loader:
            optimizer.zero_grad()
            torch.autograd.backward(model(inputs).square().mean())
            optimizer.step()


if __name__ == "__main__":
    main()
