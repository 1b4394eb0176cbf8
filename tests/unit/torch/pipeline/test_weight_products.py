"""Weight gradients that are added in place, or computed later, equal the gradients of autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from paceline.torch.strategies.pipeline.run.weights import WeightProducts


class Mixed(nn.Module):
    """Linear layers in all uses that `WeightProducts` must distinguish."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.inplace = nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU(inplace=True))
        self.hooked = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.kept = nn.Linear(4, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.hooked.weight.register_hook(lambda grad: 2 * grad)

    def forward(self, x: Tensor) -> Any:
        x = self.frozen(self.inplace(self.first(x))) + self.hooked(x)
        x = x + checkpoint(self.kept, x, use_reentrant=False) + self.first(x)
        return F.linear(weight=self.first.weight, input=x) + self.attention(x, x, x)[0]


def gradients(defers: bool | None, shape: tuple[int, ...]) -> list[Tensor | None]:
    torch.manual_seed(0)
    model, x = Mixed(), torch.randn(*shape, 4)
    for _ in range(2):  # the second backward adds to the gradients
        if defers is None:
            model(x).square().sum().backward()
            continue
        products = WeightProducts(defers=defers)
        with products:
            loss = model(x).square().sum()
        before = model.first.weight.grad
        with products.active():
            loss.backward()
        if defers:
            assert model.first.weight.grad is before
        products.finish()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("defers", [False, True])
def test_gradients_equal_the_gradients_of_autograd(defers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.torch.strategies.pipeline.run.weights._LARGE_BYTES", 0)
    torch.testing.assert_close(gradients(defers, (2, 3)), gradients(None, (2, 3)))


def test_a_gradient_computed_in_a_forward_is_right() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(3, 1), torch.randn(5, 3, requires_grad=True)

    def penalized() -> Tensor:
        (inner,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
        return inner.square().sum()

    penalized().backward()
    expected, layer.weight.grad = layer.weight.grad, None
    products = WeightProducts(defers=True)
    with products:
        loss = penalized()
    assert layer.weight.grad is None
    with products.active():
        loss.backward()
    products.finish()
    torch.testing.assert_close(layer.weight.grad, expected)
