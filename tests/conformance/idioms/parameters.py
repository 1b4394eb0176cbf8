"""Idioms that change parameters between steps: clamping, loading, averaging."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tests.conformance.idioms.trial import IDIOMS, STEPS, Result, Trial, idiom
from torch import nn


def _after_steps(name: str, act: Callable[[Trial], Any], *, adam: bool = False) -> None:
    def run(trial: Trial) -> Result:
        for _ in (trial.adam() if adam else trial).prepare().trained():
            with torch.no_grad():
                act(trial)
        return trial.train(STEPS, STEPS + 1).values()

    IDIOMS[name] = run


def _clamp(trial: Trial) -> None:
    for parameter in trial.model.parameters():
        parameter.clamp_(-0.3, 0.3)


_after_steps("Weights clamped after the step", _clamp)
_after_steps("Weights clamped after a step of Adam, which keeps its state", _clamp, adam=True)
_after_steps("Weight decay by hand", lambda trial: [parameter.mul_(0.99) for parameter in trial.parameters])
_after_steps(
    "Rows of a weight matrix renormalized after the step",
    lambda trial: trial.bare[0].weight.copy_(torch.renorm(trial.bare[0].weight, 2, 0, 0.5)),
)


@idiom
def clamp_weights_late(trial: Trial) -> Result:
    """Weights clamped through `.data` from step 6 on, by references that the script stored before."""
    trial.prepare()
    kept = trial.parameters
    for step in trial.trained():
        if step >= 5:
            for tensor in kept:
                tensor.data.clamp_(-0.3, 0.3)
    return trial.train(STEPS, STEPS + 1).values()


@idiom
def clamp_weights_in_numpy(trial: Trial) -> Result:
    """Weights clipped after the step through NumPy arrays that share their memory."""
    for _ in trial.prepare().trained():
        for parameter in trial.model.parameters():
            array = parameter.detach().numpy()
            np.clip(array, -0.3, 0.3, out=array)
    return trial.train(STEPS, STEPS + 1).values()


@idiom
def clamp_weights_by_aliases(trial: Trial) -> Result:
    """Weights clipped through arrays and `.data` tensors that were created before the training."""
    trial.prepare()
    arrays = [parameter.detach().numpy() for parameter in trial.model.parameters()]
    tensors = [parameter.data for parameter in trial.model.parameters()]
    for _ in trial.trained():
        for array, tensor in zip(arrays, tensors, strict=True):
            np.clip(array, -0.3, 0.3, out=array)
            tensor.mul_(0.9)
    return trial.train(STEPS, STEPS + 1).values()


@idiom
def initialize(trial: Trial) -> Result:
    """Parameters initialized after `prepare`."""
    trial.prepare()
    with torch.no_grad():
        for number, parameter in enumerate(trial.model.parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)) / 4)
    return trial.train().values()


@idiom
def load_after(trial: Trial) -> Result:
    """`model.load_state_dict` after `prepare`."""
    trial.prepare()
    state = {name: value + 0.1 for name, value in trial.model.state_dict().items()}
    trial.model.load_state_dict(state)
    return trial.train().values()


@idiom
def load_middle(trial: Trial) -> Result:
    """`model.load_state_dict` of an earlier copy, in the middle of the training."""
    trial.prepare().train(0, 3)
    kept = copy.deepcopy(trial.model.state_dict())
    trial.train(3, 6)
    trial.model.load_state_dict(kept)
    return trial.train(6).values()


@idiom
def resume(trial: Trial) -> Result:
    """`state_dict` of model and optimizer through `torch.save`, loaded later."""
    trial.adam().prepare().train(0, 4)
    file = io.BytesIO()
    torch.save([trial.model.state_dict(), trial.optimizer.state_dict()], file)
    trial.train(4, 7)
    file.seek(0)
    model, optimizer = torch.load(file)
    trial.model.load_state_dict(model)
    trial.optimizer.load_state_dict(optimizer)
    return trial.train(7, 12).values()


@idiom
def replace_data(trial: Trial) -> Result:
    """`p.data = ...`."""
    trial.prepare().train(0, 4)
    for parameter in trial.parameters:
        parameter.data = parameter.data * 0.5
    return trial.train(4).values()


@idiom
def prune(trial: Trial) -> Result:
    """Weights pruned by a mask from a later step on, and kept at zero."""
    trial.prepare().train(0, 5)
    mask = trial.bare[0].weight.abs() > 0.1
    for step in range(5, STEPS):
        trial.bare[0].weight.data.mul_(mask)
        trial.train(step, step + 1)
    return trial.values()


@idiom
def lookahead(trial: Trial) -> Result:
    """Slow weights that are updated every third step."""
    slow = trial.prepare().values()
    for step in trial.trained():
        if step % 3 == 2:
            with torch.no_grad():
                for parameter, kept in zip(trial.parameters, slow, strict=True):
                    kept.lerp_(parameter, 0.5)
                    parameter.copy_(kept)
    return trial.train(STEPS, STEPS + 1).values()


@idiom
def reset_layer(trial: Trial) -> Result:
    """A layer reset in the middle of the training."""
    trial.prepare().train(0, 4)
    torch.manual_seed(9)
    trial.bare[2].reset_parameters()
    return trial.train(4).values()


@idiom
def average(trial: Trial) -> Result:
    """An exponential average of the weights."""
    mean = trial.prepare().values()
    kept = trial.parameters
    for _ in trial.trained():
        with torch.no_grad():
            for one, value in zip(mean, kept, strict=True):
                one.lerp_(value, 0.1)
    return [*mean, *trial.values()]


@idiom
def average_of_torch(trial: Trial) -> Result:
    """`torch.optim.swa_utils.AveragedModel`."""
    trial.prepare()
    mean = torch.optim.swa_utils.AveragedModel(trial.bare)
    for _ in trial.trained():
        mean.update_parameters(trial.bare)
    return [*(parameter.detach().clone() for parameter in mean.module.parameters()), *trial.values()]


@idiom
def swap_average(trial: Trial) -> Result:
    """Averaged weights used for an evaluation, then replaced by the trained weights."""
    mean = trial.prepare().values()
    losses = []
    for step in trial.trained():
        with torch.no_grad():
            kept = trial.values()
            for one, parameter in zip(mean, trial.parameters, strict=True):
                one.lerp_(parameter, 0.1)
                parameter.data.copy_(one)
            losses.append(trial.strategy.reduce(trial.loss(step)))
            for value, parameter in zip(kept, trial.parameters, strict=True):
                parameter.data.copy_(value)
    return [*losses, *trial.values()]


@idiom
def copy_target(trial: Trial) -> Result:
    """A copy of the model as a target network, updated by a moving average."""
    target = copy.deepcopy(trial.prepare().bare)
    for step in range(STEPS):
        trial.optimizer.zero_grad()
        inputs, targets = trial.share(step)
        goal = targets + 0.1 * target(inputs).detach()
        torch.autograd.backward(nn.functional.mse_loss(trial.model(inputs), goal))
        trial.optimizer.step()
        with torch.no_grad():
            for old, new in zip(target.parameters(), trial.bare.parameters(), strict=True):
                old.mul_(0.9).add_(new.data, alpha=0.1)
    return [*(parameter.detach() for parameter in target.parameters()), *trial.values()]


@idiom
def penalty(trial: Trial) -> Result:
    """A penalty on parameters in the loss."""
    for step in trial.prepare().zeroed():
        norm = sum(parameter.square().sum() for parameter in trial.parameters)
        torch.autograd.backward(trial.loss(step) + 0.01 * norm)
    return trial.values()
