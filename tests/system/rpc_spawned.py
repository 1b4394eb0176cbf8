"""A program in the style of torch.distributed.rpc. `test_rpc_examples` starts the program and passes the port."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.spawn import spawn

from paceline import rpc
from paceline.rpc import autograd as dist_autograd
from paceline.rpc.optimizer import DistributedOptimizer


def _call_method(method: Callable[..., Any], rref: rpc.RRef[Any], *args: Any) -> Any:
    return method(rref.local_value(), *args)


class Server(nn.Module):
    """Half of a model."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, 1)
        self.answer: torch.futures.Future[int] = torch.futures.Future()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply this half of the model."""
        result: torch.Tensor = self.layer(x)
        return result

    def parameter_rrefs(self) -> list[rpc.RRef[Any]]:
        """Return references to the parameters."""
        return [rpc.RRef(parameter) for parameter in self.parameters()]

    def gradients(self, context: int) -> dict[torch.Tensor, torch.Tensor]:
        """Return the gradients that a context has gathered in this process."""
        return dist_autograd.get_gradients(context)

    @staticmethod
    @rpc.functions.async_execution
    def meet(rref: rpc.RRef[Server], is_last: bool) -> torch.futures.Future[int]:
        """Reply when the last process has arrived."""
        server = rref.local_value()
        if is_last:
            server.answer.set_result(7)
        return server.answer


def train() -> None:
    """Train the model, of which another process has one half."""
    server = rpc.remote("worker1", Server, args=(3,))
    first: Any = rpc.rpc_async(server.owner(), Server.meet, args=(server, False))
    second: Any = rpc.rpc_sync(server.owner(), Server.meet, args=(server, True), timeout=20)
    assert second == first.wait() == 7
    parameters = rpc.rpc_sync(server.owner(), _call_method, args=[Server.parameter_rrefs, server])
    optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.1)
    losses = []
    for _ in range(5):
        with dist_autograd.context() as context:
            loss = (server.rpc_sync().forward(torch.ones(4, 3)) - 1).square().mean()
            dist_autograd.backward(context, [loss])
            gradients = rpc.rpc_sync(server.owner(), _call_method, args=(Server.gradients, server, context))
            optimizer.step(context)
        losses.append(loss.item())
    assert [key.shape for key in gradients] == [item.shape for item in gradients.values()]
    assert rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 1)).tolist() == [2, 2]
    print(losses[0] > losses[-1])


def run_worker(rank: int, world_size: int, port: str) -> None:
    """Run one of the processes."""
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", port
    torch.set_num_threads(1)
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=8, rpc_timeout=30)
    rpc.init_rpc(
        f"worker{rank}",
        rank=rank,
        world_size=world_size,
        rpc_backend_options=options,
        allow=["__main__", "__main__:_call_method", "torch"],
    )
    if rank == 0:
        train()
    rpc.shutdown()


if __name__ == "__main__":
    spawn(run_worker, args=(2, sys.argv[1]), nprocs=2, join=True)
