"""Which update rule of the servers does what a ``torch.optim`` optimizer would do, and the state of one as the other's.

For strategies and embeddings whose parameters, and so their updates, lie in tables of :mod:`paceline.ps`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.errors import UsageError
from paceline.ps import SGD, Adagrad, Adam, AdamW, Momentum, RMSprop, UpdateRule

_POSSIBLE = "torch.optim's SGD, Adagrad, RMSprop, Adam and AdamW"

_STATE_NAMES: dict[type[UpdateRule], tuple[str, ...]] = {
    SGD: (),
    Momentum: ("momentum_buffer",),
    Adagrad: ("sum",),
    RMSprop: ("square_avg",),
    Adam: ("exp_avg", "exp_avg_sq"),
    AdamW: ("exp_avg", "exp_avg_sq"),
}


def rule_of(optimizer: Optimizer, group: Mapping[str, Any]) -> UpdateRule:
    """Return the update rule that a server applies in an optimizer's stead to one of its parameter groups.

    It gives what the optimizer would give, to float32 rounding. Numbers may be tensors, as torch allows; how torch
    would compute (``foreach``, ``fused``, ``capturable``, ``differentiable``) does not matter.

    Raises UsageError for an optimizer that no rule does the same as (LBFGS, SparseAdam, a class with a step of its
    own), and for options that a rule does not have: the message names them.
    """
    step = inspect.unwrap(type(optimizer).step)
    for kind, make in _MAKERS:
        if isinstance(optimizer, kind) and step is inspect.unwrap(kind.step):
            return make(optimizer, group)
    what = type(optimizer).__name__
    has_own_step = any(isinstance(optimizer, kind) for kind, _ in _MAKERS)
    raise UsageError(
        f"optimizer {what} {'has a step of its own' if has_own_step else 'has no update rule'}, which servers and "
        f"tables of rows cannot apply: take one of {_POSSIBLE}, or a strategy that keeps no parameters on servers "
        "(all-reduce)"
    )


def _refuse(optimizer: Optimizer, group: Mapping[str, Any], *options: str) -> None:
    for option in (*options, "maximize"):
        value = group.get(option, False)
        if isinstance(value, Tensor):
            value = value.item()
        if value:
            raise UsageError(
                f"optimizer {type(optimizer).__name__} has {option}={value}, which the update rules of servers and of "
                f"tables of rows do not know: leave {option} out, or take a strategy that keeps no parameters on "
                f"servers (all-reduce); possible are {_POSSIBLE}, without {option}"
            )


def _sgd(optimizer: Optimizer, group: Mapping[str, Any]) -> UpdateRule:
    _refuse(optimizer, group, "dampening")
    lr, decay, momentum = float(group["lr"]), float(group["weight_decay"]), float(group["momentum"])
    if not momentum:
        return SGD(lr=lr, weight_decay=decay)
    return Momentum(lr=lr, weight_decay=decay, momentum=momentum, nesterov=bool(group["nesterov"]))


def _adagrad(optimizer: Optimizer, group: Mapping[str, Any]) -> UpdateRule:
    _refuse(optimizer, group, "lr_decay")
    return Adagrad(
        lr=float(group["lr"]),
        eps=float(group["eps"]),
        initial_accumulator=float(group["initial_accumulator_value"]),
        weight_decay=float(group["weight_decay"]),
    )


def _rmsprop(optimizer: Optimizer, group: Mapping[str, Any]) -> UpdateRule:
    _refuse(optimizer, group, "momentum", "centered")
    return RMSprop(
        lr=float(group["lr"]),
        alpha=float(group["alpha"]),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
    )


def _adam(optimizer: Optimizer, group: Mapping[str, Any]) -> UpdateRule:
    _refuse(optimizer, group, "amsgrad")
    # Newer versions of torch have AdamW as an Adam with this option, older ones as a class of its own.
    is_decoupled = group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW))
    first, second = group["betas"]
    return (AdamW if is_decoupled else Adam)(
        lr=float(group["lr"]),
        betas=(float(first), float(second)),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
    )


_MAKERS: tuple[tuple[type[Optimizer], Callable[[Optimizer, Mapping[str, Any]], UpdateRule]], ...] = (
    (torch.optim.SGD, _sgd),
    (torch.optim.Adagrad, _adagrad),
    (torch.optim.RMSprop, _rmsprop),
    (torch.optim.AdamW, _adam),
    (torch.optim.Adam, _adam),
)


def num_planes(rule: UpdateRule) -> int:
    """Return how many state planes a rule keeps beside the values of a dense table, its step count included."""
    return rule.num_states + rule.has_count


def state_to_torch(
    rule: UpdateRule, planes: npt.NDArray[np.float32], shape: Sequence[int], *, num_steps: int = 0
) -> dict[str, Any]:
    """Return a parameter's state as torch's optimizer keeps it, float32 tensors on the CPU.

    `planes` (float32 [num_planes, n]) are a table's, copied; `shape` is the parameter's. `num_steps` is what the
    optimizer's own count becomes where the rule has none: for Adagrad and RMSprop, whose updates do not depend on it.
    """
    names = _STATE_NAMES[type(rule)]
    state: dict[str, Any] = {
        name: torch.from_numpy(plane.reshape(tuple(shape)).copy()) for name, plane in zip(names, planes, strict=False)
    }
    if rule.has_count:
        # The elements of a parameter are updated together, so that their counts are equal.
        state["step"] = torch.tensor(float(planes[-1].max(initial=0)), dtype=torch.float32)
    elif isinstance(rule, (Adagrad, RMSprop)):
        state["step"] = torch.tensor(float(num_steps), dtype=torch.float32)
    return state


def state_from_torch(rule: UpdateRule, state: Mapping[str, Any], num_elements: int) -> npt.NDArray[np.float32]:
    """Return what torch's optimizer keeps for a parameter as state planes, float32 [num_planes, num_elements].

    What is not in `state` is as before the first update.
    """
    planes = np.zeros((num_planes(rule), num_elements), np.float32)
    if isinstance(rule, Adagrad):
        planes[0] = rule.initial_accumulator
    for plane, name in zip(planes, _STATE_NAMES[type(rule)], strict=False):
        found = state.get(name)
        if found is not None:
            plane[:] = found.detach().to("cpu", torch.float32).reshape(-1).numpy()
    if rule.has_count and "step" in state:
        planes[-1] = float(state["step"])
    return planes
