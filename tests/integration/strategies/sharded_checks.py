"""Checks of ``Sharded`` and of device meshes on four ranks; ``strategy_ranks.py`` runs them."""

from __future__ import annotations

import copy
import gc
import itertools
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.conformance import Trial
from tests.conformance.idioms import several_models
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F  # noqa: N812

import paceline.torch
from paceline.errors import PacelineError, UsageError
from paceline.torch import AllReduce, Sharded, Strategy

CHECKPOINT = "SHARDED_CHECKPOINT"
"""The environment variable with the folder that the parent looks into."""
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
    """Sequences in and out, with tied weights, parameters of fewer rows than ranks, and a frozen parameter."""

    def __init__(self, blocks: int = 3, width: int = 8, words: int = 11) -> None:
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
    """Accumulate, evaluate between steps, clip by torch and by the largest element, and leave a step out."""
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
        if number != 3:
            optimizer.step()
        losses.append(mean(strategy, loss))
    return losses


def expect_equal(loop: Loop, num: int, kind: str = "sgd", **options: Any) -> None:
    """Train in shards and in this process alone; losses and parameters must be the same."""
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
    expect_equal(plain_loop, 12, "adam", units=["blocks.*"])


def thorough_fifty_steps_equal_one_process(rank: int, size: int) -> None:
    expect_equal(plain_loop, 50, "adam", units=["blocks.*"])


def check_accumulation_evaluation_and_clipping(rank: int, size: int) -> None:
    expect_equal(busy_loop, 5, units=["blocks.*", "rows"])


def thorough_accumulation_evaluation_and_clipping_on_a_mesh(rank: int, size: int) -> None:
    expect_equal(busy_loop, 8, units=["blocks.*", "rows"])
    expect_equal(busy_loop, 4, "adam", data_parallel=2)


def failing_loop(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches, strategy: Strategy | None
) -> list[float]:
    """Raise an exception in every other forward and in every third backward, and continue with the next batch."""
    inner: Any = model.blocks
    losses = []

    def fail(*_: Any) -> None:
        raise ArithmeticError("as it should")

    def fail_in_backward(module: nn.Module, inputs: Any, output: Tensor) -> None:
        output.register_hook(fail)

    for number, batch in enumerate(batches):
        x, y = share(strategy, batch)
        optimizer.zero_grad()
        hooks = [inner[1].register_forward_hook(fail)] if number % 2 else []
        hooks += [inner[1].register_forward_hook(fail_in_backward)] if number % 3 == 1 else []
        try:
            loss = loss_of(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(mean(strategy, loss))
        except ArithmeticError:
            losses.append(0.0)
        for hook in hooks:
            hook.remove()
    assert 0 < losses.count(0.0) < len(losses) - 2
    return losses


def check_a_failing_iteration_is_skipped(rank: int, size: int) -> None:
    expect_equal(failing_loop, 12, units=["blocks.*"])


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
        # Parameters, gradients and two moments; before, the parameters were whole.
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
    batches = batches_of(6)
    expected = plain_loop(*model_and_optimizer("adam"), batches, None)

    def go_on(strategy: Strategy, checkpoint: Path) -> None:
        """Load in the midst of another training."""
        model, optimizer = strategy.prepare(*model_and_optimizer("adam"))
        plain_loop(model, optimizer, batches[4:5], strategy)
        assert strategy.load(checkpoint) == {"epoch": 3}
        assert plain_loop(model, optimizer, batches[3:], strategy) == pytest.approx(expected[3:], abs=1e-5)

    meet_again()
    with Sharded(device="cpu") as strategy:
        model, optimizer = strategy.prepare(*model_and_optimizer("adam"))
        plain_loop(model, optimizer, batches[:3], strategy)
        strategy.save(folder / "by sharded", epoch=3)
    meet_again()
    with AllReduce(device="cpu") as copies:
        go_on(copies, folder / "by sharded")
        copies.load(folder / "by sharded")
        copies.save(folder / "by all-reduce", epoch=3)
    meet_again()
    with Sharded(device="cpu", units=["blocks.*"], data_parallel=2) as strategy:
        go_on(strategy, folder / "by all-reduce")


def check_full_state_dicts_are_loaded(rank: int, size: int) -> None:
    meet_again()
    with Sharded(device="cpu") as strategy:
        model, optimizer = strategy.prepare(*model_and_optimizer())
        whole, _ = model_and_optimizer()
        with torch.no_grad():
            for parameter in whole.parameters():
                parameter.mul_(1.5)
        model.load_state_dict(whole.state_dict())
        loss = plain_loop(model, optimizer, batches_of(1), strategy)
        assert loss == pytest.approx(plain_loop(whole, torch.optim.SGD(whole.parameters()), batches_of(1), None))


def check_unshardable_models_are_refused(rank: int, size: int) -> None:
    double, empty = nn.Linear(2, 2), nn.ReLU()
    double.bias = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    foreign = nn.Parameter(torch.zeros(2))
    sparse = nn.Sequential(nn.Embedding(4, 2, sparse=True))
    tied = Net()
    linear, hooked = nn.Linear(4, 4), nn.Linear(2, 2)
    hooked.weight.register_hook(torch.neg)
    wrong: list[tuple[nn.Module, Any, dict[str, Any], str]] = [
        (empty, None, {}, "the model has no parameters"),
        (double, None, {}, "'weight' is float32 and 'bias' float64.*one dtype"),
        (linear, torch.optim.SGD([*linear.parameters(), foreign], lr=1.0), {}, "a parameter that the model does not"),
        (linear, torch.optim.LBFGS(linear.parameters()), {}, "LBFGS does not support shards"),
        (linear, torch.optim.SGD(linear.parameters(), fused=True), {}, r"SGD\(fused=True\) does not support shards"),
        (hooked, None, {}, "parameter 'weight' has a hook"),
        (sparse, None, {}, "0 has sparse=True"),
        (tied, None, {"units": ["words"]}, "words shares the parameter 'weight' with another part"),
        (tied, None, {"units": ["blocks"]}, "blocks has no parameters, or no forward of its own"),
        (
            tied,
            None,
            {"units": ["layers.*"]},
            r"layers\.\*: no module of the model has this name; its modules: words",
        ),
    ]
    for model, optimizer, options, message in wrong:
        meet_again()
        with Sharded(device="cpu", **options) as strategy, pytest.raises(UsageError, match=message):
            strategy.prepare(model, optimizer)
    meet_again()
    with pytest.raises(UsageError, match="--data-parallel 3: expected a divisor of the 4 processes"):
        Sharded(device="cpu", data_parallel=3)
    with Sharded(device="cpu") as strategy:
        kept = list(linear.parameters())
        strategy.prepare(linear)
        with pytest.raises(UsageError, match=r"read before prepare\(\)"):
            nn.utils.clip_grad_norm_(kept, 1.0)
        with pytest.raises(UsageError, match=r"register_hook\(\) on a parameter would never be called"):
            linear.weight.register_hook(torch.neg)
        copies: list[Callable[[Any], Any]] = [copy.deepcopy, torch.optim.swa_utils.AveragedModel, pickle.dumps]
        for copied in copies:
            with pytest.raises(UsageError, match=r"copy the model before prepare\(\)"):
                copied(linear)
        with pytest.raises(UsageError, match=r"call full_tensor\(\)\.numpy\(\) on every process"):
            np.asarray(linear.weight.detach())
        with pytest.raises(UsageError, match=r"zero_\(\) on a part of a sharded tensor changes a copy"):
            linear.weight.data[0].zero_()
        x = torch.ones(2, 4, requires_grad=True)
        calls: list[Callable[[], Any]] = [
            lambda: torch.autograd.grad(linear(x).sum(), list(linear.parameters())),
            lambda: linear(x).sum().backward(inputs=list(linear.parameters())),
        ]
        for call in calls:
            with pytest.raises(UsageError, match="has no gradients for sharded parameters"):
                call()
        with pytest.raises(UsageError, match="create_graph=True"):
            torch.autograd.grad(linear(x).sum(), x, create_graph=True)
        with pytest.raises(PacelineError, match=r"calls model 0 to evaluate it|disagree"):
            linear.eval()(x) if strategy.is_main else strategy.barrier()


class Scaled(nn.Module):
    """A model with a scalar parameter, embeddings, normalization, a small layer and a second forward method."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = paceline.torch.Embedding(6, update=paceline.SGD(lr=0.1))
        self.layer, self.norm, self.last = nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 1)
        self.scale, self.shift = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.tensor(0.5), requires_grad=False)

    def hidden(self, keys: Tensor) -> Any:
        return self.layer(self.rows(keys)) + F.linear(self.rows(keys), self.layer.weight)

    def forward(self, keys: Tensor) -> Any:
        return self.last(self.norm(self.hidden(keys)).tanh()) * self.scale + self.shift


def train_scaled(strategy: Strategy, change: Callable[[Any], Any] = lambda model: None) -> list[float]:
    """Train by losses of the model, of a method and of its parameters; return numbers that are global."""
    torch.manual_seed(1)
    model = Scaled()
    average = torch.optim.swa_utils.AveragedModel(model)
    prepared, optimizer = strategy.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    if change is not None:
        change(model)
    average = strategy.prepare(average)
    found = []
    for step in range(6):
        keys = torch.arange(step, step + 8).chunk(strategy.world_size)[strategy.rank]
        optimizer.zero_grad()
        if step == 3:
            model.shift.requires_grad_(True)
        loss: Any = prepared(keys).square().mean()
        if step % 2:
            loss = loss + model.hidden(keys).square().mean() + model.layer(torch.ones(2, 6)).mean() * strategy.rank
        loss = loss + 0.1 * sum(parameter.norm() for parameter in model.parameters())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, float("inf"))
        found += [float(strategy.reduce(loss.detach())), float(strategy.clip_grad_norm_(0.5)), model.scale.item()]
        found += [
            parameter.grad.norm().item()
            for parameter in model.parameters()
            if parameter.grad is not None and parameter.numel()
        ]
        optimizer.step()
        average.update_parameters(model)
    found += [parameter.sum().item() for parameter in average.parameters()]
    return found


def check_numbers_embeddings_methods_and_averages(rank: int, size: int) -> None:
    meet_again()
    with AllReduce(device="cpu", find_unused_parameters=True) as strategy:
        expected = train_scaled(strategy)
    meet_again()
    with Sharded(device="cpu") as strategy:
        assert train_scaled(strategy) == pytest.approx(expected, abs=1e-5)


def check_a_compiled_model_trains(rank: int, size: int) -> None:
    torch.manual_seed(5)
    alone, x = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)), torch.arange(32.0).view(8, 4) / 32
    meet_again()
    with Sharded(device="cpu") as strategy:
        model: Any = strategy.prepare(torch.compile(copy.deepcopy(alone), backend="eager"))
        model(x).square().mean().backward()
        alone(x).square().mean().backward()
        torch.testing.assert_close(model.get_parameter("_orig_mod.0.weight").grad.full_tensor(), alone[0].weight.grad)


def check_writes_into_parameters(rank: int, size: int) -> None:
    def write(model: nn.Module, strategy: Strategy | None) -> list[Tensor]:
        weight: Any = model.get_parameter("0.weight")
        with torch.no_grad():
            nn.utils.vector_to_parameters(torch.arange(54.0), model.parameters())
            weight[1] = 7.0
            weight[weight > 10] = 10.0
            weight.data[:, 0] = torch.arange(8.0)
            weight.data = weight.data * 0.5
            weight += torch.arange(32.0).view(8, 4)
        torch.manual_seed(4)
        model[1].reset_parameters()  # type: ignore[index]
        return [
            tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
            for tensor in (*model.parameters(), torch.stack([torch.stack(list(row)).sum() for row in weight]))
        ]

    expected = write(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1), nn.Linear(1, 2)), None)
    meet_again()
    with Sharded(device="cpu") as strategy:
        found = write(strategy.prepare(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1), nn.Linear(1, 2))), strategy)
    torch.testing.assert_close(found, expected)


class Autoencoder(nn.Module):
    """A model with a separate method that draws samples."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 4), nn.Linear(4, 6)

    def decode(self, code: Tensor) -> Any:
        return self.decoder(code).sigmoid()

    def forward(self, x: Tensor, shift: Tensor) -> Any:
        return self.decode(self.encoder(x) + shift)


def check_methods_and_arguments_except_forward(rank: int, size: int) -> None:
    torch.manual_seed(2)
    alone = Autoencoder()
    x, code = torch.rand(3, 6), torch.rand(2, 4)
    expected, shift = alone(x, alone.encoder.weight.new_ones(4)), alone.encoder.bias.detach().clone()
    meet_again()
    with Sharded(device="cpu") as strategy:
        model = strategy.prepare(copy.deepcopy(alone))
        torch.testing.assert_close(model(x, model.encoder.weight.new_ones(4)), expected)  # a DTensor
        torch.testing.assert_close(model(x, shift=model.encoder.bias.detach()), alone(x, shift))
        torch.testing.assert_close(model.decode(code), alone.decode(code))
        register_fsdp_forward_method(model, "decode")
        with torch.no_grad():
            torch.testing.assert_close(model.decode(code), alone.decode(code))
        model(x, shift).mean().backward()
        alone(x, shift).mean().backward()
        assert isinstance(model.decoder.weight.grad, DTensor)
        torch.testing.assert_close(model.decoder.weight.grad.full_tensor(), alone.decoder.weight.grad)


# Device meshes in a program of its own.


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


def _on_mesh(names: tuple[str, str], spread: Callable[[nn.Module, Any], None], steps: int = 10) -> None:
    """Train on a mesh of 2 by 2 what `spread` puts there, with half of the data on each half; compare the losses."""
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


def check_a_mesh_of_data_and_shards(rank: int, size: int) -> None:
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


def check_several_models_and_optimizers(rank: int, size: int) -> None:
    def train(make: Callable[..., Strategy], train_idiom: Callable[[Trial], list[Tensor]]) -> list[Tensor]:
        meet_again()
        with make(device="cpu") as strategy:
            values = train_idiom(Trial(strategy))
            return [value.full_tensor() if isinstance(value, DTensor) else value for value in values]

    for idiom in (several_models.gan_at_once, several_models.teacher, several_models.one_optimizer):
        torch.testing.assert_close(train(Sharded, idiom), train(AllReduce, idiom), rtol=0, atol=1e-5)
