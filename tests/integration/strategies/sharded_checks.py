"""Checks of ``Sharded`` and of device meshes on four ranks; ``strategy_ranks.py`` runs them.

``sharded_script_checks.py`` has the checks that need only two ranks.
"""

from __future__ import annotations

import copy
import gc
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F  # noqa: N812

from paceline.torch import AllReduce, Sharded, Strategy

CHECKPOINT = "SHARDED_CHECKPOINT"
"""The environment variable with the folder that the parent process reads."""
_meetings = itertools.count(1000)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Any:
        return x + self.down(F.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """A sequence model with tied weights, parameters of fewer rows than ranks, and a frozen parameter."""

    def __init__(self, blocks: int = 2, width: int = 8, words: int = 11) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(blocks)])
        self.rows = nn.LSTM(width, width, batch_first=True)
        self.last = nn.Linear(width, words, bias=False)
        self.last.weight = self.words.weight
        self.scale = nn.Parameter(torch.ones(1))
        self.shift = nn.Parameter(torch.full((5, 1), 0.1))
        self.frozen = nn.Parameter(torch.ones(3, 2), requires_grad=False)
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: Tensor) -> Any:
        x = self.words(x)
        for block in self.blocks:
            x = block(x)
        if self.training and torch.is_grad_enabled():
            self.mean.lerp_(x.detach().mean((0, 1)), 0.1)
        x = x + self.rows(x)[0] * self.frozen.mean()
        return self.last(x) * self.scale + self.shift.sum()


def batches_of(num: int, size: int = 8) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    inputs = [torch.randint(11, (size, 3), generator=generator) for _ in range(num)]
    return [(x, (3 * x + 1) % 11) for x in inputs]


def model_and_optimizer(kind: str = "sgd") -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = Net()
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    biases = [parameter for name, parameter in trained if "bias" in name]
    weights = [parameter for name, parameter in trained if "bias" not in name]
    groups = [{"params": weights, "weight_decay": 0.01}, {"params": biases, "lr": 0.02}]
    if kind == "adam":
        return model, torch.optim.Adam(groups, lr=0.01)
    return model, torch.optim.SGD(groups, lr=0.05, momentum=0.9)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.reshape(-1, 11), target.reshape(-1))


def meet_again() -> None:
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(next(_meetings))


Batches = list[tuple[Tensor, Tensor]]
Loop = Callable[[nn.Module, torch.optim.Optimizer, Batches, Strategy | None], list[float]]


def share(strategy: Strategy | None, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return this rank's part of a batch, or the whole batch for one process."""
    if strategy is None:
        return batch
    x, y = (tensor.chunk(strategy.world_size)[strategy.rank] for tensor in batch)
    return x, y


def mean(strategy: Strategy | None, loss: Tensor) -> float:
    return float(loss.detach()) if strategy is None else float(strategy.reduce(loss))


def plain_loop(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches, strategy: Strategy | None
) -> list[float]:
    losses = []
    for batch in batches:
        x, y = share(strategy, batch)
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        if strategy is None:
            nn.utils.clip_grad_norm_(model.parameters(), 0.7)
        else:
            strategy.clip_grad_norm_(0.7)
        optimizer.step()
        losses.append(mean(strategy, loss))
    return losses


def busy_loop(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches, strategy: Strategy | None
) -> list[float]:
    """Accumulate gradients, evaluate between steps, clip by torch and by the largest element, and skip a step."""
    losses = []
    for number, batch in enumerate(batches):
        x, y = share(strategy, batch)
        optimizer.zero_grad()
        if strategy is None:
            (loss_of(model(x), y) / 2).backward()
        else:
            with strategy.no_sync():
                (loss_of(model(x), y) / 2).backward()
        loss = loss_of(model(x), y)
        loss.backward()
        model.eval()
        with torch.no_grad():
            losses.append(mean(strategy, loss_of(model(x), y)))
        model.train()
        if strategy is None:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05, float("inf"))
        else:
            norm = strategy.clip_grad_norm_(0.05, float("inf"))
        losses.append(float(norm))
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        if number != 1:
            optimizer.step()
        losses.append(mean(strategy, loss))
    return losses


def expect_equal(loop: Loop, num: int, kind: str = "sgd", **options: Any) -> None:
    """Train in shards and in one process. Check that losses and parameters are equal."""
    whole, alone = model_and_optimizer(kind)
    batches = batches_of(num)
    expected = loop(whole, alone, batches, None)
    meet_again()
    with Sharded(device="cpu", **options) as strategy:
        model, optimizer = strategy.prepare(*model_and_optimizer(kind))
        found = loop(model, optimizer, batches, strategy)
        values = strategy.gather_values()
    assert found == pytest.approx(expected, abs=1e-5)
    if values:
        for name, value in whole.state_dict().items():
            if name != "mean":
                torch.testing.assert_close(values[name], value, rtol=0, atol=1e-5, msg=name)


def check_steps_equal_one_process(rank: int, size: int) -> None:
    expect_equal(plain_loop, 3, "adam", units=["blocks.*"])


def thorough_fifty_steps_equal_one_process(rank: int, size: int) -> None:
    expect_equal(plain_loop, 50, "adam", units=["blocks.*"])


def thorough_accumulation_evaluation_and_clipping_on_a_mesh(rank: int, size: int) -> None:
    expect_equal(busy_loop, 8, units=["blocks.*", "rows"])
    expect_equal(busy_loop, 4, "adam", data_parallel=2)


def check_every_rank_holds_one_part(rank: int, size: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    whole = sum(parameter.numel() for parameter in model.parameters())
    meet_again()
    before = _bytes_of_tensors()
    with Sharded(device="cpu") as strategy:
        model, optimizer = strategy.prepare(model, torch.optim.Adam(model.parameters()))
        assert strategy.units == [str(number) for number in range(8)]
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, 256)).square().mean().backward()
            optimizer.step()
        shards = sum(parameter.to_local().numel() for parameter in model.parameters())
        assert shards == whole // size
        state = [tensor for entry in optimizer.state.values() for tensor in entry.values() if tensor.dim()]
        assert sum(tensor.to_local().numel() for tensor in state) == 2 * whole // size
        # Each rank holds its part of parameters, gradients and two moments. Before, it held the whole parameters.
        held = _bytes_of_tensors() - before + 4 * whole
        assert 4 * 4 * whole / size <= held < 4 * 5 * whole / size, (held, whole)


def _bytes_of_tensors() -> int:
    gc.collect()
    tensors = [obj for obj in gc.get_objects() if type(obj) in (Tensor, nn.Parameter)]
    storages = [
        tensor.untyped_storage() for tensor in tensors if tensor.device.type == "cpu" and tensor.layout == torch.strided
    ]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def check_checkpoints_of_other_strategies(rank: int, size: int) -> None:
    folder = Path(os.environ[CHECKPOINT])
    batches = batches_of(4)
    expected = plain_loop(*model_and_optimizer("adam"), batches, None)

    def go_on(strategy: Strategy, checkpoint: Path) -> None:
        """Load the checkpoint during another training."""
        model, optimizer = strategy.prepare(*model_and_optimizer("adam"))
        plain_loop(model, optimizer, batches[3:], strategy)
        assert strategy.load(checkpoint) == {"epoch": 2}
        assert plain_loop(model, optimizer, batches[2:], strategy) == pytest.approx(expected[2:], abs=1e-5)

    meet_again()
    with Sharded(device="cpu") as strategy:
        model, optimizer = strategy.prepare(*model_and_optimizer("adam"))
        plain_loop(model, optimizer, batches[:2], strategy)
        strategy.save(folder / "by sharded", epoch=2)
    meet_again()
    with AllReduce(device="cpu") as copies:
        go_on(copies, folder / "by sharded")
        copies.load(folder / "by sharded")
        copies.save(folder / "by all-reduce", epoch=2)
    meet_again()
    with Sharded(device="cpu", units=["blocks.*"], data_parallel=2) as strategy:
        go_on(strategy, folder / "by all-reduce")


def _alone(steps: int) -> tuple[nn.Module, list[float]]:
    torch.manual_seed(3)
    model = nn.Sequential(Block(16), Block(16))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    start = copy.deepcopy(model)
    losses = []
    for number in range(steps):
        optimizer.zero_grad()
        loss = _loss(model, number)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return start, losses


def _loss(model: nn.Module, step: int, part: int = 0, parts: int = 1) -> Tensor:
    inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(step)).chunk(parts)[part]
    return F.mse_loss(model(inputs), inputs.flip(1))


def _on_mesh(names: tuple[str, str], spread: Callable[[nn.Module, Any], None], steps: int = 4) -> None:
    """Train a model that `spread` places on a mesh of 2 by 2. Each half has half of the data. Compare the losses."""
    model, expected = _alone(steps)
    meet_again()
    dist.init_process_group("paceline")
    try:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        spread(model, mesh)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        found = []
        parts = 4 if names == ("data", "shard") else 2
        part = dist.get_rank() if parts == 4 else mesh.get_local_rank("data")
        for number in range(steps):
            optimizer.zero_grad()
            loss = _loss(model, number, part, parts)
            loss.backward()
            optimizer.step()
            mean = loss.detach().clone()
            dist.all_reduce(mean, dist.ReduceOp.AVG)
            found.append(mean.item())
        assert found == pytest.approx(expected, abs=1e-5)
    finally:
        dist.destroy_process_group()


def thorough_a_mesh_of_data_and_shards(rank: int, size: int) -> None:
    def spread(model: nn.Module, mesh: Any) -> None:
        for block in model.children():
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)

    _on_mesh(("data", "shard"), spread)


def check_a_mesh_of_data_and_tensors(rank: int, size: int) -> None:
    def spread(model: nn.Module, mesh: Any) -> None:
        for block in model.children():
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, mesh["tensor"], plan)
            fully_shard(block, mesh=mesh["data"])
        fully_shard(model, mesh=mesh["data"])

    _on_mesh(("data", "tensor"), spread)
