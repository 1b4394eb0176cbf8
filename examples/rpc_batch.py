"""Reply to the requests of many processes with one step: the server's function returns a future.

    paceline run --strategy all-reduce --nproc-per-node 3 examples/rpc_batch.py

Rank 0 has a model. The other ranks are trainers: they compute gradients on their own data and send them to rank 0. The
function `update` returns a future immediately, and `rpc.async_execution` sends the reply when the future has a result.
So no thread of the server waits. After all trainers have sent a gradient, the server averages the gradients, makes a
step, and sends the new parameters to all trainers. At the end each trainer checks that the result equals the result of
one process on the whole batch.
"""

from __future__ import annotations

import argparse
import json
import os
import threading

import torch
from torch import nn
from torch.nn import functional

from paceline import rpc

SERVER = "server"


class BatchServer:
    """A model that makes a step after all trainers have sent their gradients."""

    def __init__(self, trainers: int, lr: float) -> None:
        self.model = make_model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=0.9)
        self.trainers = trainers
        self.lock = threading.Lock()
        self.given: list[list[torch.Tensor]] = []
        self.answer: rpc.Future[list[torch.Tensor]] = rpc.Future()
        self.steps = 0

    def parameters(self) -> list[torch.Tensor]:
        """Return a copy of the parameters."""
        return [parameter.detach().clone() for parameter in self.model.parameters()]

    @rpc.async_execution
    def update(self, gradients: list[torch.Tensor]) -> rpc.Future[list[torch.Tensor]]:
        """Add one trainer's gradients. Return a future of the parameters after the common step."""
        with self.lock:
            self.given.append(gradients)
            answer = self.answer
            if len(self.given) < self.trainers:
                return answer
            for parameter, *parameter_gradients in zip(self.model.parameters(), *self.given, strict=True):
                parameter.grad = torch.stack(parameter_gradients).mean(0)
            self.optimizer.step()
            self.given, self.answer, self.steps = [], rpc.Future(), self.steps + 1
            result = self.parameters()
        answer.set_result(result)
        return answer

    def num_steps(self) -> int:
        """Return the number of steps."""
        return self.steps


shared: list[rpc.RRef[BatchServer]] = []
lock = threading.Lock()


def batch_server(trainers: int, lr: float) -> rpc.RRef[BatchServer]:
    """Return a reference to the server, created by the first trainer's call."""
    with lock:
        if not shared:
            shared.append(rpc.RRef(BatchServer(trainers, lr)))
        return shared[0]


def make_model() -> nn.Module:
    """Return the initial model, the same in every process."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def make_data(step: int, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the selected rows of a step's batch: inputs (float32 [n, 8]) and targets (float32 [n, 1])."""
    inputs = torch.randn(48, 8, generator=torch.Generator().manual_seed(step))
    return inputs[rows], (inputs[rows, :1] * inputs[rows, 1:2]).sin()


def train(rank: int, trainers: int, steps: int, lr: float) -> dict[str, float]:
    """Run a trainer. Return its results."""
    server = rpc.rpc_sync(SERVER, batch_server, (trainers, lr))
    model = make_model()
    losses = []
    for step in range(steps):
        inputs, targets = make_data(step, slice(rank, None, trainers))
        loss = functional.mse_loss(model(inputs), targets)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        for parameter, new in zip(model.parameters(), server.rpc_sync().update(list(gradients)), strict=True):
            parameter.data.copy_(new)
        losses.append(loss.item())
    return {
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "steps": server.rpc_sync().num_steps(),
        "difference": distance_from_one_process(model, steps, lr),
    }


def distance_from_one_process(model: nn.Module, steps: int, lr: float) -> float:
    """Return the greatest difference between the parameters and a training on whole batches in one process."""
    alone = make_model()
    optimizer = torch.optim.SGD(alone.parameters(), lr=lr, momentum=0.9)
    for step in range(steps):
        inputs, targets = make_data(step, slice(None))
        optimizer.zero_grad()
        functional.mse_loss(alone(inputs), targets).backward()
        optimizer.step()
    pairs = zip(alone.parameters(), model.parameters(), strict=True)
    return max(float((one - other).abs().max()) for one, other in pairs)


def main() -> None:
    """Run the server or a trainer, depending on the rank."""
    parser = argparse.ArgumentParser(description="Synchronous training with one reply to all trainers.")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lr", type=float, default=0.05, help="SGD's learning rate")
    parser.add_argument("--json", action="store_true", help="each trainer prints one JSON object, and nothing else")
    options = parser.parse_args()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if size < 2 or 48 % (size - 1):
        parser.error("a server and 1, 2, 3, 4, 6 or 8 trainers are needed: --nproc-per-node 2 to 9")
    torch.set_num_threads(1)
    rpc.init_rpc(SERVER if rank == 0 else f"trainer{rank}", allow=["__main__"])
    if rank > 0:
        result = train(rank - 1, size - 1, options.steps, options.lr)
        if options.json:
            print(json.dumps({"trainer": rank, **result}))
        else:
            print(
                f"trainer {rank}: loss {result['first_loss']:.4f} to {result['last_loss']:.4f}, "
                f"{result['steps']} steps; from one process it differs by {result['difference']:.1e}"
            )
    rpc.shutdown()


if __name__ == "__main__":
    main()
