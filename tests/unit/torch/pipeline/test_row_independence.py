"""Models whose output for a row depends on other rows are detected before they are cut."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from paceline.errors import UsageError
from paceline.torch.capture.graph import bind
from paceline.torch.strategies.pipeline.loop.row_independence import check_repeatable, check_rows_independent


class Recurrent(nn.Module):
    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        self.cells = nn.LSTM(6, 8, batch_first=batch_first)

    def forward(self, x: Tensor) -> Any:
        return self.cells(x)


class Contrast(nn.Module):
    def forward(self, x: Tensor, *, keys: Tensor) -> dict[str, Tensor]:
        return {"x": x, "pulled": (x @ keys.T).softmax(-1) @ keys}


class Noisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(0) + torch.randn_like(x)


class Own(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


def check(model: nn.Module, *args: Any, part: int = 2, **kwargs: Any) -> None:
    check_rows_independent(model, bind(model, args, kwargs), len(args[0]), part)


X = torch.randn(8, 5, 6, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "model",
    [
        nn.TransformerEncoderLayer(6, 2, 16, batch_first=True),
        Recurrent(batch_first=True),
        nn.Sequential(nn.Conv1d(5, 4, 3), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Flatten()),
        nn.BatchNorm1d(5, track_running_stats=False),
        Own(lambda x: (x.sum(), x.argmax(-1), None, F.one_hot(x.argmax(-1)))),
        Own(lambda x: x.view(8, -1)),
        Noisy(),
    ],
)
def test_models_with_independent_rows_pass_unchanged(model: nn.Module) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    check(model, X)
    assert all(module.training for module in model.modules())
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())
    assert state.equal(torch.get_rng_state())


@pytest.mark.parametrize(
    "model", [nn.TransformerEncoderLayer(6, 2, 16), Recurrent(batch_first=False), Own(lambda x: x - x.mean(0))]
)
def test_the_error_about_another_batch_dimension_names_the_argument(model: nn.Module) -> None:
    with pytest.raises(UsageError, match=r"rows of (src|x) \[8, 5, 6\] depends .*batch_first=True"):
        check(model, X)
    assert all(module.training for module in model.modules())
    check(model, X, part=8)  # with a single microbatch, dependent rows are allowed


def test_the_argument_shared_by_rows_is_named() -> None:
    with pytest.raises(UsageError, match=r"rows of keys \[8, 6\] depends on other rows"):
        check(Contrast(), X[:, 0], keys=X[:, 1])


def test_a_product_of_a_batch_with_itself_is_rejected() -> None:
    with pytest.raises(UsageError, match=r"rows of x \[8, 30\] depends on other rows"):
        check(Own(lambda x: x @ x.T), X.flatten(1))


class Counting(nn.Module):
    """Counts its calls. With "seen", it multiplies its input by the count."""

    def __init__(self, attribute: str) -> None:
        super().__init__()
        self.attribute = attribute
        self.calls = 0
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.attribute == "calls":
            self.calls += 1
        self.seen.append(len(x))
        return x * (len(self.seen) if self.attribute == "seen" else 1)


class Skipping(nn.Module):
    """Skips a layer at random in training mode."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if self.training and random.random() < 0.5 else x


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Own(lambda x: x * random.random()), "draws from Python's or NumPy's random numbers"),
        (Own(lambda x: x * float(np.random.rand())), "draws from Python's or NumPy's random numbers"),
        (nn.Sequential(nn.Identity(), Counting("calls")), "counts its calls in 1.calls"),
        (Counting("seen"), "has different results"),
        (Skipping().eval(), "draws from Python's"),
    ],
)
def test_a_forward_that_depends_on_python_state_is_rejected(model: nn.Module, words: str) -> None:
    with pytest.raises(UsageError, match=f"the forward of .*{words}.*: .*a pipeline"):
        check_repeatable(model, bind(model, (X,), {}))


@pytest.mark.parametrize(
    "model", [Noisy(), nn.Sequential(nn.Flatten(), nn.BatchNorm1d(30), nn.Dropout(0.5)), Counting("")]
)
def test_a_forward_with_random_numbers_of_torch_is_unchanged(model: nn.Module) -> None:
    state, before = torch.get_rng_state(), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    check_repeatable(model, bind(model, (X,), {}))
    assert state.equal(torch.get_rng_state())
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())
