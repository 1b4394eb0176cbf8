"""Idioms of model and optimizer: groups, frozen and replaced layers, buffers, closures, state."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import torch
from tests.conformance.idioms.trial import IDIOMS, STEPS, Result, Trial, idiom, with_unused
from torch import Tensor, nn
from torch.optim import lr_scheduler


def _schedule(name: str, make: Callable[[Any], Any]) -> None:
    def run(trial: Trial) -> Result:
        trial.prepare()
        schedule = make(trial.optimizer)
        for _ in trial.trained():
            schedule.step()
        return trial.values()

    IDIOMS[name] = run


_schedule("A scheduler in every step", lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.8))
_schedule(
    "`OneCycleLR`, which changes the momentum too",
    lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=STEPS + 1),
)


@idiom
def set_rate(trial: Trial) -> Result:
    """Learning rate and weight decay set between backward and step."""
    for step in trial.prepare().steps():
        for group in trial.optimizer.param_groups:
            group["lr"] = 0.05 / (1 + step)
            group["weight_decay"] = 0.01 * step
    return trial.values()


@idiom
def groups(trial: Trial) -> Result:
    """Two parameter groups: the group of the biases has no weight decay."""
    biases = [parameter for parameter in trial.model.parameters() if parameter.ndim == 1]
    weights = [parameter for parameter in trial.model.parameters() if parameter.ndim > 1]
    both: Any = [{"params": weights}, {"params": biases, "weight_decay": 0.0}]
    trial.optimizer = torch.optim.AdamW(both, lr=0.01)
    return trial.prepare().train().values()


@idiom
def add_group(trial: Trial) -> Result:
    """`add_param_group` in the middle of the training."""
    trial.optimizer = torch.optim.SGD(trial.model[2].parameters(), lr=0.05)
    trial.model[0].requires_grad_(False)
    trial.prepare().train(0, 4)
    trial.bare[0].requires_grad_(True)
    trial.optimizer.add_param_group({"params": list(trial.bare[0].parameters()), "lr": 0.02})
    return trial.train(4).values()


@idiom
def frozen(trial: Trial) -> Result:
    """A layer frozen from the start."""
    trial.model[0].requires_grad_(False)
    return trial.prepare().train().values()


@idiom
def freeze_later(trial: Trial) -> Result:
    """A layer frozen later."""
    trial.prepare().train(0, 4)
    trial.bare[0].requires_grad_(False)
    return trial.train(4).values()


@idiom
def unfreeze_later(trial: Trial) -> Result:
    """A layer that is frozen first and trained later."""
    trial.model[0].requires_grad_(False)
    trial.prepare().train(0, 4)
    trial.bare[0].requires_grad_(True)
    return trial.train(4).values()


@idiom
def freeze_in_turns(trial: Trial) -> Result:
    """A layer frozen in every other step."""
    trial.prepare()
    for step in range(STEPS):
        trial.bare[0].requires_grad_(step % 2 == 0)
        trial.train(step, step + 1)
    return trial.values()


@with_unused
@idiom
def unused(trial: Trial) -> Result:
    """A layer that is never used."""
    trial.make(lambda model: model.get_submodule("0").register_module("extra", nn.Linear(2, 2)))
    return trial.prepare().train().values()


@with_unused
@idiom
def used_sometimes(trial: Trial) -> Result:
    """A layer that is used in every other step."""
    trial.make(lambda model: model.add_module("3", nn.Linear(1, 1)))
    trial.model = _Sometimes(trial.model)
    trial.prepare()
    for step in range(STEPS):
        trial.bare.is_used = step % 2 == 0
        trial.train(step, step + 1)
    return trial.values()


class _Sometimes(nn.Module):
    """A model whose last layer is left out."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers
        self.is_used = True

    def forward(self, inputs: Tensor) -> Any:
        """Apply the layers."""
        return (self.layers if self.is_used else self.layers[:-1])(inputs)


@idiom
def replace_layer(trial: Trial) -> Result:
    """A layer replaced by another one after `prepare`."""
    trial.prepare().train(0, 4)
    torch.manual_seed(4)
    trial.bare[2] = nn.Linear(16, 1)
    return trial.train(4).values()


@idiom
def buffers(trial: Trial) -> Result:
    """A buffer that the script writes."""
    trial.make(lambda model: model.register_buffer("scale", torch.ones(1)))
    trial.model = _Scaled(trial.model)
    trial.prepare()
    for step in range(STEPS):
        trial.bare.scale.mul_(0.9)
        trial.train(step, step + 1)
    return [trial.bare.scale.clone(), *trial.values()]


class _Scaled(nn.Module):
    """A model whose output is scaled by a buffer."""

    scale: Tensor

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers
        self.register_buffer("scale", torch.ones(1))

    def forward(self, inputs: Tensor) -> Any:
        """Apply the layers."""
        return self.layers(inputs) * self.scale


@idiom
def closure(trial: Trial) -> Result:
    """`step(closure)`."""
    trial.prepare()
    for step in range(STEPS):

        def compute(step: int = step) -> Tensor:
            trial.optimizer.zero_grad()
            loss = trial.loss(step)
            torch.autograd.backward(loss)
            return loss

        trial.optimizer.step(compute)
    return trial.values()


@idiom
def lbfgs(trial: Trial) -> Result:
    """`LBFGS`, whose step runs a closure several times."""
    trial.optimizer = torch.optim.LBFGS(trial.model.parameters(), lr=0.1, max_iter=2)
    return closure(trial)


@idiom
def step_hooks(trial: Trial) -> Result:
    """Hooks of the optimizer before its step."""

    def clip(*_: Any) -> None:
        nn.utils.clip_grad_norm_(trial.parameters, 0.5)

    trial.prepare()
    trial.optimizer.register_step_pre_hook(clip)
    return trial.train().values()


@idiom
def reset_state(trial: Trial) -> Result:
    """`optimizer.state.clear()`."""
    trial.prepare().train(0, 4)
    trial.optimizer.state.clear()
    return trial.train(4).values()


@idiom
def new_state(trial: Trial) -> Result:
    """An empty state loaded into the optimizer."""
    trial.prepare().train(0, 4)
    trial.optimizer.load_state_dict({**trial.optimizer.state_dict(), "state": {}})
    return trial.train(4).values()


@idiom
def evaluate(trial: Trial) -> Result:
    """An evaluation between steps."""
    trial.prepare()
    losses = []
    for step in trial.trained():
        trial.model.eval()
        with torch.no_grad():
            losses.append(trial.strategy.reduce(trial.loss(step + 1)))
        trial.model.train()
    return [*losses, *trial.values()]


@idiom
def checkpointing(trial: Trial) -> Result:
    """Activation checkpointing."""
    trial.model = _Checkpointed(trial.model)
    return trial.prepare().train().values()


class _Checkpointed(nn.Module):
    """A model that computes its activations again in backward."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, inputs: Tensor) -> Any:
        """Apply the layers."""
        from torch.utils.checkpoint import checkpoint

        return checkpoint(self.layers, inputs, use_reentrant=False)


@idiom
def freeze_by_name(trial: Trial) -> Result:
    """A layer frozen after `prepare`, by its name in `model.named_parameters()`."""
    trial.prepare()
    for name, parameter in trial.model.named_parameters():
        if name.startswith("0."):
            parameter.requires_grad_(False)
    return trial.train().values()


@idiom
def deep_copy(trial: Trial) -> Result:
    """`copy.deepcopy(model)` of the prepared model, which does not change."""
    target = copy.deepcopy(trial.prepare().train(0, 2).model)
    trial.train(2)
    return [*trial.values(), *(parameter.detach().clone() for parameter in target.parameters())]


@idiom
def save_model(trial: Trial) -> Result:
    """`torch.save(model)` of the prepared model, loaded later."""
    file = io.BytesIO()
    torch.save(trial.prepare().train(0, 2).model, file)
    trial.train(2)
    loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    return [*trial.values(), *(parameter.detach().clone() for parameter in loaded.parameters())]


@idiom
def patched_step(trial: Trial) -> Result:
    """`optimizer.step` replaced on the optimizer before `prepare`."""
    plain = trial.optimizer.step

    def step(*values: Any, **options: Any) -> Any:
        for parameter in trial.parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)
        return plain(*values, **options)

    trial.optimizer.step = step
    return trial.prepare().train().values()


@idiom
def lazy(trial: Trial) -> Result:
    """A lazy layer without a shape at `prepare`, because no batch was used before."""

    def change(model: Any) -> None:
        model[0] = nn.LazyLinear(16)

    trial.make(change)
    return trial.prepare().train().values()
