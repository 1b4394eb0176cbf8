"""Wide and deep on a click log: embeddings without a vocabulary, the same file under every strategy.

    paceline run --strategy hybrid --servers 1 --nproc-per-node 2 examples/click.py --data train.tsv.gz

The file is a Criteo log: tab-separated, a label, 13 integers, 26 categories, a row a line, `.gz` or not (any format
that `paceline train` reads will do if every row has as many features). The last fifth of it is for the evaluation.
Every feature is a 64-bit key: the wide part learns a weight for each, the deep part a vector, which an MLP goes over
(Cheng et al. 2016, "Wide & Deep Learning for Recommender Systems"). The batch size is per rank.
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
    """Rows of keys (int64 [n, features]) and labels (float32 [n]), taken a batch at a time."""

    def __init__(self, keys: torch.Tensor, labels: torch.Tensor) -> None:
        self.keys = keys
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, number: int) -> Rows:
        return self.keys[number], self.labels[number]

    def __getitems__(self, numbers: Sequence[int]) -> Rows:
        """Return a whole batch: PyTorch's loader asks for it where there is such a method."""
        chosen = torch.as_tensor(numbers)
        return self.keys[chosen], self.labels[chosen]


def as_it_is(batch: Any) -> Any:
    """Collate nothing: a batch comes whole."""
    return batch


def read_clicks(path: Path, limit: int | None) -> Clicks:
    """Read a click log whose rows have equally many features."""
    with open_dataset(path) as dataset:
        keys, labels, count = [], [], 0
        for batch in dataset.batches(65_536):
            widths = np.diff(batch.indptr)
            if (widths != widths[0]).any():
                sys.exit(
                    f"click.py: the rows of {path} have {widths.min()} to {widths.max()} features: all need as many"
                )
            keys.append(batch.keys.reshape(len(widths), -1))
            labels.append(batch.labels)
            count += len(widths)
            if limit is not None and count >= limit:
                break
    # PyTorch's uint64 can do little: the same bits as int64 are the same keys.
    bits = np.concatenate(keys)[:limit].view(np.int64)
    return Clicks(torch.from_numpy(bits), torch.from_numpy(np.concatenate(labels)[:limit]))


class WideAndDeep(nn.Module):
    """Keys [batch, features] to logits [batch]."""

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
    """Train, evaluate after each epoch, say how it went."""
    parser = argparse.ArgumentParser(description="Train a wide and deep model on a click log.")
    parser.add_argument("--data", type=Path, required=True, help="a Criteo log")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=256, help="per rank")
    parser.add_argument("--dim", type=int, default=16, help="of the deep embeddings")
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
    # In the file's order, as clicks come.
    loader = DataLoader(
        Clicks(clicks.keys[:split], clicks.labels[:split]), options.batch_size, collate_fn=as_it_is, drop_last=True
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
