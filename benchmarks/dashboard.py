"""Train a small network with one slow rank, for the picture of the dashboard in the docs.

paceline run --strategy parameter-server --servers 2 --nproc-per-node 4 --report report.html benchmarks/dashboard.py
"""

from __future__ import annotations

import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline.torch as pt

SECONDS, STEP_S = 40.0, 0.02
"""The time of the training, and the least time of a step; the last rank needs twice as long."""


def main() -> None:
    """Train on random images until the time has passed."""
    strategy = pt.strategy()
    torch.manual_seed(0)
    inputs = torch.randn(4096, 256)
    labels = (inputs @ torch.randn(256, 10)).argmax(1)
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    loader = DataLoader(TensorDataset(inputs, labels), 32, shuffle=True)
    model, optimizer, loader = strategy.prepare(model, optimizer, loader)
    began, is_slow = time.monotonic(), strategy.rank == strategy.world_size - 1
    is_over = False
    while not is_over:
        for batch, batch_labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(batch), batch_labels)
            loss.backward()
            time.sleep(STEP_S * (1 + is_slow))
            optimizer.step()
            strategy.report_progress(loss=loss.item())
        is_over = strategy.reduce(time.monotonic() - began, "max") > SECONDS
    strategy.close()


if __name__ == "__main__":
    main()
