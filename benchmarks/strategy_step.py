"""Measure a training step under a strategy and a reference, in turns in the same processes.

    python benchmarks/strategy_step.py [--strategies one-device all-reduce parameter-server] [--rounds 8] [--json]

For ``one-device``, the program measures an epoch of a small perceptron on synthetic data after ``prepare()``. The
reference is a PyTorch loop without it. For ``all-reduce`` and ``parameter-server`` (sequential, 1 server), it measures
a step of a perceptron of about 25 million parameters, on 2 ranks with 16 rows and one thread each. The reference is
DistributedDataParallel on Gloo. The program prints medians, and the ratio of the strategy's time to the reference's
time.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.torch import AllReduce, OneDevice, ParameterServer, Strategy

WIDTHS = (1024, 4096, 4096, 1024)
NUM_ROWS = 16
NUM_RANKS = 2
STEPS_PER_ROUND = 5
KINDS: dict[str, Callable[[], Strategy]] = {"all-reduce": AllReduce, "parameter-server": ParameterServer}


def perceptron(widths: tuple[int, ...]) -> nn.Module:
    torch.manual_seed(1)
    layers: list[nn.Module] = []
    for width, next_width in itertools.pairwise(widths):
        layers += [nn.Linear(width, next_width), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def train(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, targets: Tensor) -> None:
    optimizer.zero_grad()
    torch.autograd.backward(nn.functional.mse_loss(model(inputs), targets))
    optimizer.step()


def one_device(num_rounds: int) -> dict[str, Any]:
    """Measure whole epochs, including loading, with one thread."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(6400, 64, generator=generator), torch.randn(6400, 1, generator=generator))
    trainees: dict[str, Any] = {}
    for name in ("plain", "one-device"):
        model = perceptron((64, 128, 128, 1))
        trained: list[Any] = [model, torch.optim.SGD(model.parameters(), lr=0.01), DataLoader(data, 64, shuffle=True)]
        trainees[name] = trained if name == "plain" else OneDevice().prepare(*trained)
    seconds: dict[str, list[float]] = {name: [] for name in trainees}
    for number in range(2 * num_rounds + 1):
        for name in sorted(trainees, reverse=bool(number % 2)):
            model, optimizer, loader = trainees[name]
            start = time.perf_counter()
            for inputs, targets in loader:
                train(model, optimizer, inputs, targets)
            if number:
                seconds[name].append(time.perf_counter() - start)
    steps = len(trainees["plain"][2])
    return {name: [epoch_s / steps for epoch_s in found] for name, found in seconds.items()}


def run_rank(rank: int, names: list[str], num_rounds: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(NUM_RANKS), LOCAL_RANK=str(rank))
    dist.init_process_group("paceline", init_method=f"file://{folder}/store", rank=rank, world_size=NUM_RANKS)
    models: dict[str, Any] = {"gloo": perceptron(WIDTHS)}
    optimizers = {"gloo": torch.optim.SGD(models["gloo"].parameters(), lr=0.01)}
    models["gloo"] = DistributedDataParallel(models["gloo"], process_group=dist.new_group(backend="gloo"))
    strategies = {name: KINDS[name]() for name in names}
    for name, strategy in strategies.items():
        model = perceptron(WIDTHS)
        models[name], optimizers[name] = strategy.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    generator = torch.Generator().manual_seed(rank)
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for round_number in range(num_rounds + 1):
        batches = [
            tuple(torch.randn(NUM_ROWS, width, generator=generator) for width in (WIDTHS[0], WIDTHS[-1]))
            for _ in range(STEPS_PER_ROUND)
        ]
        for name, model in models.items():
            dist.barrier()
            for inputs, targets in batches:
                start = time.perf_counter()
                train(model, optimizers[name], inputs, targets)
                if round_number:  # DistributedDataParallel rebuilds its buckets after the first step
                    seconds[name].append(time.perf_counter() - start)
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(seconds))
    dist.barrier()
    for strategy in strategies.values():
        strategy.close()
    dist.destroy_process_group()


def several_ranks(names: list[str], num_rounds: int) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        if "parameter-server" in names:
            consistency = paceline.Sequential(aggregate="mean")
            cluster = stack.enter_context(paceline.local_cluster(workers=NUM_RANKS, consistency=consistency))
            os.environ.update(PACELINE_SCHEDULER=cluster.scheduler, PACELINE_TOKEN=cluster.token)
        spawn(run_rank, (names, num_rounds, folder), nprocs=NUM_RANKS)
        found: dict[str, Any] = json.loads(Path(folder, "found.json").read_text())
        return found


def show(name: str, found: dict[str, Any], reference: str) -> dict[str, Any]:
    medians = {contender: statistics.median(found[contender]) for contender in (reference, name)}
    pairs = zip(found[name], found[reference], strict=True)
    return {
        "strategy": name,
        "median_s": medians,
        "ratio": medians[name] / medians[reference],
        "paired_ratio": statistics.median(strategy_s / reference_s for strategy_s, reference_s in pairs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", nargs="+", choices=["one-device", *KINDS], default=["one-device", *KINDS])
    parser.add_argument("--rounds", type=int, default=8, help=f"rounds of {STEPS_PER_ROUND} steps under each strategy")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results = []
    if "one-device" in options.strategies:
        results.append(show("one-device", one_device(options.rounds), "plain"))
    names = [name for name in options.strategies if name in KINDS]
    if names:
        found = several_ranks(names, options.rounds)
        results += [show(name, found, "gloo") for name in names]
    if options.json:
        print(json.dumps(results))
        return
    for result in results:
        for name, seconds in result["median_s"].items():
            print(f"{name:<18}{seconds * 1e3:9.3f} ms a step")
        print(f"{'ratio':<18}{result['ratio']:9.3f}  (step by step {result['paired_ratio']:.3f})\n")


if __name__ == "__main__":
    main()
