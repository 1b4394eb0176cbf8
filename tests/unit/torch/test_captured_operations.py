"""Calls of modules, functions and methods with side effects, and graphs of torch.export."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from paceline.torch.capture.graph import changes_in_place, draws


class Calls(nn.Module):
    """Calls one function."""

    def __init__(self, call: Callable[[Any], Any]) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: Any) -> Any:
        return self.call(x)


def last_operation(model: nn.Module) -> tuple[fx.Node, nn.Module]:
    traced = fx.symbolic_trace(model)
    return [node for node in traced.graph.nodes if node.op.startswith("call")][-1], traced


def test_operations_with_random_numbers() -> None:
    drawing: list[Callable[[Any], Any]] = [
        lambda x: nn.functional.dropout(x, 0.5), lambda x: nn.functional.rrelu(x, training=True),
        lambda x: nn.functional.fractional_max_pool2d(x, 2, output_size=2), nn.functional.gumbel_softmax,
        lambda x: nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.1), torch.bernoulli, torch.rand_like,
        lambda x: torch.multinomial(x, 1), lambda x: x.uniform_(), lambda x: x.exponential_(),
    ]  # fmt: skip
    for call in drawing:
        assert draws(*last_operation(Calls(call)))
    drawing_modules = (nn.RReLU(), nn.Dropout1d(), nn.AlphaDropout(), nn.LSTM(4, 4, num_layers=2, dropout=0.1))
    assert all(draws(*last_operation(nn.Sequential(module))) for module in drawing_modules)
    exported = torch.export.export(nn.Sequential(nn.RReLU()), (torch.ones(2),)).graph.nodes
    assert any(draws(node, nn.Module()) for node in exported)
    for call in (
        nn.functional.relu,
        lambda x: x + 1,
        lambda x: nn.functional.scaled_dot_product_attention(x, x, x),
        nn.functional.normalize,
    ):
        assert not draws(*last_operation(Calls(call)))
    assert not any(draws(*last_operation(nn.Sequential(module))) for module in (nn.ReLU(), nn.LSTM(4, 4)))


def test_operations_in_place() -> None:
    for call in (lambda x: x.add_(1), lambda x: nn.functional.relu(x, inplace=True), torch.relu_):
        assert changes_in_place(*last_operation(Calls(call)))
    assert changes_in_place(*last_operation(nn.Sequential(nn.ReLU(inplace=True))))
    for call in (nn.functional.relu, lambda x: x % 2, lambda x: x.clone()):
        assert not changes_in_place(*last_operation(Calls(call)))
    assert not changes_in_place(*last_operation(nn.Sequential(nn.ReLU())))
    graph = fx.Graph()
    x = graph.placeholder("x")
    for function in (operator.imod, operator.imatmul, operator.setitem):
        assert changes_in_place(graph.call_function(function, (x, x)), nn.Module())
    assert not changes_in_place(graph.call_function(operator.mod, (x, x)), nn.Module())
