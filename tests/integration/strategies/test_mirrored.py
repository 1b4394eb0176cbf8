"""Replicas in one process: the results of one device, supported models, and errors."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

from paceline.errors import UsageError
from paceline.torch import CentralStorage, Mirrored, OneDevice, Strategy
from paceline.torch.embeddings import Embedding
from paceline.torch.strategies.replicas.replica_set import ReplicaValues

MakeOptimizer = Callable[[Any], Optimizer]


class CopyingMirrored(Mirrored):
    """A strategy whose replicas have separate copies, like on several devices."""

    def replica_values(self, optimizers: Sequence[Optimizer]) -> ReplicaValues:
        values = super().replica_values(optimizers)
        values.is_shared = _shares_nothing  # type: ignore[method-assign]
        return values


class CopyingStorage(CentralStorage):
    """A strategy whose storage is separate from the replicas, like on another device."""

    def replica_values(self, optimizers: Sequence[Optimizer]) -> ReplicaValues:
        values = super().replica_values(optimizers)
        values.is_shared = _shares_nothing  # type: ignore[method-assign]
        return values


def _shares_nothing(replica: int) -> bool:
    return False


STRATEGIES = [Mirrored, CentralStorage, CopyingMirrored, CopyingStorage]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Use one thread, because threads of an operator wait for one another if other tests use the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _ended_threads() -> Iterator[None]:
    started: list[Strategy] = []
    original = Strategy.__init__

    def noting(self: Strategy, *args: Any, **kwargs: Any) -> None:
        started.append(self)
        original(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Strategy, "__init__", noting)
        yield
    for strategy in started:
        strategy.close()


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 6 * 6, 16), nn.Tanh(), nn.Linear(16, 5)
    )


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(30, 1, 8, 8, generator=generator), torch.randint(0, 5, (30,), generator=generator))
        for _ in range(20)
    ]


def train(strategy: Strategy, make_optimizer: MakeOptimizer) -> torch.Tensor:
    module = model()
    prepared, optimizer = strategy.prepare(module, make_optimizer(module.parameters()))
    for x, y in batches():
        optimizer.zero_grad()
        loss = functional.cross_entropy(prepared(x.to(strategy.device)), y.to(strategy.device))
        loss.backward()
        optimizer.step()
    return torch.cat([parameter.detach().cpu().flatten() for parameter in module.parameters()])


def momentum(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adam(parameters: Any) -> Optimizer:
    return torch.optim.Adam(parameters, lr=1e-3)


@pytest.mark.parametrize("make_optimizer", [momentum, adam])
def test_results_equal_one_device(make_optimizer: MakeOptimizer) -> None:
    expected = train(OneDevice(device="cpu"), make_optimizer)
    for kind in STRATEGIES:
        found = train(kind(replicas=4, device="cpu"), make_optimizer)
        assert (found - expected).abs().max() < 1e-5, kind
    assert torch.equal(found, train(kind(replicas=4, device="cpu"), make_optimizer)), "not deterministic"


@pytest.mark.parametrize("kind", [CopyingMirrored, CopyingStorage])
def test_copies_see_loaded_values(kind: type[Strategy]) -> None:
    strategy = kind(replicas=2, device="cpu")  # type: ignore[call-arg]
    module = nn.Linear(3, 2)
    prepared = strategy.prepare(module)
    x = torch.rand(4, 3)
    prepared(x)
    module.load_state_dict({"weight": torch.ones(2, 3), "bias": torch.zeros(2)})
    assert torch.allclose(prepared(x), x.sum(1, keepdim=True).expand(4, 2))
    with torch.no_grad():
        module.weight.data = torch.zeros(2, 3)
    assert torch.equal(prepared(x), torch.zeros(4, 2))


@pytest.mark.parametrize("kind", STRATEGIES)
@pytest.mark.parametrize("has_optimizer", [False, True])
def test_copies_see_writes_through_data(kind: type[Strategy], has_optimizer: bool) -> None:
    def train(strategy: Strategy) -> torch.Tensor:
        module = model()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05) if has_optimizer else None
        prepared = strategy.prepare(module, optimizer)
        prepared = prepared[0] if has_optimizer else prepared
        for x, y in batches()[:5]:
            module.zero_grad()
            halves = zip(x.split(15), y.split(15), strict=True)
            losses = [functional.cross_entropy(prepared(half), targets) for half, targets in halves]
            torch.stack(losses).mean().backward()
            if optimizer is not None:
                optimizer.step()
            for parameter in module.parameters():
                assert parameter.grad is not None
                parameter.data.sub_(parameter.grad, alpha=0.05).clamp_(-0.1, 0.1)
        return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])

    expected = train(OneDevice(device="cpu"))
    assert (train(kind(replicas=2, device="cpu")) - expected).abs().max() < 1e-5  # type: ignore[call-arg]


class Everything(nn.Module):
    """A model with nested arguments and outputs, a scalar loss, buffers, state, frozen and tied parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.tied = nn.Linear(3, 3)
        self.tied.weight = self.first.weight
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.norm = nn.BatchNorm1d(3)
        self.rnn = nn.GRU(3, 3, batch_first=True)
        self.calls = 0
        self.act = self.activate

    def activate(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.tied(x))

    def forward(self, batch: dict[str, Any], *, scale: float = 1.0) -> dict[str, Any]:
        self.calls += 1
        x, y = batch["x"]
        hidden = self.frozen(self.act(self.first(x)))
        steps, _ = self.rnn(hidden.unsqueeze(1))
        return {"out": (steps.squeeze(1) * scale, None), "loss": ((hidden - y) ** 2).mean(), "norm": self.norm(x)}


@pytest.mark.parametrize("kind", STRATEGIES)
def test_a_model_may_have_branches_and_side_effects(kind: type[Strategy]) -> None:
    torch.manual_seed(0)
    module = Everything()
    reference = Everything()
    reference.load_state_dict(module.state_dict())
    prepared = kind(replicas=2, device="cpu").prepare(module)  # type: ignore[call-arg]
    x, y = torch.randn(8, 3, requires_grad=True), torch.randn(8, 3)
    x_alone = x.detach().clone().requires_grad_()
    found = prepared({"x": (x, y)}, scale=2.0)
    alone = reference({"x": (x_alone, y)}, scale=2.0)
    assert torch.allclose(found["out"][0], alone["out"][0], atol=1e-6)
    assert found["out"][1] is None
    assert torch.allclose(found["loss"], alone["loss"])
    (found["loss"] + found["out"][0].square().sum()).backward()
    (alone["loss"] + alone["out"][0].square().sum()).backward()
    assert x.grad is not None
    assert x_alone.grad is not None
    assert torch.allclose(x.grad, x_alone.grad, atol=1e-5)
    for (name, parameter), other in zip(module.named_parameters(), reference.parameters(), strict=True):
        assert (parameter.grad is None) == (other.grad is None), name
        if parameter.grad is not None and other.grad is not None:
            assert torch.allclose(parameter.grad, other.grad, atol=1e-5), name
    # The buffers are the buffers of replica 0, which has the first half of the batch.
    assert module.calls == 1
    kept = nn.BatchNorm1d(3)
    kept(x[:4])
    assert torch.allclose(module.norm.running_mean, kept.running_mean)  # type: ignore[arg-type]
    assert module.norm.num_batches_tracked == 1
    prepared.eval()
    with torch.no_grad():
        evaluated = prepared({"x": (x, y)})
    assert torch.allclose(evaluated["norm"], module.norm(x), atol=1e-6)
    assert not evaluated["norm"].requires_grad
    assert not module.norm.training
    with torch.inference_mode():
        assert torch.equal(prepared({"x": (x, y)})["norm"], evaluated["norm"])


def test_hooks_autocast_accumulation_and_clipping() -> None:
    module = nn.Linear(4, 2)
    strategy = Mirrored(replicas=2, device="cpu")
    prepared, _ = strategy.prepare(module, momentum(module.parameters()))
    seen: list[int] = []
    module.weight.register_post_accumulate_grad_hook(lambda p: seen.append(1))
    module.register_forward_hook(lambda m, args, out: out * 2)
    x = torch.rand(6, 4)
    assert torch.allclose(prepared(x), functional.linear(x, module.weight, module.bias) * 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert prepared(x).dtype == torch.bfloat16
    for is_last in (False, True):
        with strategy.accumulate(is_last):
            prepared(x).sum().backward()
    assert seen == [1, 1]
    assert module.weight.grad is not None
    assert torch.allclose(module.weight.grad, 4 * x.sum(0).expand(2, 4))
    norm = strategy.clip_grad_norm_(1.0)
    assert norm > 1
    assert abs(nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None]) - 1) < 1e-4


class Heated(nn.Module):
    """A model with an additional attribute and method."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 2)
        self.temperature = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encode(x) / self.temperature

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.body(x))


@pytest.mark.parametrize("kind", STRATEGIES)
def test_the_prepared_model_has_the_attributes_of_the_users_model(kind: type[Mirrored]) -> None:
    module = Heated()
    before = (list(module.state_dict()), [name for name, _ in module.named_modules()], repr(module))
    strategy = kind(replicas=2, device="cpu")
    prepared, _ = strategy.prepare(module, momentum(module.parameters()))
    assert isinstance(prepared, Heated)
    assert before == (list(prepared.state_dict()), [name for name, _ in prepared.named_modules()], repr(prepared))
    assert prepared.temperature == 2.0
    assert not hasattr(prepared, "pressure")
    x = torch.rand(6, 4)
    assert torch.allclose(prepared.encode(x), 2 * prepared(x))
    prepared.temperature = 4.0
    assert torch.allclose(prepared.encode(x), 4 * prepared(x))
    strategy.close()
    assert type(prepared) is Heated
    assert torch.allclose(prepared.encode(x), 4 * prepared(x))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copy_of_the_prepared_model_is_independent(copied: Callable[[nn.Module], nn.Module]) -> None:
    module = Heated()
    with Mirrored(replicas=2, device="cpu") as strategy:
        prepared, _ = strategy.prepare(module, momentum(module.parameters()))
        other, x = copied(prepared), torch.rand(6, 4)
        assert type(other) is Heated
        assert torch.equal(other(x), prepared(x))
        with torch.no_grad():
            other.get_parameter("body.weight").zero_()
        assert module.body.weight.any()


def test_a_custom_forward_and_hooks_on_the_complete_batch() -> None:
    module = Heated()
    rows: list[int] = []
    with Mirrored(replicas=2, device="cpu") as strategy:
        module.forward = module.encode  # type: ignore[method-assign]
        prepared, _ = strategy.prepare(module, momentum(module.parameters()))
        module.register_forward_hook(lambda m, args, out: rows.append(len(out)))
        module.body.register_forward_hook(lambda m, args, out: rows.append(len(out)))
        x = torch.rand(6, 4)
        assert torch.allclose(prepared(x), torch.tanh(functional.linear(x, module.body.weight, module.body.bias)))
    assert rows == [3, 3, 6]
    assert "forward" in vars(module)


def test_a_module_compiled_in_place_has_gradients() -> None:
    """Compiled code is bound to the module's parameters, so replicas run the uncompiled code."""
    module = Heated()
    module.body.compile(backend="eager")
    with CopyingMirrored(replicas=2, device="cpu") as strategy:
        prepared, _ = strategy.prepare(module, momentum(module.parameters()))
        x = torch.rand(6, 4)
        prepared(x).sum().backward()
        found = module.body.weight.grad
    module.zero_grad()
    module(x).sum().backward()
    torch.testing.assert_close(found, module.body.weight.grad)


def test_the_loader_is_complete_and_a_small_batch_uses_fewer_replicas() -> None:
    rows: list[int] = []

    class Noting(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows.append(len(x))
            return x

    data = TensorDataset(torch.arange(13.0).view(13, 1))
    prepared, loader = Mirrored(replicas=4, device="cpu").prepare(Noting(), None, DataLoader(data, batch_size=10))
    assert [prepared(x).flatten().tolist() for (x,) in loader] == [list(range(10)), [10, 11, 12]]
    assert sorted(rows[:4]) == [1, 3, 3, 3]
    assert rows[4:] == [1, 1, 1]


def test_retain_graph_and_unsupported_options() -> None:
    module = nn.Linear(2, 2)
    prepared = Mirrored(replicas=2, device="cpu").prepare(module)
    out = prepared(torch.ones(4, 2)).sum()
    out.backward(retain_graph=True)
    out.backward()
    assert module.bias.grad is not None
    assert module.bias.grad.tolist() == [8, 8]
    with pytest.raises(UsageError, match=r"twice.*retain_graph=True"):
        out.backward()
    with pytest.raises(UsageError, match="no second derivatives"):
        prepared(torch.ones(4, 2)).sum().backward(create_graph=True)


def test_an_error_names_the_replica_and_keeps_the_type() -> None:
    class Failing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if 7 in x:
                raise KeyError("no seven")
            return x

    prepared = Mirrored(replicas=3, device="cpu").prepare(Failing())
    with pytest.raises(KeyError, match="replica 2 of 3 on cpu: no seven"):
        prepared(torch.arange(9.0))
    assert prepared(torch.arange(6.0)).tolist() == list(range(6))


def test_embeddings_record_the_lookups_of_all_replicas() -> None:
    keys = torch.tensor([[5, 7], [7, 9], [5, 5], [2**60, 9]])

    def rows_after(strategy: Strategy) -> torch.Tensor:
        module = nn.Sequential(Embedding(4, name="rows"), nn.Flatten())
        prepared, optimizer = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
        for _ in range(3):
            optimizer.zero_grad()
            prepared(keys).square().mean().backward()
            optimizer.step()
        with torch.no_grad():
            found: torch.Tensor = prepared(keys)
        return found

    expected = rows_after(OneDevice(device="cpu"))
    assert not torch.allclose(expected, rows_after(OneDevice(device="cpu")) * 0)
    for kind in STRATEGIES:
        assert torch.allclose(rows_after(kind(replicas=2, device="cpu")), expected, atol=1e-6), kind


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", [Mirrored, CentralStorage, CopyingMirrored])
def test_on_one_cuda_device(kind: type[Mirrored | CentralStorage]) -> None:
    expected = train(OneDevice(device="cpu"), momentum)
    for devices in (["cuda:0"], ["cuda:0", "cuda:0"]):
        found = train(kind(devices=devices), momentum)
        assert (found - expected).abs().max() < 1e-3, devices
