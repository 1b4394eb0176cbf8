"""Check that update rules give the same results as torch's optimizers, and convert their states in both directions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.errors import UsageError
from paceline.protocol import NUM_BUCKETS
from paceline.protocol.buckets import ALL
from paceline.ps import SparseStore
from paceline.ps.messages import TableSpec
from paceline.tables.dense_part import DensePart
from paceline.tables.initializers import Zeros
from paceline.tables.part import Selection
from paceline.tables.settings import to_fields
from paceline.torch.update_rules import num_planes, rule_of, state_from_torch, state_to_torch

Make = Callable[[Iterable[Tensor]], Optimizer]
SIZE = 777

KNOWN: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd with decay": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.01),
    "sgd, lr a tensor": lambda p: torch.optim.SGD(p, lr=torch.tensor(0.1)),
    "sgd, maximize": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.01, maximize=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "dampening": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5, maximize=True),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.8, nesterov=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.1, weight_decay=0.01),
    "adagrad, lr_decay": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1, maximize=True),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5, rho=0.8, weight_decay=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, alpha=0.9, weight_decay=0.01),
    "rmsprop, momentum": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9),
    "rmsprop, centered": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True),
    "rmsprop, both": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True, maximize=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.8, 0.99), weight_decay=0.01),
    "adam, foreach": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    "adam, amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, maximize=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "adamw, amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, amsgrad=True),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01, weight_decay=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01, momentum_decay=0.1, weight_decay=0.01),
    "nadam, decoupled": lambda p: torch.optim.NAdam(p, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01, weight_decay=0.01, maximize=True),
    "radam, decoupled": lambda p: torch.optim.RAdam(p, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1, lambd=0.01, t0=5, weight_decay=0.01),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}


def make_part(optimizer: Optimizer, size: int = SIZE) -> DensePart:
    rule = rule_of(optimizer, optimizer.param_groups[0])
    spec = TableSpec(name="p", kind="dense", size=size, update=to_fields(rule), initializer=to_fields(Zeros()))
    return DensePart(spec, ALL)


def records(part: DensePart) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.concatenate([part.read_bucket(bucket)[1] for bucket in range(NUM_BUCKETS)])


@pytest.mark.parametrize("name", KNOWN)
def test_a_rule_equals_torch_and_adopts_the_state(name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    parameter = torch.nn.Parameter(torch.randn(SIZE, generator=generator))
    optimizer = KNOWN[name]([parameter])
    rule = rule_of(optimizer, optimizer.param_groups[0])
    keys = np.arange(SIZE, dtype=np.uint64)

    def start(part: DensePart) -> None:
        planes = state_from_torch(rule, optimizer.state.get(parameter, {}), SIZE)
        part.write_records(keys, np.column_stack([parameter.detach().numpy(), planes.T]).astype(np.float32))

    def train(part: DensePart, steps: int) -> None:
        for _ in range(steps):
            parameter.grad = torch.randn(SIZE, generator=generator)
            part.push(Selection(None, 0, SIZE), parameter.grad.numpy())
            optimizer.step()

    part = make_part(optimizer)
    start(part)
    train(part, 20)
    values = np.empty(SIZE, np.float32)
    part.pull(Selection(None, 0, SIZE), values)
    np.testing.assert_allclose(values, parameter.detach().numpy(), atol=2e-6)
    state = state_to_torch(rule, records(part)[:, 1:].T, (SIZE,), num_steps=20)
    torch_state = {key: value for key, value in optimizer.state[parameter].items() if value is not None}
    assert state.keys() == torch_state.keys()
    for key, value in torch_state.items():
        torch.testing.assert_close(state[key], value, atol=1e-5, rtol=1e-5)

    part = make_part(optimizer)  # like a table that is loaded from a checkpoint of torch
    start(part)
    train(part, 20)
    part.pull(Selection(None, 0, SIZE), values)
    np.testing.assert_allclose(values, parameter.detach().numpy(), atol=2e-6)


def test_rules_update_rows() -> None:
    optimizer = torch.optim.Adagrad([torch.nn.Parameter(torch.zeros(4))], lr=0.1)
    store = SparseStore(dim=4, rule=rule_of(optimizer, optimizer.param_groups[0]))
    store.push(np.array([7], np.uint64), np.ones(4, np.float32))
    assert len(store) == 1


class OwnStep(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Foreign(Optimizer):
    """An optimizer that is not part of torch."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})


class OwnName(torch.optim.SGD):
    """A subclass that inherits torch's step."""


REFUSED: dict[str, tuple[Make, str]] = {
    "LBFGS": (torch.optim.LBFGS, "LBFGS computes with complete parameters"),
    "Adafactor": (torch.optim.Adafactor, "Adafactor computes with complete parameters"),
    "SparseAdam": (torch.optim.SparseAdam, "SparseAdam supports only sparse gradients"),
    "not torch's": (Foreign, "Foreign has no update rule"),
    "own step": (lambda p: OwnStep(p, lr=1.0), "OwnStep has a step of its own"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_optimizer_without_a_rule_is_named(name: str) -> None:
    make, message = REFUSED[name]
    optimizer = make([torch.nn.Parameter(torch.zeros(3))])
    with pytest.raises(UsageError, match=message) as caught:
        rule_of(optimizer, optimizer.param_groups[0])
    assert "all-reduce" in str(caught.value)
    assert "torch.optim's SGD, Adagrad, RMSprop, Adadelta, Adam, AdamW" in str(caught.value)


def test_a_subclass_with_torchs_step_has_torchs_rule() -> None:
    optimizer = OwnName([torch.nn.Parameter(torch.zeros(3))], lr=0.5)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # the scheduler wraps the step
    assert num_planes(rule_of(optimizer, optimizer.param_groups[0])) == 0
