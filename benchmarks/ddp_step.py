"""Measure a step of DistributedDataParallel on Paceline and on Gloo, in turns in the same processes.

    python benchmarks/ddp_step.py [--ranks 2] [--rounds 8] [--json]

The model is a perceptron of about 25 million parameters; every rank has 16 rows and one thread. The program prints the
median time of a step on each backend, and Gloo's time divided by Paceline's. The losses on both backends must be equal.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

import paceline.torch  # noqa: F401  (registers the backend)

BACKENDS = ("paceline", "gloo")
WIDTHS = (1024, 4096, 4096, 1024)
NUM_ROWS = 16
STEPS_PER_ROUND = 5


def make_model() -> nn.Sequential:
    """Return the model, with the same parameters on every rank."""
    torch.manual_seed(1)
    layers: list[nn.Module] = []
    for width, next_width in itertools.pairwise(WIDTHS):
        layers += [nn.Linear(width, next_width), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Trainee:
    """A model and its optimizer on one backend. The initial parameters are the same on every backend."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.model: nn.Module = DistributedDataParallel(make_model(), process_group=group)
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def step(self, inputs: Tensor, targets: Tensor) -> None:
        start = time.perf_counter()
        self.optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.model(inputs), targets)
        torch.autograd.backward(loss)
        self.optimizer.step()
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(loss.item())


def run_rank(rank: int, num_ranks: int, num_rounds: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
    groups = {backend: dist.new_group(backend=backend) for backend in BACKENDS}
    trainees = {backend: Trainee(group) for backend, group in groups.items()}
    generator = torch.Generator().manual_seed(rank)
    for round_number in range(num_rounds + 1):
        batches = [
            (
                torch.randn(NUM_ROWS, WIDTHS[0], generator=generator),
                torch.randn(NUM_ROWS, WIDTHS[-1], generator=generator),
            )
            for _ in range(STEPS_PER_ROUND)
        ]
        for trainee in trainees.values():
            dist.barrier()
            for inputs, targets in batches:
                trainee.step(inputs, targets)
            if round_number == 0:  # DistributedDataParallel rebuilds its buckets after the first step
                trainee.seconds.clear()
    if rank == 0:
        found = {backend: (trainee.seconds, trainee.losses) for backend, trainee in trainees.items()}
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def measure(num_ranks: int, num_rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        spawn(run_rank, (num_ranks, num_rounds, folder), nprocs=num_ranks)
        found = json.loads(Path(folder, "found.json").read_text())
    medians = {backend: statistics.median(seconds) for backend, (seconds, _) in found.items()}
    pairs = zip(*(losses for _, losses in found.values()), strict=True)
    return {
        "ranks": num_ranks,
        "steps": len(found["paceline"][0]),
        "median_s": medians,
        "ratio": medians["gloo"] / medians["paceline"],
        "largest_loss_difference": max(abs(one - other) for one, other in pairs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=8, help=f"rounds of {STEPS_PER_ROUND} steps on each backend")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.ranks < 1 or options.rounds < 1:
        parser.error("expected at least one rank and one round")
    result = measure(options.ranks, options.rounds)
    if options.json:
        print(json.dumps(result))
        return
    for backend, seconds in result["median_s"].items():
        print(f"{backend:<10}{seconds * 1e3:8.1f} ms a step")
    print(f"ratio     {result['ratio']:8.2f}")
    print(f"losses differ by at most {result['largest_loss_difference']:.2g}")


if __name__ == "__main__":
    main()
