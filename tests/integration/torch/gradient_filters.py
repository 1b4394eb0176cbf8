"""With filters of gradients, a model trains as well as without filters, and replicas stay equal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import paceline.torch as pt
from paceline.errors import UsageError

CHAINS = ("float16", "bfloat16", "quantize:8", "quantize:4", "quantize:2", "quantize:1", "top-k:0.1", "random-k:0.3")


def _train(rank: int, group: Any, filters: str | None, steps: int = 60, **options: Any) -> tuple[float, list[Tensor]]:
    """Train a small classifier on this rank's half of the data; return its loss on all data, and its parameters."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(10, 64), nn.Tanh(), nn.Linear(64, 3))
    model = DistributedDataParallel(network, process_group=group, bucket_cap_mb=0.001, **options)
    if filters is not None:
        model.register_comm_hook(group, pt.filter_hook(filters))
    inputs = torch.randn(512, 10, generator=torch.Generator().manual_seed(1))
    labels = (inputs[:, :3] + inputs[:, 3:6]).argmax(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    for step in range(steps):
        own = slice(256 * rank + step % 4 * 64, 256 * rank + step % 4 * 64 + 64)
        optimizer.zero_grad()
        torch.autograd.backward(nn.functional.cross_entropy(model(inputs[own]), labels[own]))
        optimizer.step()
    loss = float(nn.functional.cross_entropy(network(inputs), labels).detach())
    return loss, [parameter.detach() for parameter in network.parameters()]


def check_filters_of_gradients(rank: int, size: int) -> None:
    for backend in ("paceline", "gloo"):
        group = dist.new_group(backend=backend)
        plain, _ = _train(rank, group, None)
        for filters in CHAINS if backend == "paceline" else CHAINS[2:3]:
            loss, parameters = _train(rank, group, filters, find_unused_parameters=filters == "quantize:8")
            assert loss < plain + 0.05, (filters, loss, plain)
            for parameter in parameters:
                other = parameter.clone()
                dist.broadcast(other, 0)
                assert torch.equal(parameter, other), filters
    with pytest.raises(UsageError, match="key-caching:64 is not for gradients"):
        pt.filter_hook("key-caching")
