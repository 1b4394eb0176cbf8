"""Train a small MLP on scikit-learn's handwritten digits (8x8 pixels) under any strategy.

    pip install 'paceline[demo]'
    paceline run --strategy parameter-server --servers 1 --nproc-per-node 2 examples/digits.py

Three quarters of the 1,797 images are for training, and the rest is for the test accuracy. scikit-learn contains the
images. The batch size is per rank. To compare one rank with two ranks, pass half of the batch size to two ranks.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import paceline.torch as pt

TEST_IMAGES = 449


def read_digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Return images (float32 [1797, 64], 0 to 1) and labels (int64 [1797]), always in the same order."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        sys.exit("digits.py: scikit-learn, which has the images, is missing: pip install 'paceline[demo]'")
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return torch.from_numpy(images).float()[order] / 16, torch.from_numpy(labels).long()[order]


def main() -> None:
    """Train, evaluate after the last epoch, and print the results."""
    parser = argparse.ArgumentParser(description="Train a classifier of small handwritten digits.")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=32, help="per rank")
    parser.add_argument("--lr", type=float, default=3e-3, help="Adam's learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end, and nothing else")
    options = parser.parse_args()

    strategy = pt.strategy(seed=options.seed)
    torch.manual_seed(options.seed)
    images, labels = read_digits()
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
    training = TensorDataset(images[:-TEST_IMAGES], labels[:-TEST_IMAGES])
    test = TensorDataset(images[-TEST_IMAGES:], labels[-TEST_IMAGES:])
    loader = DataLoader(training, options.batch_size, shuffle=True)
    model, optimizer, loader = strategy.prepare(model, optimizer, loader)

    strategy.barrier()
    began, examples = time.perf_counter(), 0
    for _ in range(options.epochs):
        for batch, batch_labels in loader:
            optimizer.zero_grad()
            functional.cross_entropy(model(batch), batch_labels).backward()
            optimizer.step()
            examples += len(batch)
    strategy.barrier()
    seconds = strategy.reduce(time.perf_counter() - began, "max")
    with torch.no_grad():
        evaluated = strategy.prepare_loader(DataLoader(test, len(test)))  # each rank evaluates its part
        hits = sum(int((model(batch).argmax(1) == batch_labels).sum()) for batch, batch_labels in evaluated)
    result = {
        "accuracy": strategy.reduce(hits, "sum") / len(test),
        "seconds": seconds,
        "examples_per_s": strategy.reduce(examples, "sum") / seconds,
    }
    if options.json:
        strategy.print(json.dumps(result))
    else:
        strategy.print(f"test accuracy {result['accuracy']:.2%}, {seconds:.1f} s of training")
    strategy.close()


if __name__ == "__main__":
    main()
