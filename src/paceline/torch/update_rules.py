"""Convert ``torch.optim`` optimizers to equivalent update rules of servers, and their states in both directions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.optim import Optimizer

from paceline.errors import UsageError
from paceline.ps import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Momentum,
    NAdam,
    RAdam,
    RMSprop,
    Rprop,
    UpdateRule,
)

_POSSIBLE = (
    "torch.optim's SGD, Adagrad, RMSprop, Adadelta, Adam, AdamW, Adamax, NAdam, RAdam, ASGD and Rprop, with all options"
)
_SCALARS = ("mu_product", "eta")
"""States that are one number per parameter in torch, but one per element in a table."""


def rule_of(optimizer: Optimizer, group: Mapping[str, Any]) -> UpdateRule:
    """Return the update rule that has the same effect as an optimizer on one of its parameter groups.

    The results are equal to float32 rounding. Numbers may be tensors, as in torch; options of torch's computation
    (``foreach``, ``fused``, ``capturable``, ``differentiable``) are ignored.

    Raises UsageError for an optimizer without an equivalent rule, because it does not update each element separately
    (Adafactor, LBFGS, Muon), needs sparse gradients, or is not torch's; the message lists the supported ones.
    """
    step = _plain_step(optimizer)
    for kind, make in _MAKERS:
        if isinstance(optimizer, kind) and step is inspect.unwrap(kind.step):
            return make(optimizer, group)
    raise UsageError(
        f"optimizer {type(optimizer).__name__} {_obstacle(optimizer)}, so servers and tables of rows, which hold "
        f"pieces of parameters, cannot apply it: use one of {_POSSIBLE}, or a strategy without parameters on servers "
        "(all-reduce)"
    )


def _plain_step(optimizer: Optimizer) -> Any:
    """Return the function of an optimizer's steps, without the wrappers of torch and its schedulers."""
    own = vars(optimizer).get("step")
    if own is not None and not hasattr(own, "_wrapped_by_lr_sched"):
        return own  # the program has replaced it
    return inspect.unwrap(type(optimizer).step if own is None else own)


def _obstacle(optimizer: Optimizer) -> str:
    if any(isinstance(optimizer, kind) for kind, _ in _MAKERS):
        return "has a step of its own"
    if type(optimizer).__name__ in ("Adafactor", "LBFGS", "Muon"):
        return "computes with complete parameters instead of single elements"
    if isinstance(optimizer, torch.optim.SparseAdam):
        return "supports only sparse gradients"
    return "has no update rule"


def _number(group: Mapping[str, Any], names: str) -> dict[str, Any]:
    return {name: float(group[name]) for name in names.split()}


def _is_set(group: Mapping[str, Any], names: str) -> dict[str, Any]:
    return {name: bool(group.get(name, False)) for name in names.split()}


def _pair(group: Mapping[str, Any], name: str) -> dict[str, Any]:
    first, second = group[name]
    return {name: (float(first), float(second))}


def _sgd(optimizer: Optimizer, group: Mapping[str, Any]) -> UpdateRule:
    common: dict[str, Any] = {**_number(group, "lr weight_decay"), **_is_set(group, "maximize")}
    if not group["momentum"]:
        return SGD(**common)
    return Momentum(**common, **_number(group, "momentum dampening"), **_is_set(group, "nesterov"))


def _adagrad(optimizer: Optimizer, group: Mapping[str, Any]) -> UpdateRule:
    return Adagrad(
        **_number(group, "lr eps weight_decay lr_decay"),
        initial_accumulator=float(group["initial_accumulator_value"]),
        **_is_set(group, "maximize"),
    )


def _rmsprop(optimizer: Optimizer, group: Mapping[str, Any]) -> UpdateRule:
    return RMSprop(**_number(group, "lr alpha eps weight_decay momentum"), **_is_set(group, "centered maximize"))


def _adadelta(optimizer: Optimizer, group: Mapping[str, Any]) -> UpdateRule:
    return Adadelta(**_number(group, "lr rho eps weight_decay"), **_is_set(group, "maximize"))


def _moments(group: Mapping[str, Any]) -> dict[str, Any]:
    return {**_number(group, "lr eps weight_decay"), **_pair(group, "betas"), **_is_set(group, "maximize")}


def _adam(optimizer: Optimizer, group: Mapping[str, Any]) -> UpdateRule:
    # AdamW is an Adam with this option in newer versions of torch, and a separate class in older ones.
    is_decoupled = group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW))
    return (AdamW if is_decoupled else Adam)(**_moments(group), **_is_set(group, "amsgrad"))


def _adamax(optimizer: Optimizer, group: Mapping[str, Any]) -> UpdateRule:
    return Adamax(**_moments(group))


def _nadam(optimizer: Optimizer, group: Mapping[str, Any]) -> UpdateRule:
    return NAdam(**_moments(group), **_number(group, "momentum_decay"), **_is_set(group, "decoupled_weight_decay"))


def _radam(optimizer: Optimizer, group: Mapping[str, Any]) -> UpdateRule:
    return RAdam(**_moments(group), **_is_set(group, "decoupled_weight_decay"))


def _asgd(optimizer: Optimizer, group: Mapping[str, Any]) -> UpdateRule:
    return ASGD(**_number(group, "lr lambd alpha t0 weight_decay"), **_is_set(group, "maximize"))


def _rprop(optimizer: Optimizer, group: Mapping[str, Any]) -> UpdateRule:
    pairs = {**_pair(group, "etas"), **_pair(group, "step_sizes")}
    return Rprop(**_number(group, "lr"), **pairs, **_is_set(group, "maximize"))


_MAKERS: tuple[tuple[type[Optimizer], Callable[[Optimizer, Mapping[str, Any]], UpdateRule]], ...] = (
    (torch.optim.SGD, _sgd),
    (torch.optim.Adagrad, _adagrad),
    (torch.optim.RMSprop, _rmsprop),
    (torch.optim.Adadelta, _adadelta),
    (torch.optim.AdamW, _adam),
    (torch.optim.Adam, _adam),
    (torch.optim.Adamax, _adamax),
    (torch.optim.NAdam, _nadam),
    (torch.optim.RAdam, _radam),
    (torch.optim.ASGD, _asgd),
    (torch.optim.Rprop, _rprop),
)


def num_planes(rule: UpdateRule) -> int:
    """Return the number of a rule's state planes in a dense table, in addition to the values, step count included."""
    return rule.num_states + rule.has_count


def state_to_torch(
    rule: UpdateRule, planes: npt.NDArray[np.float32], shape: Sequence[int], *, num_steps: int = 0
) -> dict[str, Any]:
    """Return a parameter's state as in torch's optimizer, float32 tensors on the CPU; empty before a step.

    `planes` is float32 [num_planes, n]. `num_steps` serves rules whose updates do not depend on a step count.
    """
    # All elements of a parameter are updated together, so their counts are equal.
    count = float(planes[-1].max(initial=0)) if rule.has_count else float(num_steps)
    if rule.has_count and not count:
        return {}
    state: dict[str, Any] = {
        name: torch.tensor(plane[0]) if name in _SCALARS else torch.from_numpy(plane.reshape(tuple(shape)).copy())
        for name, plane in zip(rule.states, planes, strict=False)
    }
    if isinstance(rule, ASGD):
        state["mu"] = torch.tensor(1.0 / max(1.0, count - rule.t0), dtype=torch.float32)
    if not isinstance(rule, (SGD, Momentum)):
        state["step"] = torch.tensor(count, dtype=torch.float32)
    return state


def state_from_torch(rule: UpdateRule, state: Mapping[str, Any], num_elements: int) -> npt.NDArray[np.float32]:
    """Return a parameter's torch state as planes, float32 [num_planes, num_elements]; missing states are initial."""
    planes = np.zeros((num_planes(rule), num_elements), np.float32)
    if isinstance(rule, Adagrad):
        planes[0] = rule.initial_accumulator
    for plane, name in zip(planes, rule.states, strict=False):
        found = state.get(name)
        if found is not None:
            plane[:] = found.detach().to("cpu", torch.float32).reshape(-1).numpy()
            if isinstance(rule, Momentum) and rule.has_count:
                planes[-1] = 1  # torch keeps no count: a velocity means at least one step
    if rule.has_count and "step" in state:
        planes[-1] = float(state["step"])
    return planes
