"""A script for ``paceline explain``: train a synthetic perceptron, to measure the strategies' costs on this machine.

``python -m paceline.torch.calibration MODEL`` runs until the profiler ends it.
"""

from __future__ import annotations

import sys
from typing import Final

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline.torch.strategies.choosing import strategy

MODELS: Final = {"few": (8, 1), "many": (16, 40), "large": (1024, 4)}
"""Width and number of the layers: few small parameters, many small parameters, and few large parameters."""
_BATCH_SIZE: Final = 16
_NUM_BATCHES: Final = 50
_EPOCHS: Final = 100


def main() -> None:
    """Train the model that the first argument names."""
    width, depth = MODELS[sys.argv[1]]
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(width, width) for _ in range(depth)]
    model: nn.Module = nn.Sequential(*layers)
    data = TensorDataset(torch.randn(_BATCH_SIZE * _NUM_BATCHES, width))
    chosen = strategy()
    model, optimizer, loader = chosen.prepare(
        model, torch.optim.SGD(model.parameters(), lr=1e-4), DataLoader(data, _BATCH_SIZE, drop_last=True)
    )
    for _ in range(_EPOCHS):
        for (inputs,) in loader:
            optimizer.zero_grad()
            torch.autograd.backward(model(inputs).square().mean())
            optimizer.step()


if __name__ == "__main__":
    main()
