"""With ``ParameterServer``, every element-wise optimizer of torch with every option equals one device."""

from __future__ import annotations

import copy
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch.optim import Optimizer  # noqa: E402

import paceline  # noqa: E402
from paceline.collectives import Group  # noqa: E402
from paceline.launch.local import LocalCluster  # noqa: E402
from paceline.protocol import Sequential  # noqa: E402
from paceline.testing import run_ranks  # noqa: E402
from paceline.torch.strategies.ranks import Ranks  # noqa: E402
from paceline.torch.strategies.server import parameter_server  # noqa: E402
from paceline.torch.strategies.server.parameter_server import ParameterServer  # noqa: E402

STEPS = 10
INPUTS = torch.randn(STEPS, 2, 4, 6, generator=torch.Generator().manual_seed(3))
TARGETS = INPUTS.sum(-1, keepdim=True).sin()

torch.manual_seed(0)
NET = nn.Sequential(nn.Linear(6, 100), nn.Tanh(), nn.Linear(100, 1))

Make = Callable[[Iterable[nn.Parameter]], Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "SGD maximize": lambda p: torch.optim.SGD(p, lr=1e-3, maximize=True),
    "SGD dampening": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.5, weight_decay=0.01),
    "Adagrad lr_decay": lambda p: torch.optim.Adagrad(p, lr=0.05, lr_decay=0.1, initial_accumulator_value=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, eps=1e-3, momentum=0.9, centered=True, weight_decay=0.01),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5, eps=1e-3, weight_decay=0.01),
    "Adam amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-4, amsgrad=True, weight_decay=0.01),
    "AdamW maximize": lambda p: torch.optim.AdamW(p, lr=1e-3, eps=1e-4, amsgrad=True, maximize=True),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01, eps=1e-4, weight_decay=0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01, eps=1e-4, weight_decay=0.01, decoupled_weight_decay=True),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01, eps=1e-4, weight_decay=0.01),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.05, lambd=0.01, t0=5, weight_decay=0.01),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
}
_SELDOM = ("SGD dampening", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD")
"""Optimizers whose rule only the tests of rules always compare with PyTorch."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """Two servers with replication, for two workers."""
    with paceline.local_cluster(servers=2, workers=2, consistency=Sequential(aggregate="mean"), replicas=1) as found:
        yield found


_ranks = threading.local()


@pytest.fixture
def run(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], Any]], list[Any]]:
    """Return a function that calls its argument with the rank on two ranks of the cluster."""
    monkeypatch.setattr(parameter_server, "connect_workers", lambda name, rank, timeout: cluster.connect(rank=rank))
    monkeypatch.setattr(Ranks, "meet", lambda timeout: _ranks.here)

    def call(function: Callable[[int], Any]) -> list[Any]:
        def work(group: Group) -> Any:
            _ranks.here = Ranks(group.rank, 2, group.rank, group)
            return function(group.rank)

        return run_ranks(2, work)

    return call


def step(model: nn.Module, optimizer: Optimizer, inputs: Tensor, targets: Tensor) -> None:
    optimizer.zero_grad()
    torch.autograd.backward(nn.functional.mse_loss(model(inputs), targets))
    optimizer.step()


def alone(make: Make) -> nn.Module:
    model = copy.deepcopy(NET)
    optimizer = make(model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    for inputs, targets in zip(INPUTS.flatten(1, 2), TARGETS.flatten(1, 2), strict=True):
        step(model, optimizer, inputs, targets)
        scheduler.step()
    return model


def on_servers(rank: int, make: Make, between: Callable[[ParameterServer, int], None]) -> nn.Module:
    """Train on this rank's half of the data; `between` is called before each step."""
    strategy = ParameterServer()
    with strategy:
        model = copy.deepcopy(NET)
        optimizer = make(model.parameters())
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
        model, optimizer, scheduler = strategy.prepare(model, optimizer, scheduler=scheduler)
        for number in range(STEPS):
            between(strategy, number)
            step(model, optimizer, INPUTS[number, rank], TARGETS[number, rank])
            scheduler.step()
        strategy.gather_values()
        found: nn.Module = copy.deepcopy(model)
        return found


def check_equal(found: nn.Module, expected: nn.Module) -> None:
    torch.testing.assert_close(list(found.parameters()), list(expected.parameters()), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.thorough] * (name in _SELDOM)) for name in OPTIMIZERS]
)
def test_updates_by_servers_equal_one_device(name: str, run: Any, tmp_path: Path) -> None:
    expected = alone(OPTIMIZERS[name])

    def reload(strategy: ParameterServer, number: int) -> None:
        if number == STEPS // 2:  # convert the state to torch's form and back
            strategy.save(tmp_path / "kept")
            strategy.load(tmp_path / "kept")

    for found in run(lambda rank: on_servers(rank, OPTIMIZERS[name], reload)):
        check_equal(found, expected)


def test_replicas_have_the_states_of_a_killed_server(run: Any, cluster: LocalCluster) -> None:
    """The optimizer has the largest number of states. Another server is filled while the training continues."""
    expected = alone(OPTIMIZERS["NAdam"])

    def kill(strategy: ParameterServer, number: int) -> None:
        if number == STEPS // 2 and strategy.is_main:
            os.kill(cluster.pids("server")[0], signal.SIGKILL)

    for found in run(lambda rank: on_servers(rank, OPTIMIZERS["NAdam"], kill)):
        check_equal(found, expected)
