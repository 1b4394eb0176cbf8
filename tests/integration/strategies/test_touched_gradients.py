"""Changes of gradients between ``backward()`` and ``step()`` have the same effect with servers as on one device."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch.optim import Optimizer  # noqa: E402

import paceline  # noqa: E402
from paceline.collectives import Group  # noqa: E402
from paceline.errors import UsageError  # noqa: E402
from paceline.launch.local import LocalCluster  # noqa: E402
from paceline.protocol import BoundedDelay, Sequential  # noqa: E402
from paceline.testing import run_ranks  # noqa: E402
from paceline.torch.strategies.ranks import Ranks  # noqa: E402
from paceline.torch.strategies.server import parameter_server  # noqa: E402
from paceline.torch.strategies.server.parameter_server import ParameterServer  # noqa: E402

STEPS = 8
INPUTS = torch.randn(STEPS, 2, 4, 6, generator=torch.Generator().manual_seed(3))
TARGETS = 10 * INPUTS.sum(-1, keepdim=True).sin()
_ranks = threading.local()

Hands = Callable[[nn.Module, Optimizer, int], None]


@pytest.fixture(scope="module")
def sequential() -> Iterator[LocalCluster]:
    with paceline.local_cluster(workers=2, consistency=Sequential(aggregate="mean")) as cluster:
        yield cluster


@pytest.fixture
def cluster(sequential: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> LocalCluster:
    _join(sequential, monkeypatch)
    return sequential


def _join(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parameter_server, "connect_workers", lambda name, rank, timeout: cluster.connect(rank=rank))
    monkeypatch.setattr(Ranks, "meet", lambda timeout: _ranks.here)


def run(function: Callable[[int], Any]) -> list[Any]:
    def work(group: Group) -> Any:
        _ranks.here = Ranks(group.rank, 2, group.rank, group)
        return function(group.rank)

    return run_ranks(2, work)


torch.manual_seed(0)
NET = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))


def make() -> tuple[nn.Module, Optimizer]:
    model = copy.deepcopy(NET)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train(prepared: Any, hands: Hands, rank: int | None) -> list[Tensor]:
    model, optimizer = prepared
    parameters = list(model.parameters())
    for step in range(STEPS):
        inputs, targets = INPUTS[step], TARGETS[step]
        if rank is not None:
            inputs, targets = inputs[rank : rank + 1], targets[rank : rank + 1]
        optimizer.zero_grad()
        torch.autograd.backward(nn.functional.mse_loss(model(inputs.flatten(0, 1)), targets.flatten(0, 1)))
        hands(model, optimizer, step)
        optimizer.step()
    model.state_dict()
    return [parameter.detach().clone() for parameter in parameters]


def clip_norm(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def clip_values(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 0.1)


def clip_sometimes(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None and parameter.grad.norm() > 3:
            parameter.grad.mul_(3 / parameter.grad.norm())


def through_data(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.data.clamp_(-0.1, 0.1)


def replace(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad.sign() * 0.1


def unscale(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(1024.0)
    scaler.scale(torch.zeros(()))
    inner = getattr(optimizer, "inner", optimizer)
    scaler.unscale_(inner)
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.clamp_(-0.3, 0.3)


@pytest.mark.parametrize("hands", [clip_norm, clip_values, clip_sometimes, through_data, replace, unscale])
def test_a_change_has_the_same_effect_as_on_one_device(cluster: LocalCluster, hands: Hands) -> None:
    expected = train(make(), hands, None)

    def check(rank: int) -> list[Tensor]:
        with ParameterServer() as strategy:
            return train(strategy.prepare(*make()), hands, rank)

    for found in run(check):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def change_late(how: Hands) -> Hands:
    return lambda model, optimizer, step: how(model, optimizer, step) if step > 5 else None


@pytest.mark.parametrize("hands", [clip_norm, through_data, replace])
def test_a_late_change_is_refused_unless_no_gradient_is_sent_early(cluster: LocalCluster, hands: Hands) -> None:
    expected = train(make(), change_late(hands), None)

    def check_refused(rank: int) -> None:
        message = rf"rank {rank}: the gradient of '0.weight' was changed .*overlap=False"
        with ParameterServer() as strategy, pytest.raises(UsageError, match=message):
            train(strategy.prepare(*make()), change_late(hands), rank)

    def check(rank: int) -> list[Tensor]:
        with ParameterServer(overlap=False) as strategy:
            return train(strategy.prepare(*make()), change_late(hands), rank)

    run(check_refused)
    for found in run(check):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_gradients_are_sent_early_if_the_script_only_reads_sometimes(cluster: LocalCluster) -> None:
    def read_gradients(model: nn.Module, optimizer: Optimizer, step: int) -> None:
        if step == 5:
            sum(parameter.grad.data.norm() for parameter in model.parameters() if parameter.grad is not None)

    expected = train(make(), read_gradients, None)

    def check(rank: int) -> list[Tensor]:
        strategy = ParameterServer()
        with strategy:
            found = train(strategy.prepare(*make()), read_gradients, rank)
            assert strategy.dense is not None
            assert strategy.dense.hands_on.is_early
        return found

    for found in run(check):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_several_backwards_add_up(cluster: LocalCluster) -> None:
    def again(model: nn.Module, optimizer: Optimizer, step: int) -> None:
        torch.autograd.backward(0.01 * sum(parameter.square().sum() for parameter in model.parameters()))
        clip_norm(model, optimizer, step)

    expected = train(make(), again, None)

    def check(rank: int) -> list[Tensor]:
        with ParameterServer() as strategy:
            return train(strategy.prepare(*make()), again, rank)

    for found in run(check):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_a_change_of_a_rank_s_own_gradients_is_refused(cluster: LocalCluster) -> None:
    def check(rank: int) -> None:
        with ParameterServer() as strategy, contextlib.ExitStack() as held:
            model, optimizer = strategy.prepare(*make())
            held.enter_context(strategy.no_sync())
            with pytest.raises(UsageError, match=r"because every backward\(\) was in no_sync\(\)"):
                train((model, optimizer), clip_norm, rank)

    run(check)


def test_with_bounded_delay_a_rank_reads_its_own_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks with strongly clipped gradients each move the model by their own clipped step."""
    with paceline.local_cluster(workers=2, consistency=BoundedDelay(tau=1)) as cluster:
        _join(cluster, monkeypatch)

        def clip(model: nn.Module, optimizer: Optimizer, step: int) -> None:
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)

        def check(rank: int) -> float:
            model, optimizer = make()
            before = [parameter.detach().clone() for parameter in model.parameters()]
            with ParameterServer() as strategy:
                model, optimizer = strategy.prepare(model, optimizer)
                train((model, optimizer), clip, rank)
                strategy.gather_values()
                after = [parameter.detach() for parameter in model.parameters()]
                return float(sum((a - b).square().sum() for a, b in zip(after, before, strict=True)))

        first, second = run(check)
    assert 0 < first == second < (2 * STEPS * 1e-3 * 0.05 * 10) ** 2


def test_a_copy_of_a_model_is_not_observed(cluster: LocalCluster) -> None:
    def check(rank: int) -> None:
        model, optimizer = make()
        with ParameterServer() as strategy:
            strategy.prepare(model, optimizer)
            copies = [copy.deepcopy(model), copy.copy(model)]
            assert {type(parameter) for parameter in copies[0].parameters()} == {nn.Parameter}
        assert {type(parameter) for parameter in model.parameters()} == {nn.Parameter}

    run(check)


def test_ranks_with_different_written_values_are_reported(cluster: LocalCluster) -> None:
    def check(rank: int) -> None:
        with ParameterServer() as strategy:
            model, optimizer = strategy.prepare(*make())
            with torch.no_grad():
                model[2].weight.fill_(float(rank))
            with pytest.raises(UsageError, match=r"'2.weight' was written to after prepare\(\), but rank 1 has other"):
                train((model, optimizer), lambda *_: None, rank)

    run(check)


def test_parameters_are_written_before_the_first_step_under_bounded_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    with paceline.local_cluster(workers=2, consistency=BoundedDelay(tau=1)) as cluster:
        _join(cluster, monkeypatch)

        def check(rank: int) -> None:
            with ParameterServer() as strategy:
                model, optimizer = strategy.prepare(*make())
                nn.init.constant_(model[0].bias, 100.0)  # these inputs are in the flat part of tanh
                train((model, optimizer), lambda *_: None, rank)
                assert torch.equal(model[0].bias, torch.full((16,), 100.0))
                strategy.barrier()  # in later steps, gradients are not zero
                nn.init.zeros_(model[0].bias)
                with pytest.raises(
                    UsageError, match=rf"rank {rank}: parameter '0.bias' was written .* bounded:1 other ranks'"
                ):
                    train((model, optimizer), lambda *_: None, rank)

        run(check)


def test_every_use_of_a_parameter_waits_for_its_values(cluster: LocalCluster) -> None:
    """This also holds for the program's references in lists."""

    def check(rank: int) -> None:
        with ParameterServer() as strategy:
            model, optimizer = strategy.prepare(*make())
            kept = list(model.parameters())
            mean = [tensor.detach().clone() for tensor in kept]
            for step in range(STEPS):
                optimizer.zero_grad()
                inputs = INPUTS[step, rank]
                torch.autograd.backward(model(inputs).square().mean())
                versions = [tensor._version for tensor in kept]
                optimizer.step()
                torch._foreach_lerp_(mean, kept, 1.0)
                assert all(tensor._version > version for tensor, version in zip(kept, versions, strict=True))
                for one, value in zip(mean, model.state_dict().values(), strict=True):
                    assert torch.equal(one, value)

    run(check)
