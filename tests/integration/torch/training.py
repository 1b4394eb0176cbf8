"""Checks of training against the same training on Gloo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

BACKENDS = ("paceline", "gloo")


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 3))


def _losses(model: nn.Module, rank: int, steps: int = 4) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss: Tensor = model(torch.randn(8, 20, generator=generator)).square().mean()
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


def _on_both(train: Callable[[Any], list[float]]) -> None:
    losses = [train(dist.new_group(backend=backend)) for backend in BACKENDS]
    assert losses[0] == losses[1], losses
    assert losses[0][0] != losses[0][-1]


def check_data_parallel(rank: int, size: int) -> None:
    for options in ({}, {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.005}, {"static_graph": True}):
        _on_both(
            lambda group, options=options: _losses(  # type: ignore[misc]
                DistributedDataParallel(_model(), process_group=group, **options), rank
            )
        )


def _bf16_compress(state: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """A copy of PyTorch's hook, which PyTorch permits only for NCCL."""
    return default_hooks.bf16_compress_hook(state, bucket)


_bf16_compress.__annotations__.clear()  # PyTorch compares annotations, but not annotations that are text


def check_comm_hooks(rank: int, size: int) -> None:
    for hook in (default_hooks.allreduce_hook, default_hooks.fp16_compress_hook, _bf16_compress):

        def train(group: Any, hook: Any = hook) -> list[float]:
            model = DistributedDataParallel(_model(), process_group=group)
            model.register_comm_hook(group, hook)
            return _losses(model, rank)

        _on_both(train)


def check_power_sgd(rank: int, size: int) -> None:
    def train(group: Any) -> list[float]:
        model = DistributedDataParallel(_model(), process_group=group)
        state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=2, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return _losses(model, rank, 6)

    losses = [train(dist.new_group(backend=backend)) for backend in BACKENDS]
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=1e-4, atol=1e-5)


def check_no_sync(rank: int, size: int) -> None:
    def train(group: Any) -> list[float]:
        model = DistributedDataParallel(_model(), process_group=group)
        inputs = torch.randn(2, 8, 20, generator=torch.Generator().manual_seed(rank))
        with model.no_sync():
            torch.autograd.backward(model(inputs[0]).square().mean())
        torch.autograd.backward(model(inputs[1]).square().mean())
        return [float(parameter.grad.sum()) for parameter in model.parameters() if parameter.grad is not None]

    _on_both(train)


def check_sparse_gradients(rank: int, size: int) -> None:
    def train(group: Any) -> list[float]:
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.EmbeddingBag(10, 4, sparse=True), process_group=group)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(torch.tensor([[rank, 5], [6, rank + 1]])).square().sum()
            torch.autograd.backward(loss)
            optimizer.step()
            losses.append(loss.item())
        return losses

    _on_both(train)


def check_fully_sharded(rank: int, size: int) -> None:
    losses = []
    for backend in BACKENDS:
        mesh = DeviceMesh.from_group(dist.new_group(backend=backend), "cpu", mesh_dim_names=("dp",))
        model = _model()
        for layer in model.children():
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        losses.append(_losses(model, rank))
    assert losses[0] == losses[1], losses


def check_distributed_tensors(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (size,))
    whole = torch.arange(30.0).view(5, 6)
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    columns = rows.redistribute(mesh, [Shard(1)])
    assert torch.equal(columns.full_tensor(), whole)
    product = rows @ distribute_tensor(whole.t().contiguous(), mesh, [Shard(1)])
    assert isinstance(product, DTensor)
    assert torch.equal(product.full_tensor(), whole @ whole.t())


def check_a_failed_collective_fails_the_backward_pass(rank: int, size: int) -> None:
    for hook in (None, default_hooks.fp16_compress_hook):
        group = dist.new_group()
        model = DistributedDataParallel(_model(), process_group=group)
        if hook is not None:
            model.register_comm_hook(group, hook)
        for _ in range(3):  # train until the buckets are no longer rebuilt
            torch.autograd.backward(model(torch.ones(1, 20)).sum())
        output = model(torch.ones(1, 20)).sum()
        dist.barrier()
        if rank == 1:
            group.abort()
        else:
            try:
                torch.autograd.backward(output)
            except RuntimeError as error:
                message = str(error)
            else:
                message = "no error"
            assert "rank 1" in message, message
        dist.barrier()
