"""A step of ``--strategy sharded`` beside PyTorch's ``fully_shard`` over Gloo, and beside ``all-reduce``.

    paceline run --strategy sharded --nproc-per-node 2 benchmarks/sharded.py

All train the same perceptron of 25 million parameters (6 layers, Adam, 16 rows per process) in the same processes, in
turns, one thread each. Over Gloo, too, each layer is a unit, and the optimizer is PyTorch's on the shards. Printed:
median milliseconds of a step, and what each process holds: parameters, gradients and the optimizer's state, in MB.
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


def held_mb(model: nn.Module, optimizer: Any) -> float:
    """Return what this process holds of the parameters, their gradients and their state."""
    own: list[Any] = list(model.parameters())
    tensors = [
        *own,
        *(each.grad for each in own if each.grad is not None),
        *(value for each in own for value in optimizer.state[each].values() if value.dim()),
    ]
    local = [each.to_local() if hasattr(each, "to_local") else each for each in tensors]
    return float(sum(each.numel() * each.element_size() for each in local)) / 1e6


def main() -> None:
    torch.set_num_threads(1)
    strategy = pt.Sharded()
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(strategy.rank))
    sharded = make()
    ours = strategy.prepare(sharded, torch.optim.Adam(sharded.parameters(), lr=1e-4))
    trained: dict[str, tuple[nn.Module, Any]] = {"sharded": ours}
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
            f"{name}: {medians[name]:.1f} ms, {ratio:.2f} of fully_shard over gloo, {held_mb(*parts):.0f} MB"
        )
    strategy.close()


if __name__ == "__main__":
    main()
