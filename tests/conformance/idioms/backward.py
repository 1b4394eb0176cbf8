"""Idioms of computing gradients: several backward passes, gradients set by the script, hooks, failures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tests.conformance.idioms.trial import IDIOMS, STEPS, Result, Trial, idiom, without_overlap
from torch import Tensor, nn


def _accumulate(trial: Trial, *, clips: bool = True, holds: bool = False) -> Result:
    for step in trial.prepare().zeroed():
        for part in range(2):
            with trial.strategy.accumulate(is_last=part == 1 or not holds):
                torch.autograd.backward(trial.loss(2 * step + part) / 2)
        if clips:
            nn.utils.clip_grad_norm_(trial.model.parameters(), 0.5)
    return trial.values()


IDIOMS["Two backward passes per step"] = lambda trial: _accumulate(trial, clips=False)
IDIOMS["Two backward passes per step, then clipping"] = _accumulate
IDIOMS["Two backward passes per step in `strategy.accumulate`, then clipping"] = lambda trial: _accumulate(
    trial, holds=True
)


@without_overlap
@idiom
def accumulate_late(trial: Trial) -> Result:
    """Two backward passes per step from step 6 on."""
    for step in trial.prepare().zeroed():
        for part in range(1 + (step >= 5)):
            torch.autograd.backward(trial.loss(2 * step + part))
    return trial.values()


@idiom
def never_zero(trial: Trial) -> Result:
    """Gradients that are never set to zero."""
    trial.prepare()
    for step in range(STEPS):
        torch.autograd.backward(0.1 * trial.loss(step))
        trial.optimizer.step()
    return trial.values()


def _zero(name: str, act: Callable[[Trial], Any]) -> None:
    def run(trial: Trial) -> Result:
        trial.prepare()
        for step in range(STEPS):
            act(trial)
            trial.backward(step)
            trial.optimizer.step()
        return trial.values()

    IDIOMS[name] = run


_zero("`zero_grad(set_to_none=False)`", lambda trial: trial.optimizer.zero_grad(set_to_none=False))
_zero("`model.zero_grad()`", lambda trial: trial.model.zero_grad())
_zero("`p.grad.zero_()` after the step", lambda trial: [grad.zero_() for grad in trial.grads])


@idiom
def retain(trial: Trial) -> Result:
    """`backward(retain_graph=True)`, twice through one graph."""
    for step in trial.prepare().zeroed():
        loss = trial.loss(step)
        torch.autograd.backward(loss, retain_graph=True)
        torch.autograd.backward(0.5 * loss)
    return trial.values()


@idiom
def input_penalty(trial: Trial) -> Result:
    """A penalty on gradients with respect to inputs (double backward)."""
    for step in trial.prepare().zeroed():
        inputs, targets = trial.share(step)
        inputs = inputs.clone().requires_grad_()
        outputs = trial.model(inputs)
        (slope,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
        penalty = ((slope.norm(dim=1) - 1) ** 2).mean()
        torch.autograd.backward(nn.functional.mse_loss(outputs, targets) + penalty)
    return trial.values()


def _set_gradients(name: str, act: Callable[[Trial], Any]) -> None:
    def run(trial: Trial) -> Result:
        trial.prepare()
        for step in range(STEPS):
            found = torch.autograd.grad(trial.loss(step), trial.parameters)
            for parameter, grad in zip(trial.parameters, found, strict=True):
                parameter.grad = grad
            act(trial)
            trial.optimizer.step()
        return trial.values()

    IDIOMS[name] = run


_set_gradients("Gradients of `torch.autograd.grad`, set by hand", lambda trial: None)
_set_gradients(
    "Gradients of `torch.autograd.grad`, set by hand and clipped",
    lambda trial: nn.utils.clip_grad_norm_(trial.parameters, 0.5),
)


@idiom
def tensor_hook(trial: Trial) -> Result:
    """A hook on a parameter that scales its gradient."""
    trial.prepare()
    trial.bare[0].weight.register_hook(lambda grad: 2 * grad)
    return trial.train().values()


@idiom
def sharpness(trial: Trial) -> Result:
    """Sharpness-aware minimization: a second backward at moved parameters, which are then moved back."""
    for step in trial.prepare().zeroed():
        trial.backward(step)
        kept = trial.values()
        with torch.no_grad():
            for parameter in trial.parameters:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=0.01)
        trial.optimizer.zero_grad()
        trial.backward(step)
        with torch.no_grad():
            for parameter, value in zip(trial.parameters, kept, strict=True):
                parameter.copy_(value)
    return trial.values()


@idiom
def fail(trial: Trial) -> Result:
    """A backward that fails halfway, after which the script skips the step."""
    trial.prepare()
    for step in range(STEPS):
        trial.optimizer.zero_grad()
        inputs, targets = trial.share(step)
        hidden = trial.model(inputs)
        if step == 4:
            hidden.register_hook(_raise)
        try:
            torch.autograd.backward(nn.functional.mse_loss(hidden, targets) + 0.01 * trial.bare[2].bias.sum())
        except ArithmeticError:
            continue
        trial.optimizer.step()
    return trial.values()


@idiom
def step_in_backward(trial: Trial) -> Result:
    """`optimizer.step()` in a hook of backward, with an optimizer for each parameter."""
    trial.prepare()
    optimizers = {parameter: torch.optim.SGD([parameter], 0.05) for parameter in trial.parameters}

    def update(parameter: Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    for trained in trial.parameters:
        trained.register_post_accumulate_grad_hook(update)
    for step in range(STEPS):
        trial.backward(step)
    return trial.values()


def _raise(grad: Tensor) -> None:
    raise ArithmeticError
