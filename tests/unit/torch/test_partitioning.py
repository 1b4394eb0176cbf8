"""Partitioned models compute the same as whole models: random graphs, tied weights, dropout, buffers; errors."""

from __future__ import annotations

import copy
import io
import os
import pickle
import random
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline.torch as pt
from paceline.errors import UsageError

DIM = 3


class RandomGraph(nn.Module):
    """A model of random operations with random inputs."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        chance = random.Random(seed)
        self.steps: list[tuple[str, list[int]]] = []
        self.layers = nn.ModuleDict()
        for number in range(chance.randint(1, 10)):
            kind = chance.choice(["linear", "tied", "weight", "add", "tanh", "split", "dropout", "norm", "cat"])
            self.steps.append((kind, [chance.randrange(number + 1) for _ in range(2)]))
            if kind in ("linear", "tied"):
                self.layers[str(number)] = nn.Linear(DIM, DIM)
            elif kind == "dropout":
                self.layers[str(number)] = nn.Dropout(0.5)
            elif kind == "norm":
                self.layers[str(number)] = nn.BatchNorm1d(DIM)
            elif kind == "weight":
                self.register_parameter(f"weight{number}", nn.Parameter(torch.randn(DIM)))
        linear = [layer for layer in self.layers.values() if isinstance(layer, nn.Linear)]
        for (kind, _), layer in zip(
            [step for step in self.steps if step[0] in ("linear", "tied")], linear, strict=True
        ):
            if kind == "tied":
                layer.weight = linear[0].weight
        self.outputs = [chance.randrange(1, len(self.steps) + 1) for _ in range(2)]

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        values = [x]
        for number, (kind, taken) in enumerate(self.steps):
            a, b = (values[index] for index in taken)
            if kind == "add":
                value = a + b
            elif kind == "tanh":
                value = torch.tanh(a)
            elif kind == "split":
                first, second = torch.split(a, [1, DIM - 1], dim=1)
                value = torch.cat([second, first], dim=1) * b
            elif kind == "cat":
                value = torch.cat([a, b], dim=1)[:, :DIM]
            elif kind == "weight":
                value = a * getattr(self, f"weight{number}")
            else:
                value = self.layers[str(number)](a)
            values.append(value)
        return {"first": values[self.outputs[0]], "more": [values[self.outputs[1]]]}


def run(model: nn.Module, x: torch.Tensor) -> tuple[list[torch.Tensor], list[Any]]:
    """Return the outputs and gradients of a training step. The input's gradient is the last."""
    torch.manual_seed(5)
    x = x.clone().requires_grad_()
    found = model(x)
    outputs = [found["first"], found["more"][0]]
    loss = sum(output.square().sum() for output in outputs)
    gradients = torch.autograd.grad(loss, [*model.parameters(), x], allow_unused=True)
    return outputs, list(gradients)


def assert_same(found: list[Any], expected: list[Any]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("seeds", [range(15), pytest.param(range(15, 1000), marks=pytest.mark.thorough)])
def test_random_graphs_equal_the_unpartitioned_model(seeds: range) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, DIM, dtype=torch.float64)
    num_sent = 0
    for seed in seeds:
        whole = RandomGraph(seed).double()
        chance = random.Random(seed)
        names = [f"layers.{name}" for name in whole.layers]
        parted = pt.partition(
            copy.deepcopy(whole),
            x,
            ["cpu"] * 3,
            {"": chance.randrange(3)} | {name: chance.randrange(3) for name in names},
        )
        for got, expected in zip(run(parted, x), run(whole, x), strict=True):
            assert_same(got, expected)
        assert_same(list(parted.state_dict().values()), list(whole.state_dict().values()))
        assert list(parted.state_dict()) == list(whole.state_dict())
        num_sent += len(parted.cut.transfers)
    assert num_sent > 1.5 * len(seeds)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.layer = nn.Linear(4, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(torch.relu(self.layer(self.embed(x))))
        return found


class Branching(Tied):
    """A model with a loop over a size, which torch.export can trace but torch.fx cannot."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.embed(x)
        for _ in range(len(y.shape)):
            y = nn.functional.dropout(self.layer(y), 0.5, self.training)
        found: torch.Tensor = self.head(y)
        return found


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch.compile reads the attribute
@pytest.mark.parametrize(
    ("compiled", "kind"),
    [
        (False, Tied),
        (False, Branching),
        pytest.param("aot_eager", Tied, marks=pytest.mark.thorough),
        ("aot_eager", Branching),
    ],
)
def test_training_of_tied_weights_equals_training_in_one_process(kind: type[nn.Module], compiled: bool | str) -> None:
    torch.manual_seed(0)
    whole = kind()
    model = copy.deepcopy(whole)
    x = torch.randint(0, 10, (6,))
    optimizers = [torch.optim.Adam(module.parameters(), lr=0.1) for module in (whole, model)]
    parted = pt.partition(model, x, ["cpu", "cpu"], {"embed": 0, "head": 1}, compile=compiled)
    for step in range(3):
        for module, optimizer in zip((whole, parted), optimizers, strict=True):
            torch.manual_seed(step)
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(x), x).backward()
            optimizer.step()
    assert_same(list(parted.state_dict().values()), list(whole.state_dict().values()))
    with torch.no_grad():
        found = parted.eval()(x[:2])
        torch.testing.assert_close(found, whole.eval()(x[:2]), rtol=1e-5, atol=1e-6)
        assert not found.requires_grad
    assert parted.training is False


class Modal(nn.Module):
    """A model that depends on its mode and on the mode of one of its modules."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(DIM, DIM), nn.Sequential(nn.Linear(DIM, DIM), Doubling())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = nn.functional.dropout(self.first(x), 0.5, self.training)
        if self.training:
            h = h * 3
        found: torch.Tensor = self.last(h)
        return found


class Doubling(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if self.training else x


def test_behaviour_follows_the_modes_of_the_model() -> None:
    whole, x = Modal(), torch.randn(2, DIM)
    parted = pt.partition(copy.deepcopy(whole), x, ["cpu", "cpu"], {"first": 0, "last": 1})
    for change in ("train", "eval"):
        for model in (whole, parted):
            getattr(model, change)()
        assert_same(run_once(parted, x), run_once(whole, x))
    for model in (whole, parted):
        model.get_submodule("last.1").train()
    assert_same(run_once(parted, x), run_once(whole, x))
    assert {segment.device for segment in parted.cut.segments} == {0, 1}


def run_once(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(3)
    return [model(x)]


def test_unsupported_uses_of_a_partitioned_model_are_reported(capfd: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    parted = pt.partition(model, torch.ones(2, 3), ["cpu", "cpu"], {"0": 0, "1": 1})
    for dump in (pickle.dumps, lambda obj: torch.save(obj, io.BytesIO())):
        with pytest.raises(UsageError, match=r"cannot be pickled.* Save its state_dict\(\)"):
            dump(parted)
    model[1] = nn.Linear(3, 2)
    with pytest.raises(UsageError, match=r"from '1' on: partition the model again"):
        parted(torch.ones(2, 3))
    model.append(nn.Linear(2, 2))
    with pytest.raises(UsageError, match="partition the model again"):
        parted(torch.ones(2, 3))

    class Branching(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if x.sum() > 0 else x

    with pytest.raises(UsageError, match="Branching cannot be cut"):
        pt.partition(Branching(), torch.ones(2, 3), ["cpu", "cpu"])
    assert "def forward" not in capfd.readouterr().err


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no os.fork")
def test_a_forked_child_has_its_own_threads() -> None:
    parted = pt.partition(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), torch.ones(2, 3), ["cpu", "cpu"], {"0": 0, "1": 1})
    with torch.no_grad():
        expected = parted(torch.ones(2, 3))
        child = os.fork()
        if not child:
            signal.alarm(20)
            os._exit(0 if torch.equal(parted(torch.ones(2, 3)), expected) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_copy_is_a_separate_model() -> None:
    model = pt.partition(Tied(), torch.arange(3), ["cpu", "cpu"])
    before = model(torch.arange(3))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert torch.equal(model(torch.arange(3)), before)
    assert not twin(torch.arange(3)).any()
    assert twin.double()(torch.arange(3)).dtype == torch.float64


def test_a_planner_spreads_the_parameters(tmp_path: Path) -> None:
    layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(8)))
    model = pt.partition(layers, torch.randn(2, 16), ["cpu", "cpu"])
    held = [line for line in model.describe().splitlines() if line.startswith("device")]
    assert held == [f"device {number}: cpu, 4,352 bytes of parameters and buffers" for number in (0, 1)]
    assert [transfer.source for transfer in model.cut.transfers] == [-1, 0]
    model.save_svg(tmp_path / "cut.svg")
    assert "segment 1" in (tmp_path / "cut.svg").read_text()
    with pytest.raises(UsageError, match="needs 1,088 bytes, but the devices have"):
        pt.partition(layers, torch.randn(2, 16), ["cpu", "cpu"], memory=[4000, 4000])


def test_the_example_of_the_docs_prints_the_documented_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[3] / "docs/guides/partitioning.md").read_text(encoding="utf-8")
    example, _, following = page.partition("```python\n")[2].partition("```")
    monkeypatch.chdir(tmp_path)
    exec(example, {})
    assert capsys.readouterr().out == following.partition("```text\n")[2].partition("```")[0]
    assert (tmp_path / "cut.svg").exists()


def test_a_raising_operation_is_named() -> None:
    model = pt.partition(Tied(), torch.arange(3), ["cpu", "cpu"], {"embed": 0, "layer": 0, "head": 1})
    with pytest.raises(IndexError, match=r"part 0 of 2 on cpu: embed: index out of range"):
        model(torch.tensor([10]))
    assert model(torch.tensor([9])).shape == (1, 10)


class InPlace(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        z = y + 1
        y.view(-1).add_(1)
        return y + z


class InPlaceAfterModules(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.flat = nn.Sequential(nn.Flatten(), nn.Identity())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x * 1.0
        return nn.functional.relu(self.flat(h.unsqueeze(0)), inplace=True) + h


class Noise(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn(DIM)


class Frozen(nn.Module):
    """A model whose first layer has no gradients. It counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            h = self.first(x)
        found: torch.Tensor = self.last(h)
        return found


class Counting(Frozen):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.get_buffer("mean").mul_(0.9)
        found: torch.Tensor = self.last(x)
        return found


@pytest.mark.parametrize("kind", [Noise, Frozen, Counting])
def test_untraced_attributes_are_kept(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    whole, x = kind(), torch.randn(2, DIM)
    model = copy.deepcopy(whole)
    parted = pt.partition(model, x, ["cpu", "cpu"], {"last": 1} if kind is not Noise else None)
    assert_same(list(model.buffers()), list(whole.buffers()))
    for seed in range(2):
        outputs: list[torch.Tensor] = []
        for module in (whole, parted):
            torch.manual_seed(seed)
            outputs.append(module(x))
        assert_same(outputs[1:], outputs[:1])
        if outputs[0].requires_grad:
            for output in outputs:
                output.sum().backward()
    assert_same(
        [parameter.grad for parameter in parted.parameters()], [parameter.grad for parameter in whole.parameters()]
    )
    assert_same(list(parted.buffers()), list(whole.buffers()))


class Optional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, half: bool = False) -> dict[str, Any]:
        h = self.first(x)
        if mask is None:
            mask = torch.ones_like(h)
        if half:
            h, mask = h[:1], mask[:1]
        return {"h": h, "y": [self.last(h * mask)]}


def test_arguments_without_tensors_may_select_branches() -> None:
    whole, x = Optional(), torch.randn(4, DIM)
    parted = pt.partition(copy.deepcopy(whole), x, ["cpu", "cpu"], {"first": 0, "last": 1})
    parted.load_state_dict(whole.state_dict())
    for arguments in ((x,), (x, None, True), (x, x > 0), (x, x > 0, True)):
        found, expected = parted(*arguments), whole(*arguments)
        assert type(found) is dict
        assert type(found["y"]) is list
        assert_same([found["h"], *found["y"]], [expected["h"], *expected["y"]])


class BySize(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] > 4 else x


def test_sizes_that_the_traced_graph_does_not_support_are_rejected() -> None:
    model = pt.partition(BySize(), torch.randn(6, DIM), ["cpu"])
    assert model(torch.ones(5, DIM)).sum() == 2 * 5 * DIM
    with pytest.raises(UsageError, match="was called with arguments that its graph does not support"):
        model(torch.ones(3, DIM))


def test_several_threads_may_call_concurrently() -> None:
    model, x = pt.partition(Tied(), torch.arange(3), ["cpu", "cpu"]), torch.arange(3)
    expected = model(x)
    with ThreadPoolExecutor(4) as pool:
        assert all(torch.equal(output, expected) for output in pool.map(model, [x] * 40))


class ByValue(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.sum() > 0 else x


@pytest.mark.parametrize(
    ("model", "devices", "options", "message"),
    [
        (Tied(), [], {}, r"devices: got \[\], expected a list"),
        (Tied(), "cpu", {}, "devices: got 'cpu', expected a list"),
        (Tied(), ["cpu", "nowhere"], {}, "devices: nowhere cannot be used"),
        (Tied(), ["cpu"], {"placement": {"heed": 0}}, "got 'heed', expected the name of a module.* near it are head"),
        (Tied(), ["cpu"], {"placement": {"head": 1}}, "placement of 'head': got 1, expected one of cpu, or an index"),
        (Tied(), ["cpu"], {"placement": {"head": "cuda:7"}}, "placement of 'head': got 'cuda:7'"),
        (Tied(), ["cpu"], {"placement": {"head": 0}, "memory": [1]}, "got both placement and memory"),
        (Tied(), ["cpu"], {"memory": [1, 2]}, "memory: got 2 numbers"),
        (InPlace(), ["cpu"], {}, "add_ changes .* in place, but .* uses it too"),
        (InPlaceAfterModules(), ["cpu"], {}, "relu changes .* in place, but .* uses it too"),
        (ByValue(), ["cpu"], {}, "ByValue cannot be cut: .* torch.fx: .* torch.export"),
    ],
)
def test_impossible_partitions_are_rejected(
    model: nn.Module, devices: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        pt.partition(model, torch.arange(3), devices, **options)
