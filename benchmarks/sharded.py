"""Compare a step of ``--strategy sharded`` with PyTorch's ``fully_shard`` over Gloo and with ``all-reduce``.

    paceline run --strategy sharded --nproc-per-node 2 benchmarks/sharded.py

All contenders train the same perceptron of 25 million parameters (6 layers, Adam, 16 rows per process) in the same
processes, in turns, with one thread each. With ``fully_shard``, each layer is also a unit, and PyTorch's optimizer
updates the shards. The program prints the median milliseconds of a step, and the memory of parameters, gradients and
optimizer state in a process, in MB.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import paceline.torch as pt

WIDTH, LAYERS, ROWS, WARM_UP, STEPS = 2048, 6, 16, 3, 15


def make() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)]
    return nn.Sequential(*layers)


def over_gloo() -> nn.Module:
    mesh = DeviceMesh.from_group(dist.new_group(backend="gloo"), "cpu", mesh_dim_names=("shard",))
    model = make()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def megabytes(model: nn.Module, optimizer: Any) -> float:
    """Return the size of this process's parameters, gradients and optimizer state, in MB."""
    own: list[Any] = list(model.parameters())
    tensors = [
        *own,
        *(parameter.grad for parameter in own if parameter.grad is not None),
        *(value for parameter in own for value in optimizer.state[parameter].values() if value.dim()),
    ]
    local = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
    return float(sum(tensor.numel() * tensor.element_size() for tensor in local)) / 1e6


def main() -> None:
    torch.set_num_threads(1)
    strategy = pt.Sharded()
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(strategy.rank))
    sharded = make()
    prepared = strategy.prepare(sharded, torch.optim.Adam(sharded.parameters(), lr=1e-4))
    trained: dict[str, tuple[nn.Module, Any]] = {"sharded": prepared}
    for name, model in (("fully_shard over gloo", over_gloo()), ("all-reduce", DistributedDataParallel(make()))):
        trained[name] = (model, torch.optim.Adam(model.parameters(), lr=1e-4))
    times: dict[str, list[float]] = {name: [] for name in trained}

    def step(model: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    for _ in range(WARM_UP + STEPS):
        for name, parts in trained.items():
            dist.barrier()
            began = time.perf_counter()
            step(*parts)
            times[name].append(time.perf_counter() - began)
    medians = {name: statistics.median(found[WARM_UP:]) * 1e3 for name, found in times.items()}
    for name, parts in trained.items():
        ratio = medians[name] / medians["fully_shard over gloo"]
        strategy.print(
            f"{name}: {medians[name]:.1f} ms, {ratio:.2f} of fully_shard over gloo, {megabytes(*parts):.0f} MB"
        )
    strategy.close()


if __name__ == "__main__":
    main()
