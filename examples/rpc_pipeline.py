"""Train a network as a pipeline over two processes, which work on different microbatches at the same time.

    paceline run --strategy all-reduce --nproc-per-node 3 examples/rpc_pipeline.py

Rank 0 is the driver. Ranks 1 and 2 each have half of a network for handwritten digits. The driver cuts a batch into
microbatches and sends them all to the first half without waiting. The output of the first half stays in its process.
The second half gets an RRef to the output and fetches the values directly. `rpc.autograd` sends the gradients back in
the same way. At the end the driver checks that the result equals the result of one process, up to rounding.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from paceline import rpc


class Stage:
    """Half of the network."""

    def __init__(self, number: int) -> None:
        self.layers = make_halves()[number]
        self.lock = threading.Lock()

    def forward(self, inputs: rpc.RRef[torch.Tensor]) -> torch.Tensor:
        """Fetch a microbatch from its owner, and apply the layers to it."""
        values = inputs.to_here()
        with self.lock:
            result: torch.Tensor = self.layers(values)
        return result

    def parameters(self) -> list[rpc.RRef[Any]]:
        """Return references to the parameters, for the optimizer."""
        return [rpc.RRef(parameter) for parameter in self.layers.parameters()]

    def values(self) -> list[torch.Tensor]:
        """Return a copy of the parameters."""
        return [parameter.detach() for parameter in self.layers.parameters()]


def make_halves() -> tuple[nn.Module, nn.Module]:
    """Return the two halves, always with the same parameters."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU()), nn.Sequential(
        nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
    )


def read_digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Return images (float32 [1797, 64]) and labels (int64 [1797])."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return torch.from_numpy(images).float() / 16, torch.from_numpy(labels).long()


class PipelineNetwork:
    """The network, as seen by the driver."""

    def __init__(self, workers: list[str], microbatches: int) -> None:
        self.stages = [rpc.remote(worker, Stage, (number,)) for number, worker in enumerate(workers)]
        self.microbatches = microbatches

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """Return scores (float32 [batch, 10])."""
        ends = []
        for microbatch in images.chunk(self.microbatches):
            half = self.stages[0].remote().forward(rpc.RRef(microbatch))
            ends.append(self.stages[1].rpc_async().forward(half))
        return torch.cat(rpc.wait_all(ends))

    def parameter_rrefs(self) -> list[rpc.RRef[Any]]:
        """Return references to the parameters of all stages."""
        return [rref for stage in self.stages for rref in stage.rpc_sync().parameters()]


def train(options: argparse.Namespace) -> dict[str, float]:
    """Train. Return the results."""
    network = PipelineNetwork(["stage0", "stage1"], options.microbatches)
    optimizer = rpc.optimizer.DistributedOptimizer(torch.optim.SGD, network.parameter_rrefs(), lr=options.lr)
    images, labels = read_digits()
    losses, began = [], time.perf_counter()
    for step in range(options.steps):
        rows = torch.arange(step * 128, step * 128 + 128) % len(images)
        with rpc.autograd.context() as context:
            loss = functional.cross_entropy(network(images[rows]), labels[rows])
            rpc.autograd.backward(context, [loss])
            optimizer.step(context)
        losses.append(loss.item())
    seconds = time.perf_counter() - began
    found = [value for stage in network.stages for value in stage.rpc_sync().values()]
    return {
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "images_per_s": options.steps * 128 / seconds,
        "difference": distance_from_one_process(found, options),
    }


def distance_from_one_process(found: list[torch.Tensor], options: argparse.Namespace) -> float:
    """Return the greatest difference between the parameters and a training in one process."""
    alone = nn.Sequential(*make_halves())
    optimizer = torch.optim.SGD(alone.parameters(), lr=options.lr)
    images, labels = read_digits()
    for step in range(options.steps):
        rows = torch.arange(step * 128, step * 128 + 128) % len(images)
        optimizer.zero_grad()
        functional.cross_entropy(alone(images[rows]), labels[rows]).backward()
        optimizer.step()
    pairs = zip(alone.parameters(), found, strict=True)
    return max(float((one - other).abs().max()) for one, other in pairs)


def main() -> None:
    """Run the driver or a stage."""
    parser = argparse.ArgumentParser(description="Train a network whose halves are two processes.")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.5, help="SGD's learning rate")
    parser.add_argument("--json", action="store_true", help="print one JSON object, and nothing else")
    options = parser.parse_args()
    if os.environ.get("WORLD_SIZE") != "3":
        parser.error("three processes are needed: --nproc-per-node 3")
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    rpc.init_rpc(("driver", "stage0", "stage1")[rank], allow=["__main__"])
    if rank == 0:
        result = train(options)
        if options.json:
            print(json.dumps(result))
        else:
            print(
                f"loss {result['first_loss']:.3f} to {result['last_loss']:.3f}, "
                f"{result['images_per_s']:,.0f} images/s; from one process it differs by {result['difference']:.1e}"
            )
    rpc.shutdown()


if __name__ == "__main__":
    main()
