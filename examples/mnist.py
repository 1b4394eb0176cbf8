"""Train an MLP or a small CNN on MNIST, the handwritten digits, under any strategy.

    paceline run --strategy all-reduce --nproc-per-node 2 examples/mnist.py --data DIR --model cnn --epochs 2

DIR has the four files of MNIST, compressed with gzip or not: train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz,
t10k-images-idx3-ubyte.gz, t10k-labels-idx1-ubyte.gz (http://yann.lecun.com/exdb/mnist, with many mirrors).
The batch size is per rank. Plain `python examples/mnist.py …` trains on one device.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import paceline.torch as pt


def read_idx(folder: Path, name: str) -> torch.Tensor:
    """Return the uint8 tensor of an IDX file: two zeros, the type 8, the number of dimensions, big-endian sizes."""
    path = next((path for path in (folder / f"{name}.gz", folder / name) if path.exists()), None)
    if path is None:
        sys.exit(f"mnist.py: {folder} has no file {name}.gz. Pass the folder of the four MNIST files as --data")
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    if data[:3] != b"\0\0\x08":
        sys.exit(f"mnist.py: {path} is not an IDX file of bytes")
    shape = [int.from_bytes(data[4 + 4 * i : 8 + 4 * i], "big") for i in range(data[3])]
    return torch.frombuffer(bytearray(data[4 + 4 * len(shape) :]), dtype=torch.uint8).view(shape)


def read_split(folder: Path, name: str, limit: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images (float32 [n, 1, 28, 28], mean about 0, deviation about 1) and labels (int64 [n])."""
    images = read_idx(folder, f"{name}-images-idx3-ubyte")[:limit].float().unsqueeze(1)
    return (images / 255 - 0.1307) / 0.3081, read_idx(folder, f"{name}-labels-idx1-ubyte")[:limit].long()


def make_model(kind: str) -> nn.Module:
    """Return a model from 28x28 images to 10 scores."""
    if kind == "mlp":
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * 7 * 7, 128), nn.ReLU(), nn.Linear(128, 10)),
    )


@torch.no_grad()
def count_right(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> int:
    """Return the number of correctly classified images."""
    model.eval()
    pairs = zip(images.split(500), labels.split(500), strict=True)
    return sum(int((model(batch).argmax(1) == batch_labels).sum()) for batch, batch_labels in pairs)


def main() -> None:
    """Train, evaluate after each epoch, and print the accuracy."""
    parser = argparse.ArgumentParser(description="Train a classifier of handwritten digits.")
    parser.add_argument("--data", type=Path, required=True, help="folder of the four MNIST files")
    parser.add_argument("--model", choices=("mlp", "cnn"), default="cnn")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=64, help="per rank")
    parser.add_argument("--lr", type=float, default=1e-3, help="Adam's learning rate")
    parser.add_argument("--limit", type=int, help="train and evaluate on this many images only")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, help="write a checkpoint to this folder at the end")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end, and nothing else")
    options = parser.parse_args()

    strategy = pt.strategy(seed=options.seed)
    torch.manual_seed(options.seed)
    images, labels = read_split(options.data, "train", options.limit)
    # Each rank evaluates its part.
    test_images, test_labels = (
        tensor[strategy.rank :: strategy.world_size].to(strategy.device)
        for tensor in read_split(options.data, "t10k", options.limit)
    )
    model = make_model(options.model)
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
    loader = DataLoader(TensorDataset(images, labels), options.batch_size, shuffle=True)
    model, optimizer, loader = strategy.prepare(model, optimizer, loader)

    accuracy, seconds, examples = 0.0, 0.0, 0
    for epoch in range(options.epochs):
        began = time.perf_counter()
        model.train()
        for batch, batch_labels in loader:
            optimizer.zero_grad()
            functional.cross_entropy(model(batch), batch_labels).backward()
            optimizer.step()
            examples += len(batch)
        seconds += time.perf_counter() - began
        hits = strategy.reduce(count_right(model, test_images, test_labels), "sum")
        accuracy = hits / strategy.reduce(len(test_labels), "sum")
        if not options.json:
            strategy.print(f"epoch {epoch + 1}: test accuracy {accuracy:.2%}, {seconds:.1f} s of training")
    rate = strategy.reduce(examples, "sum") / strategy.reduce(seconds, "max")
    if options.save:
        strategy.save(options.save)
    if options.json:
        strategy.print(json.dumps({"accuracy": accuracy, "seconds": seconds, "examples_per_s": rate}))
    strategy.close()


if __name__ == "__main__":
    main()
