"""A model's layers, the values between layers, and models that cannot be cut."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import pipe_split

from paceline.errors import UsageError
from paceline.torch.capture.graph import bind
from paceline.torch.strategies.pipeline.loop.batches import add_numbers, row_bounds
from paceline.torch.strategies.pipeline.loop.output_rows import joined_output, rule_of
from paceline.torch.strategies.pipeline.loop.ownership import AbsentGrad
from paceline.torch.strategies.pipeline.loop.row_dimensions import RowShapes
from paceline.torch.strategies.pipeline.plan.measuring import measure_layers
from paceline.torch.strategies.pipeline.run.layers import LayerGraph, trace
from paceline.torch.strategies.pipeline.run.partition import cut, cuts_by_name
from paceline.torch.strategies.pipeline.run.stage import LayerError, Saved, Stage
from paceline.torch.strategies.pipeline.run.values import put_together, take_apart, tensors_of


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Any:
        return x + self.drop(torch.relu(self.linear(x)))


class Gate(nn.Module):
    """A module whose branch depends on values, so it cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return self.inner(x) if x.sum() > 0 else x


class Net(nn.Module):
    def __init__(self, *, marked: bool = False) -> None:
        super().__init__()
        self.marked = marked
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.gate = Gate()
        self.last = nn.Linear(4, 4)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor, scale: float = 1.0, mask: Tensor | None = None) -> Any:
        early = self.first(x)
        x = early
        for block in self.blocks:
            if self.marked:
                pipe_split()
            x = block(x)
        x = self.gate(x) * scale
        return self.last(x + early)


def traced(module: nn.Module, x: Tensor) -> LayerGraph:
    return trace(module, bind(module, (x,), {}))


X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def test_layers_are_the_modules_that_the_forward_calls() -> None:
    graph = traced(Net(), X)
    assert [layer.name for layer in graph.layers] == [
        "first",
        *(f"blocks.{k}.{name}" for k in range(3) for name in ("linear", "drop")),
        "gate",
        "last",
    ]
    assert cuts_by_name(graph, ["blocks.1", "last"], Net()) == [3, 8]
    assert traced(Net(marked=True), X).marks == (1, 3, 5)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["block.1"], "no module of this name; its layers are first, blocks.0.linear"),
        (["gate.inner"], r"gate \(Gate\) contains this module"),
        (["blocks.2", "blocks.1"], "blocks.1 does not come after blocks.2"),
        (["first"], "is the first one"),
    ],
)
def test_invalid_first_names_of_stages(names: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        cuts_by_name(traced(Net(), X), names, Net())


def test_a_forward_depending_on_values_is_named() -> None:
    with pytest.raises(UsageError, match=r"Gate cannot be cut: its forward \(.*test_pipeline_graph"):
        traced(Gate(), X)


class Variadic(nn.Module):
    """A model that accepts any inputs, has a branch that depends on sizes, and returns a structure."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, *xs: Tensor, **named: Any) -> Any:
        if xs[0].shape[1] > 4:
            raise ValueError("too wide")
        seen = torch.ones(xs[0].size(0), 1)
        y = self.first(xs[0] * seen) + xs[1] + named["more"]["y"]
        return {"y": self.last(y) * seen, "count": len(xs), "cache": object()}


def test_a_forward_depending_on_sizes_becomes_operations() -> None:
    model = Variadic()
    called = bind(model, (X, X), {"more": {"y": X}})
    assert list(called.values) == ["xs[0]", "xs[1]", "named['more']['y']"]
    graph = trace(model, called)
    assert [layer.name for layer in graph.layers] == ["first", "last"]
    assert graph.captured.output.fill(lambda node: node.name) == {"y": "mul_1", "count": 2, "cache": None}
    values = dict(called.values)
    assert graph.captured.check([torch.randn(3, 4)] * 3) is None
    assert graph.captured.check([X, torch.randn(3, 5), X]) is not None
    partition = cut(graph, [1], [0, 1], model)
    crossing = [route.value for route in partition.routes.routes]
    assert len(crossing) == 1  # values that depend only on sizes are not sent
    assert partition.preludes[1]
    made, _ = Stage(model, partition, 0, seed=0).forward({}, values, 1, 0)
    _, output = Stage(model, partition, 1, seed=0).forward(made, values, 1, 0)
    torch.testing.assert_close(output["y"], model(X, X, more={"y": X})["y"])


def test_layers_are_found_within_untraceable_modules() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.gate = Variadic(), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            return self.gate(self.inner(x, x, more={"y": x})["y"])

    graph = traced(Outer(), X)
    assert [layer.name for layer in graph.layers] == ["inner.first", "inner.last", "gate"]
    assert cuts_by_name(graph, ["inner.last"], Outer()) == [1]


def test_undivided_modules_are_listed() -> None:
    class Hiding(Gate):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Linear(4, 4)

    whole = traced(nn.Sequential(Hiding(), nn.Linear(4, 4)), X).captured.whole
    assert list(whole) == ["0"]
    assert whole["0"].startswith("0 (Hiding, ")
    assert "test_pipeline_graph.py" in whole["0"]
    assert "torch.export: " in whole["0"]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 3, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        y, (h, _) = self.lstm(x)
        return y.flatten(0, 1), h, y.mean()


def test_the_batch_is_found_in_any_dimension() -> None:
    x = torch.randn(2, 5, 4)  # the batch size equals the number of layers of the LSTM
    shapes = RowShapes(traced(Recurrent(), x), {"x": x})
    assert [shapes.output_dimension(leaf) for leaf in range(3)] == [0, 1, 0]


def test_dimensions_after_a_value_dependent_module_are_unknown(caplog: pytest.LogCaptureFixture) -> None:
    shapes = RowShapes(traced(nn.Sequential(Gate(), nn.Linear(4, 4)), X), {"input": X})
    assert shapes.output_dimension(0) is None
    assert not caplog.records
    parts = [torch.ones(2, 3, 4), torch.ones(2, 3, 4)]
    assert put_together(*joined_output(parts, 4, lambda _: None, lambda _: [])).shape == (4, 3, 4)
    parts = [torch.ones(2, 2, 4), torch.ones(2, 2, 4)]
    with pytest.raises(UsageError, match="batch dimension is unknown"):
        joined_output(parts, 4, lambda _: None, lambda _: [])


class WeightedState(nn.Module):
    """A model with an argument whose length equals the number of layers of its LSTM.

    Each microbatch gets the whole argument.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4, 2, batch_first=True)

    def forward(self, x: Tensor, weight: Tensor) -> Any:
        output, state = self.lstm(x)
        return output, state[0] + weight[:, None, None]


def test_a_complete_argument_with_the_length_of_a_microbatch() -> None:
    module, batch = WeightedState(), {"x": torch.randn(8, 3, 4), "weight": torch.randn(2)}
    shapes = RowShapes(trace(module, bind(module, tuple(batch.values()), {})), batch)
    assert [shapes.output_dimension(leaf) for leaf in range(2)] == [0, 1]


class Described(nn.Module):
    """A model that returns numbers other than tensors, before a tensor."""

    def __init__(self, describe: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.describe = describe

    def forward(self, x: Tensor, *_: Any) -> Any:
        return defaultdict(list, about=self.describe(x), loss=self.linear(x).mean())


@pytest.mark.parametrize(
    ("describe", "depends"),
    [
        (lambda x: x.shape[0], True),
        (lambda x: x.size(0) * 2, True),
        (lambda x: x.sum().item(), True),
        (lambda x: x.shape[1], False),
    ],
)
def test_numbers_other_than_tensors_may_not_depend_on_the_batch(
    describe: Callable[[Tensor], Any], depends: bool
) -> None:
    graph = traced(Described(describe), X)
    shapes = RowShapes(graph, {"x": X})
    assert shapes.has_plain_of_rows is depends
    assert rule_of(shapes.output_node(0), graph, shapes).kind == "mean over rows"
    assert type(graph.captured.output.fill(lambda node: node)) is defaultdict


def test_objects_whose_text_has_an_address_are_rejected() -> None:
    module = Described(lambda x: x)
    with pytest.raises(UsageError, match=r"called with _\[0\], an object of type object"):
        _ = bind(module, (X, object()), {}).kind
    assert "torch.nn.functional.relu" in bind(module, (X, torch.nn.functional.relu), {}).kind
    assert bind(module, (X, 3, "a", None, torch.float16), {}).kind.endswith(
        "=3, _[1]='a', _[2]=None, _[3]=torch.float16"
    )


def run_stages(module: nn.Module, cuts: list[int], x: Tensor, *, split_backward: bool) -> tuple[Tensor, Tensor]:
    """Run the stages forward and backward in this process; return the output and the gradients of the loss."""
    partition = cut(traced(module, x), cuts, list(range(len(cuts) + 1)), module)
    stages = [Stage(module, partition, number, seed=3) for number in range(partition.num_stages)]
    made: dict[str, Any] = {}
    leaves: dict[tuple[str, int], Tensor] = {}
    saved: list[Saved] = []
    output = x
    for number, stage in enumerate(stages):
        inputs = {}
        for route in partition.routes.inputs_of(number):
            leaves[route.value, number] = made[route.value].detach().requires_grad_()
            inputs[route.value] = leaves[route.value, number]
        products = stage.products(defers=split_backward)
        values, output = stage.forward(inputs, {"x": x}, 1, 0, products)
        made.update(values)
        own = [values[route.value] for route in partition.routes.outputs_of(number)]
        saved.append(Saved(own or [output], products))
    for number in reversed(range(len(stages))):
        routes = partition.routes.outputs_of(number)
        sums = [sum(leaves[r.value, user].grad for user in r.users) for r in routes]  # type: ignore[misc]
        grads: list[Any] = list(sums) or [torch.ones_like(output)]
        stages[number].backward(saved[number], grads)
        stages[number].backward_weights(saved[number])
    return output, torch.cat(
        [parameter.grad.flatten() for parameter in module.parameters() if parameter.grad is not None]
    )


@pytest.mark.parametrize("split_backward", [False, True])
def test_stages_compute_the_same_as_the_model(split_backward: bool) -> None:
    torch.manual_seed(0)
    whole = Net().eval()
    expected = whole(X)
    expected.sum().backward()
    grads = torch.cat([parameter.grad.flatten() for parameter in whole.parameters() if parameter.grad is not None])
    for cuts in ([4], [1, 3, 8]):
        whole.zero_grad()
        output, found = run_stages(whole, cuts, X, split_backward=split_backward)
        torch.testing.assert_close(output, expected)
        torch.testing.assert_close(found, grads)


class Frozen(nn.Module):
    """A model whose first layer has no gradients, and that adds new noise in each call. torch.fx would lose both."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            h = self.first(x)
        return self.last(h + torch.rand(1))


def test_parts_without_gradients_and_noise_are_kept() -> None:
    model = Frozen()
    outputs = [run_stages(model, [], X, split_backward=False)[0] for _ in range(2)]
    assert model.first.weight.grad is None
    assert model.last.weight.grad is not None
    assert outputs[0].equal(outputs[1])  # the seed of a stage depends on the step and the microbatch
    noise = (outputs[0] - model.last(model.first(X))).detach()
    torch.testing.assert_close(noise, noise[:1].expand(6, 4))
    assert noise.any()


def test_dropout_does_not_depend_on_the_cut() -> None:
    torch.manual_seed(0)
    model = Net().train()
    before = torch.get_rng_state()
    outputs = [run_stages(model, cuts, X, split_backward=False)[0] for cuts in ([2], [1, 4, 8])]
    assert outputs[0].equal(outputs[1])
    assert not outputs[0].equal(model.eval()(X))
    assert torch.get_rng_state().equal(before)


def test_shared_parameters_and_values_that_skip_stages_are_found() -> None:
    model = Net()
    partition = cut(traced(model, X), [3, 7], [0, 1, 2], model)
    assert partition.parameters["first.weight"] == [0, 2]
    users = {route.source: route.users for route in partition.routes.routes if route.value == "first"}
    assert users == {0: (2,)}
    assert partition.modules_of(1) == "blocks.1.linear to blocks.2.drop"


def test_a_raising_layer_is_named() -> None:
    model = Net()
    partition = cut(traced(model, X), [3], [0, 1], model)
    with pytest.raises(LayerError, match=r"^first$"):
        Stage(model, partition, 0, seed=0).forward({}, {"x": torch.ones(2, 3)}, 1, 0)


def test_measuring_changes_neither_model_nor_gradients() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Linear(4, 2))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    layers, crossing = measure_layers(model, traced(model, X), {"input": X})
    assert [layer.name for layer in layers] == ["0", "1", "2", "3"]
    assert crossing == [0, 96, 96, 96]
    assert all(layer.forward_s > 0 and layer.backward_s > 0 for layer in layers)
    assert layers[0].parameter_bytes == 80
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.Adam(parameters, lr=0.1),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1),
    ],
)
def test_updates_are_measured_on_copies(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = make([{"params": model[0].parameters(), "lr": 0.2}, {"params": model[2].parameters()}])
    layers, _ = measure_layers(model, traced(model, X), {"input": X}, optimizer=optimizer, splits=True)
    assert [layer.update_s > 0 for layer in layers] == [True, False, True]
    assert all(layer.weights_s > 0 for layer in (layers[0], layers[2]))
    assert not optimizer.state
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())


def test_updates_that_cannot_be_measured_count_as_0_s() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    layers, _ = measure_layers(model, traced(model, X), {"input": X}, optimizer=torch.optim.LBFGS(model.parameters()))
    assert [layer.update_s for layer in layers] == [0.0, 0.0]


def test_values_are_divided_into_tensors_and_reassembled() -> None:
    value = {"a": (X, 3, None), "b": [torch.Size([2]), torch.float16, torch.device("cpu")]}
    description, tensors = take_apart(value, "a value")
    assert tensors_of(description) == [(torch.float32, [6, 4], False)]
    assert put_together(description, tensors) == value
    with pytest.raises(UsageError, match="of type object, which cannot be sent"):
        take_apart(object(), "a value")
    assert row_bounds(7, 3) == [0, 3, 5, 7]
    assert float(add_numbers([torch.tensor(1.0), torch.tensor(2.0)], [0.25, 0.75])) == 1.75


def test_gradients_of_other_processes_have_only_a_norm() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    absent = AbsentGrad(parameter, "far.weight", lambda name, order: 4.0)
    parameter.grad = absent
    own_parameter = nn.Parameter(torch.zeros(2))
    own_parameter.grad = torch.tensor([0.0, 3.0])
    assert float(nn.utils.clip_grad_norm_([own_parameter, parameter], 1.0)) == 5.0
    assert own_parameter.grad.tolist() == pytest.approx([0.0, 0.6])
    nn.utils.clip_grad_value_([own_parameter, parameter], 0.5)
    assert own_parameter.grad.tolist() == [0.0, 0.5]
    with pytest.raises(UsageError, match=r"the gradient of 'far\.weight', which is on another process"):
        absent.sum()
