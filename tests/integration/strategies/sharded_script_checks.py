"""Checks of scripts under ``Sharded`` on two ranks: failures, methods, writes into parameters and several models."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.conformance import Trial
from tests.conformance.idioms import several_models
from tests.integration.strategies.sharded_checks import (
    Batches,
    Net,
    batches_of,
    busy_loop,
    expect_equal,
    loss_of,
    mean,
    meet_again,
    model_and_optimizer,
    plain_loop,
    share,
)
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.nn import functional as F  # noqa: N812

import paceline.torch
from paceline.errors import PacelineError, UsageError
from paceline.torch import AllReduce, Sharded, Strategy


def check_accumulation_evaluation_and_clipping(rank: int, size: int) -> None:
    expect_equal(busy_loop, 3, units=["blocks.*", "rows"])


def failing_loop(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches, strategy: Strategy | None
) -> list[float]:
    """Raise an exception in every second forward and in every third backward, and continue with the next batch."""
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
    expect_equal(failing_loop, 8, units=["blocks.*"])


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
    with pytest.raises(UsageError, match="--data-parallel 3: expected a divisor of the 2 processes"):
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
    """Train with losses of the model, of a method and of its parameters; return numbers that are equal on all ranks."""
    torch.manual_seed(1)
    model = Scaled()
    average = torch.optim.swa_utils.AveragedModel(model)
    prepared, optimizer = strategy.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    if change is not None:
        change(model)
    average = strategy.prepare(average)
    found = []
    for step in range(4):
        keys = torch.arange(step, step + 8).chunk(strategy.world_size)[strategy.rank]
        optimizer.zero_grad()
        if step == 2:
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
        torch.testing.assert_close(model(x, model.encoder.weight.new_ones(4)), expected)  # this parameter is a DTensor
        torch.testing.assert_close(model(x, shift=model.encoder.bias.detach()), alone(x, shift))
        torch.testing.assert_close(model.decode(code), alone.decode(code))
        register_fsdp_forward_method(model, "decode")
        with torch.no_grad():
            torch.testing.assert_close(model.decode(code), alone.decode(code))
        model(x, shift).mean().backward()
        alone(x, shift).mean().backward()
        assert isinstance(model.decoder.weight.grad, DTensor)
        torch.testing.assert_close(model.decoder.weight.grad.full_tensor(), alone.decoder.weight.grad)


def check_several_models_and_optimizers(rank: int, size: int) -> None:
    def train(make: Callable[..., Strategy], train_idiom: Callable[[Trial], list[Tensor]]) -> list[Tensor]:
        meet_again()
        with make(device="cpu") as strategy:
            values = train_idiom(Trial(strategy))
            return [value.full_tensor() if isinstance(value, DTensor) else value for value in values]

    for idiom in (several_models.gan_at_once, several_models.teacher, several_models.one_optimizer):
        torch.testing.assert_close(train(Sharded, idiom), train(AllReduce, idiom), rtol=0, atol=1e-5)
