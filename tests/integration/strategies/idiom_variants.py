"""Idioms with optimizers, models and losses other than in the plain loop, and the program of one rank.

    python idiom_variants.py FOLDER PLAN

The arguments are those of ``tests.conformance.conformance``.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tests.conformance.conformance import be_rank
from tests.conformance.idioms.trial import IDIOMS, STEPS, Result, Trial
from torch import Tensor, nn, optim
from torch.nn import functional
from torch.nn.utils import parameters_to_vector, parametrizations, prune, vector_to_parameters
from torch.optim import lr_scheduler

mse = functional.mse_loss
_Pair = namedtuple("_Pair", "output loss")


@dataclass
class _Scores:
    """An output class that the script defines."""

    output: Tensor


class _Called(nn.Module):
    """A model whose forward calls a function with the model and the arguments."""

    first: Any
    last: Any

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in {"first": nn.Linear(6, 16), "last": nn.Linear(16, 1), **parts}.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **options: Any) -> Any:
        """Call the function."""
        return self.function(self, *args, **options)

    def layers(self, inputs: Tensor) -> Any:
        """Apply both layers."""
        return self.last(torch.tanh(self.first(inputs)))


class _Signed(optim.SGD):
    """An optimizer with a custom step."""

    def step(self, closure: Any = None) -> Any:
        """Update by the signs of the gradients."""
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.sign()
        return super().step(closure)


class _Double(nn.Linear):
    """A layer of complex or double numbers in a model of float32 numbers."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Apply the layer, and return real numbers."""
        return super().forward(inputs.to(self.weight.dtype)).abs().float()


def _with_hook(model: nn.Module, register: str, hook: Callable[..., Any]) -> nn.Module:
    getattr(model, register)(hook)
    return model


def _mlp(*other_layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 16), *(other_layers or [nn.Tanh()]), nn.Linear(16, 1))


def _pruned() -> nn.Module:
    model = _mlp()
    prune.l1_unstructured(model[0], "weight", 0.5)
    return model


def _with_buffer(buffer: Tensor) -> nn.Module:
    model = _Called(lambda self, x: self.layers(x) * self.factors.mean())
    model.register_buffer("factors", buffer)
    return model


Loss = Callable[[Trial, Tensor, Tensor], Any]


def _plain_loss(trial: Trial, inputs: Tensor, targets: Tensor) -> Tensor:
    return mse(trial.model(inputs), targets)


def _sum_of_two(trial: Trial, inputs: Tensor, targets: Tensor) -> None:
    output = trial.model(inputs)
    torch.autograd.backward([mse(output, targets), output.abs().mean()])


def _train(
    trial: Trial,
    model: Callable[[], nn.Module] = _mlp,
    loss: Loss = _plain_loss,
    make: Callable[[Any], Any] = lambda parameters: optim.SGD(parameters, lr=0.05, momentum=0.9),
    after: Callable[[Trial, int], Any] = lambda trial, step: None,
) -> Result:
    """Train a model; a loss of None means that the step called backward itself."""
    torch.manual_seed(3)
    trial.model = model()
    trial.optimizer = make(trial.model.parameters())
    trial.prepare()
    for step in range(STEPS):
        trial.optimizer.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of create_graph=True
            found = loss(trial, *trial.share(step))
        if found is not None:
            torch.autograd.backward(found)
        trial.optimizer.step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # schedules of torch step at other times
            after(trial, step)
    return [torch.view_as_real(value) if value.is_complex() else value for value in trial.values()]


def _schedule(make: Callable[[Any], Any]) -> Callable[[Trial, int], None]:
    found: list[Any] = []

    def step(trial: Trial, number: int) -> None:
        if not number:
            found[:] = [make(trial.optimizer)]
        else:
            found[0].step()

    return step


def _no_grad(trial: Trial, inputs: Tensor, targets: Tensor) -> Any:
    with torch.no_grad():
        weight = trial.model(inputs).square().mean().clamp(0.5, 0.5)
    return weight * mse(trial.model(inputs), targets)


_OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "`SGD` with Nesterov momentum and decay": lambda p: optim.SGD(p, 0.05, 0.9, nesterov=True, weight_decay=0.01),
    "`SGD(maximize=True)`": lambda p: optim.SGD(p, 1e-4, maximize=True),
    "`SGD(foreach=True)`": lambda p: optim.SGD(p, 0.05, foreach=True),
    "`AdamW(amsgrad=True)`": lambda p: optim.AdamW(p, 0.01, amsgrad=True),
    "`RMSprop`, centered": lambda p: optim.RMSprop(p, 0.01, centered=True, momentum=0.5),
    "`Adagrad`": lambda p: optim.Adagrad(p, 0.05),
    "`Adadelta`": lambda p: optim.Adadelta(p, 0.5),
    "`Adamax`": lambda p: optim.Adamax(p, 0.01),
    "`NAdam`": lambda p: optim.NAdam(p, 0.01),
    "`RAdam`": lambda p: optim.RAdam(p, 0.01),
    "`ASGD`": lambda p: optim.ASGD(p, 0.05),
    "`Adafactor`, which computes with whole parameters": lambda p: optim.Adafactor(p, 0.01),
    "A subclass of an optimizer with a step of its own": lambda p: _Signed(p, 0.01),
}
_MODELS: dict[str, Callable[[], nn.Module]] = {
    "Parameters of float64": lambda: nn.Sequential(_Double(6, 4, dtype=torch.float64), nn.Linear(4, 1)),
    "Complex parameters": lambda: nn.Sequential(_Double(6, 4, dtype=torch.complex64), nn.Linear(4, 1)),
    "A scalar parameter": lambda: _Called(lambda self, x: self.layers(x) * self.s, s=nn.Parameter(torch.tensor(0.5))),
    "A layer that forward calls twice": lambda: _mlp(nn.Tanh(), *[nn.Linear(16, 16)] * 2),
    "Weights that two layers share": lambda: _Called(
        lambda self, x: self.layers(x @ self.first.weight.T @ self.first.weight)
    ),
    "`weight_norm`": lambda: _mlp(nn.Tanh(), parametrizations.weight_norm(nn.Linear(16, 16))),
    "`torch.nn.utils.prune`, before `prepare`": _pruned,
    "BatchNorm that stays in evaluation": lambda: _mlp(nn.BatchNorm1d(16).eval()).eval(),
    "A `ParameterList`": lambda: _Called(
        lambda self, x: self.layers(x * self.p[0]), p=nn.ParameterList([torch.ones(6)])
    ),
    "An expanded buffer": lambda: _with_buffer(torch.ones(1).expand(4)),
    "A transposed buffer": lambda: _with_buffer(torch.ones(1, 5, 6).transpose(0, 1)),
    "A recurrent layer with the batch first": lambda: _Called(
        lambda self, x: self.last(self.cells(x[:, :, None])[0][:, -1]),
        cells=nn.GRU(1, 16, batch_first=True),
        first=None,
    ),
    "A hook that changes a layer's output": lambda: _mlp(
        _with_hook(nn.Tanh(), "register_forward_hook", lambda module, inputs, output: 2 * output)
    ),
    "A hook that changes a layer's input": lambda: _mlp(
        _with_hook(nn.Tanh(), "register_forward_pre_hook", lambda module, inputs: (inputs[0] / 2,))
    ),
    "A hook that scales the gradient of a layer's input": lambda: _mlp(
        _with_hook(nn.Tanh(), "register_full_backward_hook", lambda module, inputs, outputs: (2 * inputs[0],))
    ),
    "A forward that decides by its mode": lambda: _Called(lambda self, x: self.layers(x) if self.training else x),
}
_LOSSES: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    "Embeddings with sparse gradients": (
        lambda: _Called(lambda self, k: self.last(self.rows(k)), rows=nn.Embedding(9, 16, sparse=True), first=None),
        lambda trial, x, y: mse(trial.model((4 * x[:, 0]).long() % 9), y),
    ),
    "A recurrent layer with the time first": (
        lambda: _Called(lambda self, x: self.last(self.cells(x)[0][-1]), cells=nn.GRU(1, 16), first=None),
        lambda trial, x, y: mse(trial.model(x.T[:, :, None]), y),
    ),
    "Arguments by keyword": (
        lambda: _Called(lambda self, *, x, scale: scale * self.layers(x)),
        lambda trial, x, y: mse(trial.model(x=x, scale=2.0), y),
    ),
    "An output in a dictionary": (
        lambda: _Called(lambda self, x: {"output": self.layers(x), "size": 1}),
        lambda trial, x, y: mse(trial.model(x)["output"], y),
    ),
    "An output in a dataclass": (
        lambda: _Called(lambda self, x: _Scores(self.layers(x))),
        lambda trial, x, y: mse(trial.model(x).output, y),
    ),
    "A loss that forward computes": (
        lambda: _Called(lambda self, x, y: mse(self.layers(x), y)),
        lambda trial, x, y: trial.model(x, y),
    ),
    "A loss and an output, in a named tuple": (
        lambda: _Called(lambda self, x, y: _Pair(output := self.layers(x), mse(output, y))),
        lambda trial, x, y: trial.model(x, y).loss + 0.1 * trial.model(x, y).output.square().mean(),
    ),
    "`torch.autograd.backward` of two losses": (_mlp, _sum_of_two),
    "`backward(create_graph=True)`": (_mlp, lambda trial, x, y: mse(trial.model(x), y).backward(create_graph=True)),
    "`backward(inputs=...)`": (_mlp, lambda trial, x, y: mse(trial.model(x), y).backward(inputs=trial.parameters)),
    "A sum over examples, divided by their number": (
        _mlp,
        lambda trial, x, y: mse(trial.model(x), y, reduction="sum") / len(x),
    ),
    "A forward without gradients before the one of the loss": (_mlp, _no_grad),
    "A layer of the model called in addition to its forward": (
        _mlp,
        lambda trial, x, y: mse(trial.model(x), y) + 0.1 * trial.bare[0](x).square().mean(),
    ),
    "A method of the model called in addition to its forward": (
        lambda: _Called(lambda self, x: self.layers(x)),
        lambda trial, x, y: mse(trial.model(x), y) + 0.1 * trial.model.layers(-x).square().mean(),
    ),
    "The model called on two inputs": (
        _mlp,
        lambda trial, x, y: mse(trial.model(x), y) + (trial.model(x) - trial.model(-x)).square().mean(),
    ),
    "A hook on an output that scales its gradient": (
        _mlp,
        lambda trial, x, y: mse(_hooked(trial.model(x)), y),
    ),
    "A penalty on `parameters_to_vector`": (
        _mlp,
        lambda trial, x, y: mse(trial.model(x), y) + 0.01 * parameters_to_vector(trial.parameters).square().sum(),
    ),
}
_AFTER_STEPS: dict[str, Callable[[], Callable[[Trial, int], Any]]] = {
    "`vector_to_parameters` after the step": lambda: (
        lambda trial, step: vector_to_parameters(
            0.99 * parameters_to_vector(trial.parameters).detach(), trial.parameters
        )
    ),
    "`LambdaLR`": lambda: _schedule(lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))),
    "`CosineAnnealingWarmRestarts`": lambda: _schedule(
        lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3)
    ),
    "Two schedules, one after the other": lambda: _schedule(
        lambda optimizer: lr_scheduler.SequentialLR(
            optimizer, [lr_scheduler.ConstantLR(optimizer, 0.5), lr_scheduler.ExponentialLR(optimizer, 0.9)], [3]
        )
    ),
    "Momentum set by hand": lambda: (
        lambda trial, step: [group.update(momentum=0.5 + 0.04 * step) for group in trial.optimizer.param_groups]
    ),
}


def _hooked(output: Tensor) -> Tensor:
    output.register_hook(lambda grad: 2 * grad)
    return output


VARIANTS = (*_OPTIMIZERS, *_MODELS, *_LOSSES, *_AFTER_STEPS)


def _register() -> None:
    for name, make in _OPTIMIZERS.items():
        IDIOMS[name] = lambda trial, make=make: _train(trial, make=make)  # type: ignore[misc]
    for name, model in _MODELS.items():
        IDIOMS[name] = lambda trial, model=model: _train(trial, model)  # type: ignore[misc]
    for name, (model, loss) in _LOSSES.items():
        IDIOMS[name] = lambda trial, model=model, loss=loss: _train(trial, model, loss)  # type: ignore[misc]
    for name, after in _AFTER_STEPS.items():
        IDIOMS[name] = lambda trial, after=after: _train(trial, after=after())  # type: ignore[misc]


_register()

if __name__ == "__main__":
    be_rank(Path(sys.argv[1]), json.loads(sys.argv[2]))
