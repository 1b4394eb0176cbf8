"""The training loop that all idioms use, and the registry of idioms."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from paceline.torch import Strategy

STEPS = 8
_ROWS = 8

Result = list[Tensor]


class Trial:
    """Trains a small model under a strategy, on this rank's part of each batch."""

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy
        generator = torch.Generator().manual_seed(7)
        self._inputs = torch.randn(3 * STEPS, _ROWS, 6, generator=generator)
        self._targets = 3 * self._inputs.sum(-1, keepdim=True).sin()
        self.make()

    def make(self, change: Callable[[nn.Module], Any] = lambda model: None, **options: Any) -> Trial:
        """Create the model and its optimizer: SGD with momentum unless `options` has another ``optimizer``."""
        torch.manual_seed(3)
        self.model: Any = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
        change(self.model)
        make = options.pop("optimizer", torch.optim.SGD)
        self.optimizer: Any = make(self.model.parameters(), **{"lr": 0.05, "momentum": 0.9, **options})
        return self

    def adam(self) -> Trial:
        """Use Adam as the optimizer."""
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.02)
        return self

    def prepare(self) -> Trial:
        """Prepare the model and the optimizer with the strategy."""
        self.model, self.optimizer = self.strategy.prepare(self.model, self.optimizer)
        return self

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The model's parameters."""
        assert self.strategy.module is not None
        return list(self.strategy.module.parameters())

    @property
    def bare(self) -> Any:
        """The model before ``prepare``."""
        return self.strategy.module

    @property
    def grads(self) -> Iterator[Tensor]:
        """The gradients of the parameters that have one."""
        return (parameter.grad for parameter in self.parameters if parameter.grad is not None)

    def share(self, step: int) -> tuple[Tensor, Tensor]:
        """Return this rank's part of batch number `step`."""
        part = slice(self.strategy.rank, None, self.strategy.world_size)
        return self._inputs[step, part], self._targets[step, part]

    def loss(self, step: int, model: Any = None) -> Tensor:
        """Return the loss on this rank's part of a batch."""
        inputs, targets = self.share(step)
        return nn.functional.mse_loss((model or self.model)(inputs), targets)

    def backward(self, step: int) -> None:
        """Compute the loss of a batch and its gradients."""
        torch.autograd.backward(self.loss(step))

    def zeroed(self, first: int = 0, last: int = STEPS) -> Iterator[int]:
        """Yield each step's number between ``zero_grad()`` and the optimizer's step."""
        for step in range(first, last):
            self.optimizer.zero_grad()
            yield step
            self.optimizer.step()

    def steps(self, first: int = 0, last: int = STEPS) -> Iterator[int]:
        """Yield each step's number between its backward and the optimizer's step."""
        for step in self.zeroed(first, last):
            self.backward(step)
            yield step

    def trained(self) -> Iterator[int]:
        """Yield each step's number after the optimizer's step."""
        for step in range(STEPS):
            self.train(step, step + 1)
            yield step

    def train(self, first: int = 0, last: int = STEPS) -> Trial:
        """Train with the plain loop."""
        for _ in self.steps(first, last):
            pass
        return self

    def values(self) -> Result:
        """Return the parameters' values."""
        return [parameter.detach().clone() for parameter in self.parameters]


Idiom = Callable[[Trial], Result]
IDIOMS: dict[str, Idiom] = {}
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {}
"""Options of the strategy for an idiom, by the names of the idiom and the strategy."""


def idiom(function: Idiom) -> Idiom:
    """Add a function to :data:`IDIOMS`, under the first line of its docstring."""
    assert function.__doc__ is not None
    IDIOMS[function.__doc__.strip().removesuffix(".")] = function
    return function


def between(actions: dict[str, Callable[[Trial], Any]]) -> None:
    """Add one idiom per action: a plain loop that calls the action between backward and the optimizer's step."""

    def add(name: str, act: Callable[[Trial], Any]) -> None:
        def run(trial: Trial) -> Result:
            for _ in trial.prepare().steps():
                act(trial)
            return trial.values()

        IDIOMS[name] = run

    for name, act in actions.items():
        add(name, act)


def with_options(description: str, **options: dict[str, Any]) -> Callable[[Idiom], Idiom]:
    """Add a second variant of an idiom with `options` of strategies (``all_reduce={...}``) that permit it.

    `description` names these options.
    """

    def add(function: Idiom) -> Idiom:
        assert function.__doc__ is not None
        name = f"{function.__doc__.strip().removesuffix('.')}, with {description}"
        IDIOMS[name] = function
        OPTIONS[name] = {strategy.replace("_", "-"): option for strategy, option in options.items()}
        return function

    return add


without_overlap = with_options("`overlap=False`", parameter_server={"overlap": False})
with_unused = with_options(
    "`find_unused_parameters=True` or `unused='skip'`",
    all_reduce={"find_unused_parameters": True},
    parameter_server={"unused": "skip"},
)
