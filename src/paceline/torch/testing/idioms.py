"""What scripts do between ``backward()`` and ``step()``, and between steps: each under a strategy, beside one device.

An *idiom* trains a small model and returns tensors, most often the parameters at the end. :func:`run_all` carries all
of them out under every strategy: what they return is that of one device to 1e-5, or the strategy refuses, with one
sentence.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from paceline.torch.strategies import Strategy

STEPS = 8
_ROWS = 8

Result = list[Tensor]


class Trial:
    """A training of a small model under a strategy: this rank's part of the batches, and the loop."""

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy
        generator = torch.Generator().manual_seed(7)
        self._inputs = torch.randn(3 * STEPS, _ROWS, 6, generator=generator)
        self._targets = 3 * self._inputs.sum(-1, keepdim=True).sin()
        self.make()

    def make(self, change: Callable[[nn.Module], Any] = lambda model: None, **options: Any) -> Trial:
        """Make the model and its optimizer anew: SGD with momentum unless `options` has another ``optimizer``."""
        torch.manual_seed(3)
        self.model: Any = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
        change(self.model)
        make = options.pop("optimizer", torch.optim.SGD)
        self.optimizer: Any = make(self.model.parameters(), **{"lr": 0.05, "momentum": 0.9, **options})
        return self

    def adam(self) -> Trial:
        """Have Adam for the optimizer."""
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.02)
        return self

    def prepare(self) -> Trial:
        """Have the strategy prepare the model and the optimizer."""
        self.model, self.optimizer = self.strategy.prepare(self.model, self.optimizer)
        return self

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The model's."""
        assert self.strategy.module is not None
        return list(self.strategy.module.parameters())

    @property
    def bare(self) -> Any:
        """The model as it was given."""
        return self.strategy.module

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

    def steps(self, first: int = 0, last: int = STEPS) -> Iterator[int]:
        """Yield the number of each step: after its backward, and before the optimizer's step."""
        for step in range(first, last):
            self.optimizer.zero_grad()
            self.backward(step)
            yield step
            self.optimizer.step()

    def train(self, first: int = 0, last: int = STEPS) -> Trial:
        """Train plainly."""
        for _ in self.steps(first, last):
            pass
        return self

    def values(self) -> Result:
        """Return the parameters' values."""
        return [each.detach().clone() for each in self.parameters]


Idiom = Callable[[Trial], Result]
IDIOMS: dict[str, Idiom] = {}
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {}
"""What a strategy is made with for an idiom, by the idiom's name and the strategy's."""


def idiom(function: Idiom) -> Idiom:
    """Add a function to :data:`IDIOMS`, under the first line of its docstring."""
    assert function.__doc__ is not None
    IDIOMS[function.__doc__.strip().removesuffix(".")] = function
    return function


def with_options(function: Idiom, said: str, options: dict[str, dict[str, Any]]) -> None:
    """Add an idiom once more, with options of strategies (by their names) that allow it; `said` names them."""
    assert function.__doc__ is not None
    name = f"{function.__doc__.strip().removesuffix('.')}, with {said}"
    IDIOMS[name] = function
    OPTIONS[name] = options


# Gradients.


@idiom
def plain(trial: Trial) -> Result:
    """The plain loop."""
    return trial.prepare().train().values()


@idiom
def clip_norm(trial: Trial) -> Result:
    """`clip_grad_norm_` of torch."""
    for _ in trial.prepare().steps():
        nn.utils.clip_grad_norm_(trial.model.parameters(), 0.5)
    return trial.values()


@idiom
def clip_largest(trial: Trial) -> Result:
    """`clip_grad_norm_` of torch, the largest element."""
    for _ in trial.prepare().steps():
        nn.utils.clip_grad_norm_(trial.model.parameters(), 0.5, norm_type=float("inf"))
    return trial.values()


@idiom
def clip_values(trial: Trial) -> Result:
    """`clip_grad_value_` of torch."""
    for _ in trial.prepare().steps():
        nn.utils.clip_grad_value_(trial.model.parameters(), 0.1)
    return trial.values()


@idiom
def clip_by_strategy(trial: Trial) -> Result:
    """`strategy.clip_grad_norm_`."""
    for _ in trial.prepare().steps():
        trial.strategy.clip_grad_norm_(0.5)
    return trial.values()


@idiom
def clip_late(trial: Trial) -> Result:
    """`clip_grad_norm_`, only from step 6 on."""
    for step in trial.prepare().steps():
        if step >= 5:
            nn.utils.clip_grad_norm_(trial.model.parameters(), 0.5)
    return trial.values()


@idiom
def clip_if_large(trial: Trial) -> Result:
    """A norm computed by hand, and gradients scaled if it is large."""
    for _ in trial.prepare().steps():
        norm = sum(float(each.grad.square().sum()) for each in trial.parameters if each.grad is not None) ** 0.5
        if norm > 4:
            for each in trial.parameters:
                if each.grad is not None:
                    each.grad.mul_(4 / norm)
    return trial.values()


@idiom
def scale(trial: Trial) -> Result:
    """Gradients scaled in place."""
    for _ in trial.prepare().steps():
        for each in trial.parameters:
            if each.grad is not None:
                each.grad *= 0.5
    return trial.values()


@idiom
def clamp_data(trial: Trial) -> Result:
    """`p.grad.data.clamp_`."""
    for _ in trial.prepare().steps():
        for each in trial.parameters:
            if each.grad is not None:
                each.grad.data.clamp_(-0.1, 0.1)
    return trial.values()


@idiom
def sign(trial: Trial) -> Result:
    """`p.grad = p.grad.sign()`."""
    for _ in trial.prepare().steps():
        for each in trial.parameters:
            if each.grad is not None:
                each.grad = each.grad.sign()
    return trial.values()


@idiom
def centralize(trial: Trial) -> Result:
    """Gradients centralized (their mean subtracted)."""
    for _ in trial.prepare().steps():
        for each in trial.parameters:
            if each.grad is not None and each.ndim > 1:
                each.grad.sub_(each.grad.mean(1, keepdim=True))
    return trial.values()


@idiom
def mask_rows(trial: Trial) -> Result:
    """A row of a gradient set to zero."""
    for _ in trial.prepare().steps():
        trial.bare[0].weight.grad[0] = 0
    return trial.values()


@idiom
def noise(trial: Trial) -> Result:
    """Noise added to gradients."""
    generator = torch.Generator().manual_seed(5)
    for _ in trial.prepare().steps():
        for each in trial.parameters:
            if each.grad is not None:
                each.grad.add_(torch.randn(each.shape, generator=generator), alpha=0.01)
    return trial.values()


@idiom
def drop_some(trial: Trial) -> Result:
    """`p.grad = None` for some, so that the step leaves them."""
    for _ in trial.prepare().steps():
        trial.bare[0].bias.grad = None
    return trial.values()


@idiom
def look(trial: Trial) -> Result:
    """Norms of gradients logged now and then."""
    for step in trial.prepare().steps():
        if step % 5 == 4:
            nn.utils.get_total_norm([each.grad for each in trial.parameters if each.grad is not None])
    return trial.values()


@idiom
def scaler(trial: Trial) -> Result:
    """`GradScaler`."""
    trial.prepare()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(STEPS):
        trial.optimizer.zero_grad()
        torch.autograd.backward(scaler.scale(trial.loss(step)))
        scaler.step(trial.optimizer)
        scaler.update()
    return trial.values()


@idiom
def scaler_clip(trial: Trial) -> Result:
    """`GradScaler`, `unscale_` and clipping."""
    trial.prepare()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(STEPS):
        trial.optimizer.zero_grad()
        torch.autograd.backward(scaler.scale(trial.loss(step)))
        scaler.unscale_(trial.optimizer)
        nn.utils.clip_grad_norm_(trial.model.parameters(), 0.5)
        scaler.step(trial.optimizer)
        scaler.update()
    return trial.values()


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
    """`step()` left out where the norm is large."""
    trial.prepare()
    for step in range(STEPS):
        trial.optimizer.zero_grad()
        trial.backward(step)
        if nn.utils.clip_grad_norm_(trial.model.parameters(), 100.0) < 6:
            trial.optimizer.step()
    return trial.values()


@idiom
def skip_late(trial: Trial) -> Result:
    """`step()` left out once, late."""
    trial.prepare()
    for step in range(STEPS):
        trial.optimizer.zero_grad()
        trial.backward(step)
        if step != 5:
            trial.optimizer.step()
    return trial.values()


@idiom
def accumulate(trial: Trial) -> Result:
    """Two backwards a step."""
    trial.prepare()
    for step in range(STEPS):
        trial.optimizer.zero_grad()
        for part in range(2):
            torch.autograd.backward(trial.loss(2 * step + part) / 2)
        trial.optimizer.step()
    return trial.values()


@idiom
def accumulate_clip(trial: Trial) -> Result:
    """Two backwards a step, then clipping."""
    trial.prepare()
    for step in range(STEPS):
        trial.optimizer.zero_grad()
        for part in range(2):
            torch.autograd.backward(trial.loss(2 * step + part) / 2)
        nn.utils.clip_grad_norm_(trial.model.parameters(), 0.5)
        trial.optimizer.step()
    return trial.values()


@idiom
def accumulate_by_strategy(trial: Trial) -> Result:
    """Two backwards a step in `strategy.accumulate`, then clipping."""
    trial.prepare()
    for step in range(STEPS):
        trial.optimizer.zero_grad()
        for part in range(2):
            with trial.strategy.accumulate(is_last=part == 1):
                torch.autograd.backward(trial.loss(2 * step + part) / 2)
        nn.utils.clip_grad_norm_(trial.model.parameters(), 0.5)
        trial.optimizer.step()
    return trial.values()


@idiom
def accumulate_late(trial: Trial) -> Result:
    """Two backwards a step, only from step 6 on."""
    trial.prepare()
    for step in range(STEPS):
        trial.optimizer.zero_grad()
        for part in range(1 + (step >= 5)):
            torch.autograd.backward(trial.loss(2 * step + part))
        trial.optimizer.step()
    return trial.values()


@idiom
def never_zero(trial: Trial) -> Result:
    """Gradients that are never set to zero."""
    trial.prepare()
    for step in range(STEPS):
        torch.autograd.backward(0.1 * trial.loss(step))
        trial.optimizer.step()
    return trial.values()


@idiom
def zero_in_place(trial: Trial) -> Result:
    """`zero_grad(set_to_none=False)`."""
    trial.prepare()
    for step in range(STEPS):
        trial.optimizer.zero_grad(set_to_none=False)
        trial.backward(step)
        trial.optimizer.step()
    return trial.values()


@idiom
def zero_by_model(trial: Trial) -> Result:
    """`model.zero_grad()`."""
    trial.prepare()
    for step in range(STEPS):
        trial.model.zero_grad()
        trial.backward(step)
        trial.optimizer.step()
    return trial.values()


@idiom
def zero_by_hand(trial: Trial) -> Result:
    """`p.grad.zero_()` after the step."""
    trial.prepare()
    for step in range(STEPS):
        trial.backward(step)
        trial.optimizer.step()
        for each in trial.parameters:
            if each.grad is not None:
                each.grad.zero_()
    return trial.values()


@idiom
def retain(trial: Trial) -> Result:
    """`backward(retain_graph=True)`, twice through one graph."""
    trial.prepare()
    for step in range(STEPS):
        trial.optimizer.zero_grad()
        loss = trial.loss(step)
        torch.autograd.backward(loss, retain_graph=True)
        torch.autograd.backward(0.5 * loss)
        trial.optimizer.step()
    return trial.values()


@idiom
def input_penalty(trial: Trial) -> Result:
    """A penalty on gradients with respect to inputs (double backward)."""
    trial.prepare()
    for step in range(STEPS):
        trial.optimizer.zero_grad()
        inputs, targets = trial.share(step)
        inputs = inputs.clone().requires_grad_()
        outputs = trial.model(inputs)
        (slope,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
        penalty = ((slope.norm(dim=1) - 1) ** 2).mean()
        torch.autograd.backward(nn.functional.mse_loss(outputs, targets) + penalty)
        trial.optimizer.step()
    return trial.values()


@idiom
def set_gradients(trial: Trial) -> Result:
    """Gradients of `torch.autograd.grad`, set by hand."""
    trial.prepare()
    for step in range(STEPS):
        found = torch.autograd.grad(trial.loss(step), trial.parameters)
        for each, grad in zip(trial.parameters, found, strict=True):
            each.grad = grad
        trial.optimizer.step()
    return trial.values()


@idiom
def set_and_clip(trial: Trial) -> Result:
    """Gradients of `torch.autograd.grad`, set by hand and clipped."""
    trial.prepare()
    for step in range(STEPS):
        found = torch.autograd.grad(trial.loss(step), trial.parameters)
        for each, grad in zip(trial.parameters, found, strict=True):
            each.grad = grad
        nn.utils.clip_grad_norm_(trial.parameters, 0.5)
        trial.optimizer.step()
    return trial.values()


@idiom
def tensor_hook(trial: Trial) -> Result:
    """A hook on a parameter that scales its gradient."""
    trial.prepare()
    trial.bare[0].weight.register_hook(lambda grad: 2 * grad)
    return trial.train().values()


@idiom
def sharpness(trial: Trial) -> Result:
    """Sharpness-aware minimization: parameters moved, a second backward, and moved back."""
    trial.prepare()
    for step in range(STEPS):
        trial.optimizer.zero_grad()
        trial.backward(step)
        kept = trial.values()
        with torch.no_grad():
            for each in trial.parameters:
                if each.grad is not None:
                    each.add_(each.grad, alpha=0.01)
        trial.optimizer.zero_grad()
        trial.backward(step)
        with torch.no_grad():
            for each, value in zip(trial.parameters, kept, strict=True):
                each.copy_(value)
        trial.optimizer.step()
    return trial.values()


@idiom
def fail(trial: Trial) -> Result:
    """A backward that fails halfway, and is left out."""
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


def _raise(grad: Tensor) -> None:
    raise ArithmeticError


# Parameters.


@idiom
def clamp_weights(trial: Trial) -> Result:
    """Weights clamped after the step."""
    trial.prepare()
    for step in range(STEPS):
        trial.train(step, step + 1)
        with torch.no_grad():
            for each in trial.model.parameters():
                each.clamp_(-0.3, 0.3)
    return trial.train(STEPS, STEPS + 1).values()


@idiom
def clamp_weights_late(trial: Trial) -> Result:
    """Weights clamped through `.data`, from step 6 on, by references of the script's own."""
    trial.prepare()
    kept = trial.parameters
    for step in range(STEPS):
        trial.train(step, step + 1)
        if step >= 5:
            for each in kept:
                each.data.clamp_(-0.3, 0.3)
    return trial.train(STEPS, STEPS + 1).values()


@idiom
def clamp_weights_in_numpy(trial: Trial) -> Result:
    """Weights clipped by NumPy after the step, in arrays of their own memory."""
    trial.prepare()
    for step in range(STEPS):
        trial.train(step, step + 1)
        for each in trial.model.parameters():
            array = each.detach().numpy()
            np.clip(array, -0.3, 0.3, out=array)
    return trial.train(STEPS, STEPS + 1).values()


@idiom
def clamp_weights_by_aliases(trial: Trial) -> Result:
    """Weights clipped through arrays and `.data` that were taken once, before training."""
    trial.prepare()
    arrays = [each.detach().numpy() for each in trial.model.parameters()]
    tensors = [each.data for each in trial.model.parameters()]
    for step in range(STEPS):
        trial.train(step, step + 1)
        for array, tensor in zip(arrays, tensors, strict=True):
            np.clip(array, -0.3, 0.3, out=array)
            tensor.mul_(0.9)
    return trial.train(STEPS, STEPS + 1).values()


@idiom
def clamp_weights_adam(trial: Trial) -> Result:
    """Weights clamped after a step of Adam, whose state stays."""
    trial.adam()
    return clamp_weights(trial)


@idiom
def initialize(trial: Trial) -> Result:
    """Parameters initialized after `prepare`."""
    trial.prepare()
    with torch.no_grad():
        for number, each in enumerate(trial.model.parameters()):
            each.copy_(torch.randn(each.shape, generator=torch.Generator().manual_seed(number)) / 4)
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
    """`model.load_state_dict` in the middle, back to a copy of before."""
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
    for each in trial.parameters:
        each.data = each.data * 0.5
    return trial.train(4).values()


@idiom
def decay_by_hand(trial: Trial) -> Result:
    """Weight decay by hand."""
    trial.prepare()
    for step in range(STEPS):
        trial.train(step, step + 1)
        with torch.no_grad():
            for each in trial.parameters:
                each.mul_(0.99)
    return trial.train(STEPS, STEPS + 1).values()


@idiom
def max_norm(trial: Trial) -> Result:
    """Rows renormalized after the step."""
    trial.prepare()
    for step in range(STEPS):
        trial.train(step, step + 1)
        with torch.no_grad():
            weight = trial.bare[0].weight
            weight.copy_(torch.renorm(weight, 2, 0, 0.5))
    return trial.train(STEPS, STEPS + 1).values()


@idiom
def prune(trial: Trial) -> Result:
    """Weights pruned by a mask, late, and kept at zero."""
    trial.prepare().train(0, 5)
    mask = trial.bare[0].weight.abs() > 0.1
    for step in range(5, STEPS):
        trial.bare[0].weight.data.mul_(mask)
        trial.train(step, step + 1)
    return trial.values()


@idiom
def lookahead(trial: Trial) -> Result:
    """Slow weights, taken up every third step."""
    slow = trial.prepare().values()
    for step in range(STEPS):
        trial.train(step, step + 1)
        if step % 3 == 2:
            with torch.no_grad():
                for each, kept in zip(trial.parameters, slow, strict=True):
                    kept.lerp_(each, 0.5)
                    each.copy_(kept)
    return trial.train(STEPS, STEPS + 1).values()


@idiom
def reset_layer(trial: Trial) -> Result:
    """A layer reset in the middle."""
    trial.prepare().train(0, 4)
    torch.manual_seed(9)
    trial.bare[2].reset_parameters()
    return trial.train(4).values()


@idiom
def average(trial: Trial) -> Result:
    """An exponential average of the weights."""
    mean = trial.prepare().values()
    kept = trial.parameters
    for step in range(STEPS):
        trial.train(step, step + 1)
        with torch.no_grad():
            for one, each in zip(mean, kept, strict=True):
                one.lerp_(each, 0.1)
    return [*mean, *trial.values()]


@idiom
def average_of_torch(trial: Trial) -> Result:
    """`torch.optim.swa_utils.AveragedModel`."""
    trial.prepare()
    mean = torch.optim.swa_utils.AveragedModel(trial.bare)
    for step in range(STEPS):
        trial.train(step, step + 1)
        mean.update_parameters(trial.bare)
    return [*(each.detach().clone() for each in mean.module.parameters()), *trial.values()]


@idiom
def swap_average(trial: Trial) -> Result:
    """Averaged weights swapped in for an evaluation, and out."""
    mean = trial.prepare().values()
    losses = []
    for step in range(STEPS):
        trial.train(step, step + 1)
        with torch.no_grad():
            kept = trial.values()
            for one, each in zip(mean, trial.parameters, strict=True):
                one.lerp_(each, 0.1)
                each.data.copy_(one)
            losses.append(trial.strategy.reduce(trial.loss(step)))
            for value, each in zip(kept, trial.parameters, strict=True):
                each.data.copy_(value)
    return [*losses, *trial.values()]


@idiom
def copy_target(trial: Trial) -> Result:
    """A copy of the model as a target, updated softly."""
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
    return [*(each.detach() for each in target.parameters()), *trial.values()]


@idiom
def penalty(trial: Trial) -> Result:
    """A penalty on parameters in the loss."""
    trial.prepare()
    for step in range(STEPS):
        trial.optimizer.zero_grad()
        norm = sum(each.square().sum() for each in trial.parameters)
        torch.autograd.backward(trial.loss(step) + 0.01 * norm)
        trial.optimizer.step()
    return trial.values()


# Groups, and what is trained.


@idiom
def schedule(trial: Trial) -> Result:
    """A scheduler in every step."""
    trial.prepare()
    schedule = torch.optim.lr_scheduler.ExponentialLR(trial.optimizer, 0.8)
    for step in range(STEPS):
        trial.train(step, step + 1)
        schedule.step()
    return trial.values()


@idiom
def one_cycle(trial: Trial) -> Result:
    """`OneCycleLR`, which changes the momentum too."""
    trial.prepare()
    schedule = torch.optim.lr_scheduler.OneCycleLR(trial.optimizer, 0.1, total_steps=STEPS + 1)
    for step in range(STEPS):
        trial.train(step, step + 1)
        schedule.step()
    return trial.values()


@idiom
def set_rate(trial: Trial) -> Result:
    """Learning rate and weight decay set by hand, between backward and step."""
    for step in trial.prepare().steps():
        for group in trial.optimizer.param_groups:
            group["lr"] = 0.05 / (1 + step)
            group["weight_decay"] = 0.01 * step
    return trial.values()


@idiom
def groups(trial: Trial) -> Result:
    """Two groups, the biases without decay."""
    biases = [each for each in trial.model.parameters() if each.ndim == 1]
    weights = [each for each in trial.model.parameters() if each.ndim > 1]
    both: Any = [{"params": weights}, {"params": biases, "weight_decay": 0.0}]
    trial.optimizer = torch.optim.AdamW(both, lr=0.01)
    return trial.prepare().train().values()


@idiom
def add_group(trial: Trial) -> Result:
    """`add_param_group` in the middle."""
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
    """A layer trained later."""
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


@idiom
def unused(trial: Trial) -> Result:
    """A layer that is never used."""
    trial.make(lambda model: model.get_submodule("0").register_module("extra", nn.Linear(2, 2)))
    return trial.prepare().train().values()


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


# Buffers, closures, and the rest.


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
    """The optimizer's state loaded empty."""
    trial.prepare().train(0, 4)
    trial.optimizer.load_state_dict({**trial.optimizer.state_dict(), "state": {}})
    return trial.train(4).values()


@idiom
def evaluate(trial: Trial) -> Result:
    """An evaluation between steps."""
    trial.prepare()
    losses = []
    for step in range(STEPS):
        trial.train(step, step + 1)
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


_NO_OVERLAP: dict[str, dict[str, Any]] = {"parameter-server": {"overlap": False}}
_UNUSED: dict[str, dict[str, Any]] = {
    "all-reduce": {"find_unused_parameters": True},
    "parameter-server": {"unused": "skip"},
}
for _function in (clip_late, skip_late, accumulate_late):
    with_options(_function, "`overlap=False`", _NO_OVERLAP)
for _function in (drop_some, unused, used_sometimes):
    with_options(_function, "`find_unused_parameters=True` or `unused='skip'`", _UNUSED)
