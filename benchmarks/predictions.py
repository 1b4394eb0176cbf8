"""Compare the predictions of ``paceline explain`` with measurements, for several models and strategies.

    python benchmarks/predictions.py [--models perceptron cnn transformer clicks] [--ranks 2] [--runs 3] [--json]

Each run measures a model in independent processes, predicts its step under each strategy, and then runs it under this
strategy. The program prints the median prediction and measurement of all runs. For each model it prints whether the
strategy with the most predicted examples per second is the measured one, or within 5% of it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline.torch as pt
from paceline.planning.comparing import StepComparison, compare
from paceline.planning.options import CompareOptions

STRATEGIES = "one-device,all-reduce,parameter-server,parameter-server:bounded:4,sharded"
WITH_ROWS = "one-device,all-reduce,parameter-server,hybrid:sequential,hybrid:bounded:4"
BATCHES = 60
CLOSE = 0.95


class Transformer(nn.Module):
    """A small language model of 0.8 million parameters."""

    def __init__(self, width: int = 128, words: int = 500) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(width, words)

    def forward(self, words: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(self.words(words)))
        return logits.mean(1)


class Clicks(nn.Module):
    """A model of clicks with 26 categorical features, whose rows are in a sparse table."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = pt.Embedding(16)
        self.network = nn.Sequential(nn.Linear(26 * 16, 256), nn.ReLU(), nn.Linear(256, 10))

    def forward(self, keys: Tensor) -> Tensor:
        logits: Tensor = self.network(self.rows(keys).flatten(1))
        return logits


def make_model(name: str) -> tuple[nn.Module, Tensor, int]:
    """Return a model, its inputs and the batch size. Labels are 10 classes."""
    torch.manual_seed(0)
    if name == "perceptron":
        layers = [nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)]
        return nn.Sequential(*layers), torch.randn(64 * BATCHES, 512), 64
    if name == "cnn":
        convolutions = [nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3), nn.ReLU()]
        head = [nn.MaxPool2d(2), nn.Flatten(), nn.Linear(800, 128), nn.ReLU(), nn.Linear(128, 10)]
        return nn.Sequential(*convolutions, *head), torch.randn(64 * BATCHES, 1, 28, 28), 64
    if name == "transformer":
        return Transformer(), torch.randint(0, 500, (8 * BATCHES, 32)), 8
    return Clicks(), torch.randint(0, 1 << 40, (256 * BATCHES, 26)) % 100_003, 256


def train(name: str) -> None:
    """Train a model until the profiler ends the process."""
    model, inputs, batch_size = make_model(name)
    data = TensorDataset(inputs, torch.randint(0, 10, (len(inputs),)))
    strategy = pt.strategy()
    model, optimizer, loader = strategy.prepare(
        model, torch.optim.Adam(model.parameters()), DataLoader(data, batch_size, shuffle=True)
    )
    for _ in range(1000):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()


def measure(name: str, ranks: int, runs: int) -> dict[str, list[StepComparison]]:
    """Return the comparisons of a model by strategy."""
    options = CompareOptions(
        script=__file__,
        arguments=["--train", name],
        nproc_per_node=ranks,
        strategies=WITH_ROWS if name == "clicks" else STRATEGIES,
        steps=50,
    )
    found: dict[str, list[StepComparison]] = defaultdict(list)
    for _ in range(runs):
        for comparison in compare(options, lambda text: print(text, file=sys.stderr, flush=True)):
            found[comparison.prediction.candidate.label].append(comparison)
    return found


def summarize(name: str, found: dict[str, list[StepComparison]]) -> list[dict[str, Any]]:
    """Return a line for each strategy, with medians over the runs."""
    lines = []
    for label, comparisons in found.items():
        predicted_s = statistics.median(comparison.prediction.step_s for comparison in comparisons)
        measured_s = statistics.median(comparison.step_s for comparison in comparisons)
        rates = [
            statistics.median(rates)
            for rates in zip(*((c.prediction.examples_per_s, c.examples_per_s) for c in comparisons), strict=True)
        ]
        lines.append(
            {
                "model": name,
                "strategy": label,
                "predicted_s": predicted_s,
                "measured_s": measured_s,
                "error": predicted_s / measured_s - 1,
                "predicted_per_s": rates[0],
                "measured_per_s": rates[1],
            }
        )
    return lines


def has_found_winner(lines: list[dict[str, Any]]) -> bool:
    """Return whether the strategy with the best prediction is the fastest one, or almost as fast."""
    chosen = max(lines, key=lambda line: line["predicted_per_s"])
    return bool(chosen["measured_per_s"] >= CLOSE * max(line["measured_per_s"] for line in lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ["perceptron", "cnn", "transformer", "clicks"]
    parser.add_argument("--models", nargs="+", choices=names, default=names)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--train", choices=names, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train is not None:
        train(options.train)
        return
    all_lines: list[dict[str, Any]] = []
    num_found = 0
    if not options.json:
        print(f"{'model':<12}{'strategy':<30}{'predicted ms':>13}{'measured ms':>13}{'error':>8}")
    for name in options.models:
        lines = summarize(name, measure(name, options.ranks, options.runs))
        all_lines += lines
        num_found += has_found_winner(lines)
        for line in lines:
            if options.json:
                print(json.dumps(line), flush=True)
                continue
            print(
                f"{name:<12}{line['strategy']:<30}{line['predicted_s'] * 1e3:>13.2f}{line['measured_s'] * 1e3:>13.2f}"
                f"{line['error']:>+8.0%}",
                flush=True,
            )
    errors = [abs(line["error"]) for line in all_lines]
    if not options.json:
        print(f"median error {statistics.median(errors):.0%}, worst {max(errors):.0%}")
        print(f"the predicted winner was within 5% of the fastest for {num_found} of {len(options.models)} models")


if __name__ == "__main__":
    main()
