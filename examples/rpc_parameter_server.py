"""Build a parameter server from remote calls. The server has half of the network and receives its gradients.

    paceline run --strategy all-reduce --nproc-per-node 3 examples/rpc_parameter_server.py

Rank 0 is the server. The other ranks are trainers, and each trains on its own part of scikit-learn's digits. The
server has the first layer, which all trainers share, and each trainer has its own copy of the last layer. A
trainer's forward pass calls the server. `rpc.autograd` sends the gradients of the first layer back to the server. A
distributed optimizer updates each layer in the process that has it. Trainers do not wait for each other.

`--strategy parameter-server` does the same for whole models, without extra code.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from paceline import rpc

SERVER = "server"
HIDDEN = 32


class SharedLayer:
    """The layer on the server."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.layer = nn.Linear(64, HIDDEN)
        self.num_calls = 0
        self.lock = threading.Lock()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Apply the layer, within the trainer's autograd context."""
        with self.lock:
            self.num_calls += 1
        return torch.relu(self.layer(images))

    def parameters(self) -> list[rpc.RRef[Any]]:
        """Return references to the parameters, for the optimizer."""
        return [rpc.RRef(parameter) for parameter in self.layer.parameters()]

    def calls(self) -> int:
        """Return the number of calls by trainers."""
        return self.num_calls


shared: list[rpc.RRef[SharedLayer]] = []
lock = threading.Lock()


def shared_layer() -> rpc.RRef[SharedLayer]:
    """Return a reference to the server's layer, created by the first trainer's call."""
    with lock:
        if not shared:
            shared.append(rpc.RRef(SharedLayer()))
        return shared[0]


def read_share(rank: int, trainers: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this trainer's images (float32 [n, 64]) and labels (int64 [n])."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    own_rows = slice(rank, None, trainers)
    return torch.from_numpy(images[own_rows]).float() / 16, torch.from_numpy(labels[own_rows]).long()


def train(rank: int, trainers: int, steps: int, lr: float) -> dict[str, Any]:
    """Run a trainer. Return its results."""
    layer = rpc.rpc_sync(SERVER, shared_layer)
    torch.manual_seed(rank)
    last = nn.Linear(HIDDEN, 10)
    parameters = layer.rpc_sync().parameters() + [rpc.RRef(parameter) for parameter in last.parameters()]
    optimizer = rpc.optimizer.DistributedOptimizer(torch.optim.Adam, parameters, lr=lr)
    images, labels = read_share(rank, trainers)
    losses = []
    for step in range(steps):
        rows = torch.arange(step * 32, step * 32 + 32) % len(images)
        with rpc.autograd.context() as context:
            loss = functional.cross_entropy(last(layer.rpc_sync().forward(images[rows])), labels[rows])
            rpc.autograd.backward(context, [loss])
            optimizer.step(context)
        losses.append(loss.item())
    with torch.no_grad():
        right = (last(layer.rpc_sync().forward(images)).argmax(1) == labels).float().mean()
    return {
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "accuracy": float(right),
        "calls": layer.rpc_sync().calls(),
    }


def main() -> None:
    """Run the server or a trainer, depending on the rank."""
    parser = argparse.ArgumentParser(description="Train digits with a parameter server made of remote calls.")
    parser.add_argument("--steps", type=int, default=150, help="steps of each trainer")
    parser.add_argument("--lr", type=float, default=5e-3, help="Adam's learning rate")
    parser.add_argument("--json", action="store_true", help="each trainer prints one JSON object, and nothing else")
    options = parser.parse_args()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if size < 2:
        parser.error("a server and at least one trainer are needed: --nproc-per-node 2 or more")
    torch.set_num_threads(1)
    rpc.init_rpc(SERVER if rank == 0 else f"trainer{rank}", allow=["__main__"])
    if rank > 0:
        result = train(rank - 1, size - 1, options.steps, options.lr)
        if options.json:
            print(json.dumps({"trainer": rank, **result}))
        else:
            print(
                f"trainer {rank}: loss {result['first_loss']:.3f} to {result['last_loss']:.3f}, "
                f"{result['accuracy']:.1%} right"
            )
    rpc.shutdown()  # the server replies to calls until all trainers call shutdown


if __name__ == "__main__":
    main()
