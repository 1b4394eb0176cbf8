"""Idioms that use gradients between ``backward()`` and ``step()``: clipping, scaling, skipping a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tests.conformance.idioms.trial import STEPS, Result, Trial, between, idiom, with_unused, without_overlap
from torch import nn


@idiom
def plain(trial: Trial) -> Result:
    """The plain loop."""
    return trial.prepare().train().values()


@without_overlap
@idiom
def clip_late(trial: Trial) -> Result:
    """`clip_grad_norm_`, only from step 6 on."""
    for step in trial.prepare().steps():
        if step >= 5:
            nn.utils.clip_grad_norm_(trial.model.parameters(), 0.5)
    return trial.values()


@idiom
def clip_if_large(trial: Trial) -> Result:
    """Gradients scaled if their norm, which the script computes, is large."""
    for _ in trial.prepare().steps():
        norm = sum(float(grad.square().sum()) for grad in trial.grads) ** 0.5
        if norm > 4:
            for grad in trial.grads:
                grad.mul_(4 / norm)
    return trial.values()


@idiom
def sign(trial: Trial) -> Result:
    """`p.grad = p.grad.sign()`."""
    for _ in trial.prepare().steps():
        for parameter in trial.parameters:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.sign()
    return trial.values()


@idiom
def noise(trial: Trial) -> Result:
    """Noise added to gradients."""
    generator = torch.Generator().manual_seed(5)
    for _ in trial.prepare().steps():
        for parameter in trial.parameters:
            if parameter.grad is not None:
                parameter.grad.add_(torch.randn(parameter.shape, generator=generator), alpha=0.01)
    return trial.values()


@with_unused
@idiom
def drop_gradients(trial: Trial) -> Result:
    """`p.grad = None` for some parameters, so that the step does not update them."""
    for _ in trial.prepare().steps():
        trial.bare[0].bias.grad = None
    return trial.values()


@idiom
def log_norms(trial: Trial) -> Result:
    """Norms of gradients logged in some steps."""
    for step in trial.prepare().steps():
        if step % 5 == 4:
            nn.utils.get_total_norm(list(trial.grads))
    return trial.values()


def _scale(trial: Trial, act: Callable[[torch.amp.GradScaler], Any]) -> Result:
    trial.prepare()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(STEPS):
        trial.optimizer.zero_grad()
        torch.autograd.backward(scaler.scale(trial.loss(step)))
        act(scaler)
        scaler.step(trial.optimizer)
        scaler.update()
    return trial.values()


@idiom
def scaler(trial: Trial) -> Result:
    """`GradScaler`."""
    return _scale(trial, lambda scaler: None)


@idiom
def scaler_clip(trial: Trial) -> Result:
    """`GradScaler`, `unscale_` and clipping."""

    def clip(scaler: torch.amp.GradScaler) -> None:
        scaler.unscale_(trial.optimizer)
        nn.utils.clip_grad_norm_(trial.model.parameters(), 0.5)

    return _scale(trial, clip)


@idiom
def scaler_overflow(trial: Trial) -> Result:
    """`GradScaler` that skips steps with infinite gradients."""
    trial.prepare()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(STEPS):
        trial.optimizer.zero_grad()
        loss = trial.loss(step) * (float("inf") if step == 2 else 1.0)
        torch.autograd.backward(scaler.scale(loss))
        scaler.step(trial.optimizer)
        scaler.update()
    return [*trial.values(), torch.tensor(scaler.get_scale())]


@idiom
def scaler_fused(trial: Trial) -> Result:
    """`GradScaler` with a fused optimizer."""
    trial.optimizer = torch.optim.SGD(trial.model.parameters(), lr=0.05, fused=True)
    return scaler(trial)


@idiom
def skip_large(trial: Trial) -> Result:
    """`step()` left out if the norm is large."""
    trial.prepare()
    for step in range(STEPS):
        trial.optimizer.zero_grad()
        trial.backward(step)
        if nn.utils.clip_grad_norm_(trial.model.parameters(), 100.0) < 6:
            trial.optimizer.step()
    return trial.values()


@without_overlap
@idiom
def skip_late(trial: Trial) -> Result:
    """`step()` left out once, after many steps."""
    trial.prepare()
    for step in range(STEPS):
        trial.optimizer.zero_grad()
        trial.backward(step)
        if step != 5:
            trial.optimizer.step()
    return trial.values()


between(
    {
        "`clip_grad_norm_` of torch": lambda trial: nn.utils.clip_grad_norm_(trial.model.parameters(), 0.5),
        "`clip_grad_norm_` of torch with the maximum norm": lambda trial: nn.utils.clip_grad_norm_(
            trial.model.parameters(), 0.5, norm_type=float("inf")
        ),
        "`clip_grad_value_` of torch": lambda trial: nn.utils.clip_grad_value_(trial.model.parameters(), 0.1),
        "`strategy.clip_grad_norm_`": lambda trial: trial.strategy.clip_grad_norm_(0.5),
        "Gradients scaled in place": lambda trial: [grad.mul_(0.5) for grad in trial.grads],
        "`p.grad.data.clamp_`": lambda trial: [grad.data.clamp_(-0.1, 0.1) for grad in trial.grads],
        "Gradients centralized (their mean subtracted)": lambda trial: [
            grad.sub_(grad.mean(1, keepdim=True)) for grad in trial.grads if grad.ndim > 1
        ],
        "A row of a gradient set to zero": lambda trial: trial.bare[0].weight.grad[0].zero_(),
    }
)
