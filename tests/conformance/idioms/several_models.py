"""Several models or optimizers in one script: generator and critic, teacher and student, actor and critic."""

from __future__ import annotations

from typing import Any

import torch
from tests.conformance.idioms.trial import STEPS, Result, Trial, idiom
from torch import nn
from torch.nn import functional


def _sgd(*models: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for model in models for parameter in model.parameters()], lr=0.05, momentum=0.9)


def _values(*models: nn.Module) -> Result:
    return [parameter.detach().clone() for model in models for parameter in model.parameters()]


def _train_gan(trial: Trial, generator: Any, critic: Any, first: Any, second: Any) -> None:
    for step in range(STEPS):
        noise, real = trial.share(step)[0], torch.cat(trial.share(step), dim=1)
        second.zero_grad()
        loss = functional.softplus(critic(generator(noise).detach())).mean() + functional.softplus(-critic(real)).mean()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(critic.parameters(), 0.5)
        second.step()
        if step % 2:
            first.zero_grad()
            torch.autograd.backward(functional.softplus(-critic(generator(noise))).mean())
            first.step()


@idiom
def gan(trial: Trial) -> Result:
    """Generator and critic with an optimizer each, prepared one after the other."""
    models = nn.Linear(6, 7), nn.Linear(7, 1)
    generator, first = trial.strategy.prepare(models[0], _sgd(models[0]))
    critic, second = trial.strategy.prepare(models[1], _sgd(models[1]))
    _train_gan(trial, generator, critic, first, second)
    return _values(*models)


@idiom
def gan_at_once(trial: Trial) -> Result:
    """Generator and critic with an optimizer each, prepared in one call."""
    models = nn.Linear(6, 7), nn.Linear(7, 1)
    _train_gan(trial, *trial.strategy.prepare(*models, *map(_sgd, models)))
    return _values(*models)


@idiom
def teacher(trial: Trial) -> Result:
    """A teacher without an optimizer, and a student."""
    teacher = trial.strategy.prepare(nn.Linear(6, 1))
    trial.prepare()
    for step in trial.zeroed():
        inputs, targets = trial.share(step)
        with torch.no_grad():
            soft = teacher(inputs)
        outputs = trial.model(inputs)
        torch.autograd.backward(functional.mse_loss(outputs, soft) + functional.mse_loss(outputs, targets))
    return trial.values()


@idiom
def actor_and_critic(trial: Trial) -> Result:
    """Actor and critic with two optimizers and one backward of a common loss."""
    models = nn.Linear(6, 3), nn.Linear(6, 1)
    actor, critic, *optimizers = trial.strategy.prepare(*models, *map(_sgd, models))
    for step in range(STEPS):
        inputs, targets = trial.share(step)
        advantage = targets - critic(inputs)
        policy = functional.log_softmax(actor(inputs), dim=1)[:, :1]
        for optimizer in optimizers:
            optimizer.zero_grad()
        torch.autograd.backward((advantage.square() - advantage.detach() * policy).mean())
        for optimizer in optimizers:
            optimizer.step()
    return _values(*models)


@idiom
def one_optimizer(trial: Trial) -> Result:
    """One optimizer over two models."""
    models = nn.Linear(6, 4), nn.Linear(4, 1)
    encoder, decoder, optimizer = trial.strategy.prepare(*models, _sgd(*models))
    for step in range(STEPS):
        inputs, targets = trial.share(step)
        optimizer.zero_grad()
        torch.autograd.backward(functional.mse_loss(decoder(torch.tanh(encoder(inputs))), targets))
        optimizer.step()
    return _values(*models)


@idiom
def two_optimizers(trial: Trial) -> Result:
    """Two optimizers over one model."""
    first, second = _sgd(trial.model[0]), torch.optim.Adam(trial.model[2].parameters(), lr=0.02)
    trial.model, first, second = trial.strategy.prepare(trial.model, first, second)
    for step in range(STEPS):
        first.zero_grad()
        second.zero_grad()
        trial.backward(step)
        first.step()
        second.step()
    return trial.values()
