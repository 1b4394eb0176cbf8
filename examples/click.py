"""Train a wide and deep model on a click log under any strategy: embeddings without a vocabulary.

    paceline run --strategy hybrid --servers 1 --nproc-per-node 2 examples/click.py --data train.tsv.gz

The file is a Criteo log, compressed (`.gz`) or not: a row per line, with a label, 13 integers and 26 categories,
separated by tabs. Any other format of `paceline train` works if all rows have the same number of features. The last
fifth of the rows is for the evaluation.

Every feature is a 64-bit key. The wide part learns a weight for each key. The deep part learns a vector for each key,
and an MLP takes the vectors of a row as input (Cheng et al. 2016, "Wide & Deep Learning for Recommender Systems"). The
batch size is per rank.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import paceline
import paceline.torch as pt
from paceline import PacelineError
from paceline.data import open_dataset
from paceline.models.metrics import auc, log_loss

Rows = tuple[torch.Tensor, torch.Tensor]


class Clicks(Dataset[Rows]):
    """Keys (int64 [n, features]) and labels (float32 [n]), read in whole batches."""

    def __init__(self, keys: torch.Tensor, labels: torch.Tensor) -> None:
        self.keys = keys
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, number: int) -> Rows:
        return self.keys[number], self.labels[number]

    def __getitems__(self, numbers: Sequence[int]) -> Rows:
        """Return a whole batch. PyTorch's loader calls this method if it exists."""
        chosen = torch.as_tensor(numbers)
        return self.keys[chosen], self.labels[chosen]


def no_collate(batch: Any) -> Any:
    """Return the batch unchanged, because the data set returns whole batches."""
    return batch


def read_clicks(path: Path, limit: int | None) -> Clicks:
    """Read a click log whose rows all have the same number of features."""
    with open_dataset(path) as dataset:
        keys, labels, count = [], [], 0
        for batch in dataset.batches(65_536):
            widths = np.diff(batch.indptr)
            if (widths != widths[0]).any():
                sys.exit(
                    f"click.py: the rows of {path} have {widths.min()} to {widths.max()} features: "
                    "all need the same number"
                )
            keys.append(batch.keys.reshape(len(widths), -1))
            labels.append(batch.labels)
            count += len(widths)
            if limit is not None and count >= limit:
                break
    # PyTorch supports few operations on uint64. As int64, keys have the same bits.
    bits = np.concatenate(keys)[:limit].view(np.int64)
    return Clicks(torch.from_numpy(bits), torch.from_numpy(np.concatenate(labels)[:limit]))


class WideAndDeep(nn.Module):
    """A model from keys [batch, features] to logits [batch]."""

    def __init__(self, num_features: int, dim: int) -> None:
        super().__init__()
        self.wide = pt.EmbeddingBag(1, mode="sum", initializer=paceline.Zeros())
        self.deep = pt.Embedding(dim, initializer=paceline.Normal(std=0.01))
        self.mlp = nn.Sequential(
            *(nn.Linear(num_features * dim, 64), nn.ReLU()),
            *(nn.Linear(64, 32), nn.ReLU()),
            nn.Linear(32, 1),
        )

    def forward(self, keys: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        logits: torch.Tensor = self.wide(keys) + self.mlp(self.deep(keys).flatten(1))
        return logits.squeeze(1)


def main() -> None:
    """Train, evaluate after each epoch, and print the results."""
    parser = argparse.ArgumentParser(description="Train a wide and deep model on a click log.")
    parser.add_argument("--data", type=Path, required=True, help="a Criteo log")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=256, help="per rank")
    parser.add_argument("--dim", type=int, default=16, help="dimension of the deep embeddings")
    parser.add_argument("--lr", type=float, default=0.02, help="Adagrad's learning rate")
    parser.add_argument("--limit", type=int, help="read only this many rows")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end, and nothing else")
    options = parser.parse_args()

    strategy = pt.strategy(seed=options.seed)
    torch.manual_seed(options.seed)
    try:
        clicks = read_clicks(options.data, options.limit)
    except PacelineError as error:
        sys.exit(f"click.py: {error}")
    split = len(clicks) * 4 // 5
    held_out = Clicks(clicks.keys[split:], clicks.labels[split:])
    model = WideAndDeep(clicks.keys.shape[1], options.dim)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=options.lr)
    # Not shuffled: later clicks may differ from earlier clicks.
    loader = DataLoader(
        Clicks(clicks.keys[:split], clicks.labels[:split]), options.batch_size, collate_fn=no_collate, drop_last=True
    )
    model, optimizer, loader = strategy.prepare(model, optimizer, loader)

    found, seconds, examples = {"auc": float("nan"), "log_loss": float("nan")}, 0.0, 0
    for epoch in range(options.epochs):
        strategy.barrier()
        began = time.perf_counter()
        model.train()
        for keys, labels in loader:
            optimizer.zero_grad()
            functional.binary_cross_entropy_with_logits(model(keys), labels).backward()
            optimizer.step()
            examples += len(labels)
        strategy.barrier()
        seconds += time.perf_counter() - began
        model.eval()
        if strategy.is_main:
            with torch.no_grad():
                batches = [model(keys.to(strategy.device)).sigmoid().cpu() for keys in held_out.keys.split(4096)]
            clicked, guessed = held_out.labels.numpy(), torch.cat(batches).numpy()
            found = {"auc": auc(clicked, guessed), "log_loss": log_loss(clicked, guessed)}
        strategy.barrier()
        if not options.json:
            quality = f"AUC {found['auc']:.4f}, log loss {found['log_loss']:.4f}"
            strategy.print(f"epoch {epoch + 1}: {quality}, {seconds:.1f} s of training")
    rate = strategy.reduce(examples, "sum") / strategy.reduce(seconds, "max")
    if options.json:
        strategy.print(json.dumps({**found, "seconds": seconds, "examples_per_s": rate}))
    strategy.close()


if __name__ == "__main__":
    main()
