"""``ParameterServer`` on a real cluster; its ranks are threads of this process."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch.optim import Optimizer  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

import paceline  # noqa: E402
from paceline.collectives import Group  # noqa: E402
from paceline.errors import ConnectionLostError, PeerError, UsageError  # noqa: E402
from paceline.launch.local import LocalCluster  # noqa: E402
from paceline.protocol import BoundedDelay, Consistency, Eventual, Role, Sequential  # noqa: E402
from paceline.testing import run_ranks  # noqa: E402
from paceline.torch.strategies.base import Strategy  # noqa: E402
from paceline.torch.strategies.ranks import Ranks  # noqa: E402
from paceline.torch.strategies.server import parameter_server  # noqa: E402
from paceline.torch.strategies.server.parameter_server import ParameterServer  # noqa: E402

MEAN = Sequential(aggregate="mean")
STEPS = 20
ROWS = 4
INPUTS = torch.randn(STEPS, 2, ROWS, 6, generator=torch.Generator().manual_seed(3))
TARGETS = INPUTS.sum(-1, keepdim=True).sin()


class Net(nn.Module):
    """A model with small, large and frozen parameters, and a parameter that another module reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 300)
        self.second = nn.Linear(300, 40)
        self.never_called = nn.Linear(40, 20)
        self.last = nn.Linear(20, 1)
        self.second.bias.requires_grad = False
        self.register_buffer("scale", torch.ones(1))

    def forward(self, inputs: Tensor) -> Any:
        hidden = self.second(torch.tanh(self.first(inputs)))
        return self.last(nn.functional.linear(torch.tanh(hidden), self.never_called.weight)) * self.scale

    def trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.parameters() if parameter is not self.never_called.bias]


def make_net() -> Net:
    torch.manual_seed(0)
    return Net()


NET = make_net()


def momentum(model: Net) -> Optimizer:
    weights = [parameter for parameter in model.trained() if parameter.ndim == 2]
    vectors = [parameter for parameter in model.trained() if parameter.ndim == 1]
    groups = [{"params": vectors, "lr": 0.02}, {"params": weights}]
    optimizer: Optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9, weight_decay=1e-3)
    return optimizer


def adam(model: Net) -> Optimizer:
    optimizer: Optimizer = torch.optim.Adam(model.trained(), lr=0.01)
    return optimizer


@pytest.fixture(scope="module")
def clusters() -> Iterator[Callable[[Consistency, int], LocalCluster]]:
    """Clusters by their settings. Each cluster is used for several trainings, one after the other."""
    made: dict[str, LocalCluster] = {}
    with contextlib.ExitStack() as stack:

        def find(consistency: Consistency, servers: int) -> LocalCluster:
            name = f"{consistency}, {servers}"
            if name not in made:
                cluster = paceline.local_cluster(servers=servers, workers=2, consistency=consistency)
                made[name] = stack.enter_context(cluster)
            return made[name]

        yield find


@pytest.fixture
def cluster(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    clusters: Callable[[Consistency, int], LocalCluster],
) -> LocalCluster:
    """A cluster with settings from `indirect` parameters. Strategies in the threads of its ranks use this cluster."""
    found = clusters(*getattr(request, "param", (MEAN, 1)))
    monkeypatch.setattr(parameter_server, "connect_workers", lambda name, rank, timeout: found.connect(rank=rank))
    monkeypatch.setattr(Ranks, "meet", lambda timeout: _ranks.here)
    return found


_ranks = threading.local()


def run(function: Callable[[int], Any]) -> list[Any]:
    """Call `function(rank)` on two ranks."""

    def work(group: Group) -> Any:
        _ranks.here = Ranks(group.rank, 2, group.rank, group)
        return function(group.rank)

    return run_ranks(2, work)


def values_of(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(inputs), targets)


def backward(loss: Tensor) -> None:
    torch.autograd.backward(loss)


def train_alone(
    make: Callable[[Net], Optimizer], clip: float | None = None, steps: int = STEPS
) -> tuple[Net, Optimizer]:
    model = copy.deepcopy(NET)
    optimizer = make(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    for inputs, targets in zip(INPUTS[:steps].flatten(1, 2), TARGETS[:steps].flatten(1, 2), strict=True):
        optimizer.zero_grad()
        backward(loss_of(model, inputs, targets))
        if clip is not None:
            nn.utils.clip_grad_norm_(model.trained(), clip)
        optimizer.step()
        scheduler.step()
    return model, optimizer


def train(strategy: Strategy, rank: int, make: Callable[[Net], Optimizer], clip: float | None = None) -> Any:
    model = copy.deepcopy(NET)
    if rank:
        for value in model.state_dict().values():
            value.zero_()
    optimizer = make(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    prepared, optimizer, scheduler = strategy.prepare(model, optimizer, scheduler=scheduler)
    for inputs, targets in zip(INPUTS[:, rank], TARGETS[:, rank], strict=True):
        optimizer.zero_grad()
        backward(loss_of(prepared, inputs, targets))
        if clip is not None:
            strategy.clip_grad_norm_(clip)
        optimizer.step()
        scheduler.step()
    return model


SETTINGS = [pytest.param((MEAN, 1), marks=pytest.mark.thorough), (MEAN, 2), (Sequential(), 2)]
CASES: dict[Consistency, Any] = {
    MEAN: ((momentum, None), (adam, None), (adam, 0.05)),
    Sequential(): ((momentum, None),),
}


@pytest.mark.parametrize("cluster", SETTINGS, indirect=True, ids=lambda found: f"{found[0]}, {found[1]}")
def test_sequential_training_equals_one_device_with_the_joined_batch(cluster: LocalCluster) -> None:
    for make, clip in CASES[cluster.consistency]:
        expected, optimizer = train_alone(make, clip)

        def check(
            rank: int,
            make: Callable[[Net], Optimizer] = make,
            clip: float | None = clip,
            expected: Net = expected,
            optimizer: Optimizer = optimizer,
        ) -> None:
            with ParameterServer(bucket_mb=0.02, overlap=rank == 0) as strategy:  # pushes may have any order
                model = train(strategy, rank, make, clip)
                torch.testing.assert_close(values_of(model), values_of(expected), rtol=0, atol=1e-5)
                state = strategy.gather_optimizer_state()
                copied = copy.deepcopy(model)
            assert type(copied.first._parameters) is dict
            assert type(model.first._parameters) is dict, "the strategy still refers to the module"
            if rank == 0:
                assert state.keys() == optimizer.state_dict()["state"].keys()
                for number, entry in optimizer.state_dict()["state"].items():
                    for name, value in entry.items():
                        torch.testing.assert_close(state[number][name], value, rtol=1e-4, atol=1e-5)

        run(check)


@pytest.mark.parametrize("cluster", [(BoundedDelay(tau=2), 1)], indirect=True)
def test_asynchronous_training_learns(cluster: LocalCluster) -> None:
    inputs, targets = INPUTS[:4], INPUTS[:4].mean(-1, keepdim=True)
    before = loss_of(NET, inputs, targets).item()

    def check(rank: int, filters: str) -> float:
        model = copy.deepcopy(NET)
        with ParameterServer(bucket_mb=0.02, filters=filters) as strategy:
            prepared, optimizer = strategy.prepare(model, torch.optim.SGD(model.trained(), lr=0.05))
            for step in range(40):
                optimizer.zero_grad()
                backward(loss_of(prepared, inputs[step % 4, rank], targets[step % 4, rank]))
                optimizer.step()
            strategy.gather_values()
            return loss_of(model, inputs, targets).item()

    for filters in ("", "quantize:8,compress", "quantize:1"):
        found = run(functools.partial(check, filters=filters))
        assert found[0] == found[1] < 0.5 * before, filters


@pytest.mark.parametrize("cluster", [(Eventual(), 2)], indirect=True)
def test_no_rank_waits_under_eventual_consistency(cluster: LocalCluster) -> None:
    """Rank 1 does not train, so the training of rank 0 equals the training of one process on the same data."""
    expected = copy.deepcopy(NET)
    alone = momentum(expected)
    for inputs, targets in zip(INPUTS[:, 0], TARGETS[:, 0], strict=True):
        alone.zero_grad()
        backward(loss_of(expected, inputs, targets))
        alone.step()

    def check(rank: int) -> list[Tensor]:
        model = copy.deepcopy(NET)
        with ParameterServer(bucket_mb=0.02) as strategy:
            prepared, optimizer = strategy.prepare(model, momentum(model))
            for inputs, targets in zip(INPUTS[:, 0], TARGETS[:, 0], strict=True):
                if rank == 0:
                    optimizer.zero_grad()
                    backward(loss_of(prepared, inputs, targets))
                    optimizer.step()
            strategy.gather_values()
            return values_of(model)

    for found in run(check):
        torch.testing.assert_close(found, values_of(expected), rtol=0, atol=1e-5)


def test_servers_continue_from_the_state_of_a_torch_optimizer(cluster: LocalCluster) -> None:
    """Ten steps of torch and ten steps of servers with torch's state equal twenty steps of torch."""
    half, optimizer = train_alone(adam, steps=STEPS // 2)
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        group["lr"] = 0.003
    expected = copy.deepcopy(half)
    alone = adam(expected)
    alone.load_state_dict(copy.deepcopy(state))

    def check(rank: int) -> list[Tensor]:
        model = copy.deepcopy(NET)
        with ParameterServer(bucket_mb=0.02) as strategy:
            prepared, optimizer = strategy.prepare(model, adam(model))
            with torch.no_grad():
                for full_parameter, half_parameter in zip(model.parameters(), half.parameters(), strict=True):
                    full_parameter.copy_(half_parameter)
            optimizer.load_state_dict(copy.deepcopy(state))
            for inputs, targets in zip(INPUTS[10:, rank], TARGETS[10:, rank], strict=True):
                optimizer.zero_grad()
                with strategy.accumulate():  # the gradient of half of the batch is sent with the other half
                    backward(loss_of(prepared, inputs[:2], targets[:2]) / 2)
                backward(loss_of(prepared, inputs[2:], targets[2:]) / 2)
                optimizer.step()
            return values_of(model)

    for inputs, targets in zip(INPUTS[10:].flatten(1, 2), TARGETS[10:].flatten(1, 2), strict=True):
        alone.zero_grad()
        backward(loss_of(expected, inputs, targets))
        alone.step()
    for found in run(check):
        torch.testing.assert_close(found, values_of(expected), rtol=0, atol=1e-5)


def test_no_rank_waits_for_a_rank_without_batches(cluster: LocalCluster) -> None:
    """Rank 0 has 2 batches and rank 1 has 4. In both epochs, iterations 2 and 3 use only batches of rank 1."""
    expected = copy.deepcopy(NET)
    optimizer = momentum(expected)
    for _ in range(2):
        for step in range(4):
            optimizer.zero_grad()
            ranks = (0, 1) if step < 2 else (1,)
            for rank in ranks:
                backward(loss_of(expected, INPUTS[step, rank], TARGETS[step, rank]) / len(ranks))
            optimizer.step()

    def check(rank: int) -> list[Tensor]:
        model = copy.deepcopy(NET)
        length = 2 + 2 * rank
        data = TensorDataset(INPUTS[:length, rank].flatten(0, 1), TARGETS[:length, rank].flatten(0, 1))
        with ParameterServer() as strategy:
            prepared, optimizer = strategy.prepare(model, momentum(model))
            loader = strategy.prepare_loader(DataLoader(data, ROWS), shard=False, prefetch=True)
            for _ in range(2):
                for inputs, targets in loader:
                    optimizer.zero_grad()
                    backward(loss_of(prepared, inputs, targets))
                    optimizer.step()
            strategy.gather_values()
            return values_of(model)

    for found in run(check):
        torch.testing.assert_close(found, values_of(expected), rtol=0, atol=1e-5)


def test_bfloat16_parameters_are_float32_on_the_servers(cluster: LocalCluster) -> None:
    def check(rank: int) -> Tensor:
        model = nn.Linear(8, 1, bias=False).to(torch.bfloat16)
        nn.init.ones_(model.weight)
        with ParameterServer() as strategy:
            prepared, optimizer = strategy.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
            for _ in range(8):  # each change is too small for bfloat16
                optimizer.zero_grad()
                backward(prepared(torch.ones(1, 8, dtype=torch.bfloat16)).sum())
                optimizer.step()
            return model.weight.detach().clone()

    for found in run(check):
        torch.testing.assert_close(found, torch.full((1, 8), 0.992, dtype=torch.bfloat16))


def test_filters_unsupported_by_dense_tables_are_reported() -> None:
    with pytest.raises(UsageError, match="delta-keys is for sparse tables"):
        ParameterServer(filters="delta-keys")


def test_wrong_use_is_reported(cluster: LocalCluster) -> None:
    def make(**options: Any) -> tuple[ParameterServer, Net, Optimizer]:
        strategy = ParameterServer(**options)
        model = copy.deepcopy(NET)
        optimizer = torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.1)
        return strategy, *strategy.prepare(model, optimizer)

    def check(rank: int) -> None:
        def one_backward(model: Net) -> None:
            backward(loss_of(model, INPUTS[0, 0], TARGETS[0, 0]))

        strategy, model, optimizer = make()
        with strategy:
            one_backward(model)
            with pytest.raises(UsageError, match=rf"rank {rank}: .*: 'never_called.bias'.*unused='skip'"):
                optimizer.step()
        strategy, model, optimizer = make(unused="skip")
        with strategy:
            unused = model.never_called.bias.detach().clone()
            for _ in range(4):
                optimizer.zero_grad()
                one_backward(model)
                optimizer.step()
            assert torch.equal(model.never_called.bias, unused)
            one_backward(model)
            with pytest.raises(UsageError, match=rf"rank {rank}: backward\(\) reached parameter .* second time"):
                one_backward(model)
            with pytest.raises(UsageError, match=rf"rank {rank}: clip_grad_norm_\(\) after"):
                strategy.clip_grad_norm_(1.0)
            model.last.weight.data = torch.zeros(3)
            with pytest.raises(
                UsageError, match=rf"rank {rank}: parameter 'last.weight' was replaced.*\[1, 20\] on cpu"
            ):
                optimizer.step()

    run(check)


@pytest.mark.parametrize("cluster", [(MEAN, 1), (Eventual(), 1)], indirect=True)
def test_manual_updates_of_parameters_are_rejected(cluster: LocalCluster) -> None:
    def check(rank: int) -> None:
        with ParameterServer() as strategy:
            model = strategy.prepare(copy.deepcopy(NET))
            with torch.no_grad():
                loss_of(model, INPUTS[0, rank], TARGETS[0, rank])
            loss = loss_of(model, INPUTS[0, rank], TARGETS[0, rank])
            with pytest.raises(UsageError, match=rf"rank {rank}: backward\(\) was called, but prepare\(\) got no opt"):
                backward(loss)

    run(check)


@pytest.mark.parametrize("cluster", [(BoundedDelay(tau=2), 1)], indirect=True)
def test_a_program_may_name_the_servers(cluster: LocalCluster) -> None:
    _ranks.here = Ranks()
    fit: list[dict[str, Any]] = [{"consistency": BoundedDelay(tau=2)}, {"replicas": 0}]
    for options in fit:
        ParameterServer(**options).close()
    refused: list[tuple[dict[str, Any], str]] = [
        ({"consistency": BoundedDelay(tau=3)}, "--servers 1 --consistency bounded:3 SCRIPT`, or leave consistency out"),
        ({"consistency": Sequential(), "replicas": 2}, "--servers 3 --replicas 2 --consistency sequential SCRIPT`"),
        ({"consistency": BoundedDelay(tau=2), "replicas": 1}, "--servers 2 --replicas 1 --consistency bounded:2"),
    ]
    for options, message in refused:
        with pytest.raises(UsageError, match=r"were started with consistency=bounded:2, replicas=0: start") as caught:
            ParameterServer(**options)
        assert message in str(caught.value)
    with cluster.connect(observer=True) as observer:
        members = observer.link.get_view()
    assert members.of_role(Role.WORKER) == ()  # the rejected rank has left


@pytest.mark.parametrize("cluster", [(MEAN, 1)], indirect=True)
def test_sequential_training_equals_one_device_with_sums_and_means(cluster: LocalCluster) -> None:
    _ranks.here = Ranks()
    ParameterServer(consistency=Sequential()).close()
    with pytest.raises(UsageError, match="with consistency=bounded:0, but"):
        ParameterServer(consistency=BoundedDelay(tau=0))


def test_missing_rules_and_unsupported_dtypes_are_reported(cluster: LocalCluster) -> None:
    def check(rank: int) -> None:
        with ParameterServer() as strategy, pytest.raises(UsageError, match="LBFGS computes with complete parameters"):
            strategy.prepare(copy.deepcopy(NET), torch.optim.LBFGS(NET.parameters()))
        double = nn.Linear(2, 2).double()
        with ParameterServer() as strategy, pytest.raises(UsageError, match="'weight' is float64"):
            strategy.prepare(double, torch.optim.SGD(double.parameters(), lr=0.1))

    run(check)


@pytest.mark.parametrize("cluster", [(Sequential(), 1)], indirect=True)
def test_a_dying_server_is_named(cluster: LocalCluster) -> None:
    together = threading.Barrier(2)

    def check(rank: int) -> None:
        with ParameterServer() as strategy:
            model = copy.deepcopy(NET)
            prepared, optimizer = strategy.prepare(model, adam(model))
            together.wait()
            if rank == 0:
                os.kill(cluster.pids("server")[0], signal.SIGKILL)
            together.wait()
            backward(loss_of(prepared, INPUTS[0, rank], TARGETS[0, rank]))
            with pytest.raises(ConnectionLostError, match=rf"rank {rank}: server 0 died"):
                optimizer.step()

    run(check)


def test_the_other_ranks_name_a_rank_ended_by_an_exception(cluster: LocalCluster) -> None:
    ended = threading.Event()

    def check(rank: int) -> None:
        if rank == 1:
            strategy = ParameterServer()
            strategy.prepare(copy.deepcopy(NET))
            strategy.__exit__(ZeroDivisionError, ZeroDivisionError("nothing to divide by"), None)
            ended.set()
            return
        strategy = ParameterServer()
        strategy.prepare(copy.deepcopy(NET))
        ended.wait()
        with pytest.raises(PeerError, match="rank 1 has ended with ZeroDivisionError: nothing to divide by"):
            strategy.close()

    run(check)


def test_without_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PACELINE_SCHEDULER", "PACELINE_TOKEN", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match=r"rank 0: .* --strategy parameter-server --servers 1"):
        ParameterServer(timeout=timedelta(seconds=5))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda(cluster: LocalCluster) -> None:
    expected, _ = train_alone(momentum)

    def check(rank: int) -> None:
        with ParameterServer(bucket_mb=0.02, device="cuda") as strategy:
            model = copy.deepcopy(NET)
            prepared, optimizer = strategy.prepare(model, momentum(model))
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
            for inputs, targets in zip(INPUTS[:, rank].cuda(), TARGETS[:, rank].cuda(), strict=True):
                optimizer.zero_grad()
                backward(loss_of(prepared, inputs, targets))
                optimizer.step()
                scheduler.step()
            found = [value.cpu() for value in values_of(model)]
        torch.testing.assert_close(found, values_of(expected), rtol=0, atol=1e-4)

    run(check)
