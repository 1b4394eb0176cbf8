"""Numbers that a model returns: the weighted numbers of microbatches add up to the number of the batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from paceline.errors import UsageError
from paceline.torch.capture.graph import bind
from paceline.torch.strategies.pipeline.loop.batches import cut_rows, row_bounds
from paceline.torch.strategies.pipeline.loop.output_rows import rule_of
from paceline.torch.strategies.pipeline.loop.row_dimensions import RowShapes
from paceline.torch.strategies.pipeline.run.layers import trace

ROWS, PARTS = 7, 3
X = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(0))
CLASSES = torch.tensor([0, 3, -100, 2, 2, 1, -100])
WORDS = torch.arange(ROWS * 4).reshape(ROWS, 4) % 2


class Scored(nn.Module):
    """Returns a number, computed from its output and `y`. With `exports`, only torch.export can trace it."""

    def __init__(self, number: Callable[[Tensor, Any], Any], *, exports: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("weight", torch.tensor([1.0, 2.0, 0.5, 3.0]))
        self.number, self.exports = number, exports

    def forward(self, x: Tensor, y: Tensor) -> Any:
        if self.exports and x.size(1) != 4:
            raise ValueError
        return self.number(self.linear(x), y)


NUMBERS: dict[str, tuple[Callable[[Tensor, Any], Any], Tensor]] = {
    "mean": (lambda x, y: x.square().mean(), X),
    "sum": (lambda x, y: -x.sum() / 5, X),
    "mean squared error": (F.mse_loss, X),
    "module": (lambda x, y: nn.SmoothL1Loss(reduction="sum")(x, y) * 3, X),
    "by class": (F.cross_entropy, CLASSES),
    "shifted": (lambda x, y: 2 * F.cross_entropy(x[:, :-1].reshape(-1, 1).expand(-1, 4), y[:, 1:].reshape(-1)), WORDS),
    "smoothed": (lambda x, y: 0.5 * F.cross_entropy(x, y, label_smoothing=0.1) + 1, CLASSES),
    "masked": (lambda x, y: (x.mean(1) * (y > 0).float()).sum() / (y > 0).float().sum(), CLASSES),
    "two losses by class": (lambda x, y: (F.cross_entropy(x, y) + F.cross_entropy(x[:, [1, 2, 3, 0]], y)) / 2, CLASSES),
    "ignored after a size": (
        lambda x, y: F.cross_entropy(x, y.clamp(0, x.size(1)), ignore_index=x.size(1)),
        CLASSES + 1,
    ),
    "two means": (lambda x, y: F.l1_loss(x, y) + 0.1 * x.square().mean(), X),
}


_OFTEN_EXPORTED = ("mean", "by class", "shifted", "masked")


@pytest.mark.parametrize(
    ("name", "exports"),
    [
        pytest.param(name, exports, marks=[pytest.mark.thorough] * (exports and name not in _OFTEN_EXPORTED))
        for name in NUMBERS
        for exports in (False, True)
    ],
)
def test_numbers_of_microbatches_add_up_to_the_number_of_the_batch(name: str, exports: bool) -> None:
    number, y = NUMBERS[name]
    model = Scored(number, exports=exports)
    graph = trace(model, bind(model, (X, y), {}))
    bounds = row_bounds(ROWS, PARTS)
    arguments = [dict(part) for part in cut_rows({"x": X, "y": y}, ROWS, PARTS)]
    rows = [end - begin for begin, end in itertools.pairwise(bounds)]
    shapes = RowShapes(graph, {"x": X, "y": y})
    weights = rule_of(shapes.output_node(0), graph, shapes).weights(graph, arguments, rows)
    total = sum(weight * model(**part) for weight, part in zip(weights, arguments, strict=True))
    torch.testing.assert_close(total, model(X, y))


@pytest.mark.parametrize(
    "number",
    [
        lambda x, y: x.max(),
        lambda x, y: x.mean() * x.mean(),
        lambda x, y: F.cross_entropy(x, x.argmax(1)),
        lambda x, y: x.square().mean(0).sum(),
        lambda x, y: x.softmax(-1).mean(0).square().sum(),
        lambda x, y: x.std(0).mean(),
        lambda x, y: F.mse_loss(x.mean(0), x[0]),
        lambda x, y: (x @ x.t()).mean(),
        lambda x, y: F.l1_loss(x.sum(1)[:, None], x.sum(1)[None]),
        lambda x, y: F.cross_entropy(x @ x.t(), torch.arange(y.size(0))),
        lambda x, y: F.cross_entropy(x.t(), y[:4]),
        lambda x, y: (x[1:] - x[:-1]).square().mean(),
        lambda x, y: x.softmax(0).square().mean(),
        lambda x, y: x.sort(0)[0].square().mean(),
        lambda x, y: x.cumsum(dim=0).mean(),
        lambda x, y: F.normalize(x, dim=0).sum(),
        lambda x, y: (x * x.flip(0)).sum(),
        lambda x, y: ((x - x.mean(0)) / x.std(0)).square().mean(),
        lambda x, y: (x / x.size(0)).sum(),
        lambda x, y: x.sum() / x.size(0),
        lambda x, y: x.mean() * x.size(0),
    ],
)
def test_numbers_without_a_known_rule_are_rejected(number: Callable[[Tensor, Any], Any]) -> None:
    model = Scored(number, exports=False)
    graph = trace(model, bind(model, (X, CLASSES), {}))
    shapes = RowShapes(graph, {"x": X, "y": CLASSES})
    with pytest.raises(UsageError, match=r"returns a number \(.*\) without a known rule"):
        rule_of(shapes.output_node(0), graph, shapes)


def test_a_sum_of_losses_is_refused_if_the_weights_differ() -> None:
    model = Scored(lambda x, y: F.cross_entropy(x, y) + x.mean(), exports=False)
    graph = trace(model, bind(model, (X, CLASSES), {}))
    shapes = RowShapes(graph, {"x": X, "y": CLASSES})
    rule = rule_of(shapes.output_node(0), graph, shapes)
    arguments = [dict(part) for part in cut_rows({"x": X, "y": CLASSES}, ROWS, PARTS)]
    with pytest.raises(UsageError, match=r"returns a sum of two losses"):
        rule.weights(graph, arguments, [3, 2, 2])
