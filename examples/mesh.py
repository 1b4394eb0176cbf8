"""Train on a mesh of 2 by 2 processes, with tensor parallelism within pairs and sharded data parallelism between pairs.

    paceline run --nproc-per-node 4 examples/mesh.py

A small network learns to reverse its input. The mesh has the dimensions "tensor" and "data". Over the dimension
"tensor", the first layer of each block is cut by columns and the second layer by rows. So a block needs only one
all-reduce. Each part of a parameter is then sharded over the dimension "data". The processes of a pair read the same
examples.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import paceline.torch  # noqa: F401  (registers the backend)


class Block(nn.Module):
    """Two layers with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of the vectors [batch, width] and the layers' output."""
        added: torch.Tensor = self.down(torch.relu(self.up(self.norm(x))))
        return x + added


def main() -> None:
    """Train, and print the number of parameters per process."""
    parser = argparse.ArgumentParser(description="Train a network that is cut in two dimensions.")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--tensor-parallel", type=int, default=2, help="processes that share each layer")
    options = parser.parse_args()

    dist.init_process_group("paceline")
    rank, size = dist.get_rank(), dist.get_world_size()
    if size % options.tensor_parallel:
        raise SystemExit(
            f"mesh.py: {size} processes, expected a multiple of --tensor-parallel {options.tensor_parallel}"
        )
    shape = (size // options.tensor_parallel, options.tensor_parallel)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))

    torch.manual_seed(0)
    model = nn.Sequential(Block(options.width), Block(options.width))
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    for block in model:
        parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    torch.manual_seed(mesh.get_local_rank("data"))
    for step in range(options.steps):
        x = torch.randn(16, options.width)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), x.flip(1))
        loss.backward()
        optimizer.step()
        mean = loss.detach()
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        if rank == 0 and ((step + 1) % 20 == 0 or step + 1 == options.steps):
            print(f"step {step + 1}: loss {mean:.4f}")
    held = sum(parameter.to_local().numel() for parameter in model.parameters() if isinstance(parameter, DTensor))
    if rank == 0:
        print(f"{num_parameters:,} parameters, of which this process holds {held:,}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
