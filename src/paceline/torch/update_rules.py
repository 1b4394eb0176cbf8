"""Convert ``torch.optim`` optimizers to equivalent update rules, and convert their states in both directions."""

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

_Maker = Callable[[Optimizer, Mapping[str, Any]], UpdateRule]
_POSSIBLE = (
    "torch.optim's SGD, Adagrad, RMSprop, Adadelta, Adam, AdamW, Adamax, NAdam, RAdam, ASGD and Rprop, with all options"
)
_SCALARS = ("mu_product", "eta")
"""States that have one number per parameter in torch, but one number per element in a table."""


def rule_of(optimizer: Optimizer, group: Mapping[str, Any]) -> UpdateRule:
    """Return the update rule that has the same effect as an optimizer on one of its parameter groups.

    The results differ only by float32 rounding. Hyperparameters may be tensors, as in torch. Options that only select
    torch's implementation (``foreach``, ``fused``, ``capturable``, ``differentiable``) are ignored.

    Raises UsageError for an optimizer without an equivalent rule: one that does not update each element separately
    (Adafactor, LBFGS, Muon), needs sparse gradients, or is not from torch. The message lists the supported optimizers.
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
    """Return an optimizer's `step` function, without the wrappers of torch and of torch's schedulers."""
    own = vars(optimizer).get("step")
    if own is not None and not hasattr(own, "_wrapped_by_lr_sched"):
        return own  # the program has replaced `step`
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


def _adam(optimizer: Optimizer, group: Mapping[str, Any]) -> UpdateRule:
    # In newer versions of torch, AdamW is a subclass of Adam with this option. In older versions, it is separate.
    is_decoupled = group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW))
    return _same_options(AdamW if is_decoupled else Adam, _MOMENTS, "maximize amsgrad", "betas")(optimizer, group)


def _same_options(kind: Callable[..., UpdateRule], numbers: str, flags: str = "maximize", pairs: str = "") -> _Maker:
    """Return a function that creates a rule from an optimizer's options. The texts list the options' names in torch."""

    def make(optimizer: Optimizer, group: Mapping[str, Any]) -> UpdateRule:
        of_pairs = {name: tuple(map(float, group[name])) for name in pairs.split()}
        return kind(**_number(group, numbers), **_is_set(group, flags), **of_pairs)

    return make


_MOMENTS = "lr eps weight_decay"
_MAKERS: tuple[tuple[type[Optimizer], _Maker], ...] = (
    (torch.optim.SGD, _sgd),
    (torch.optim.Adagrad, _adagrad),
    (torch.optim.RMSprop, _same_options(RMSprop, "lr alpha eps weight_decay momentum", "centered maximize")),
    (torch.optim.Adadelta, _same_options(Adadelta, "lr rho eps weight_decay")),
    (torch.optim.AdamW, _adam),
    (torch.optim.Adam, _adam),
    (torch.optim.Adamax, _same_options(Adamax, _MOMENTS, pairs="betas")),
    (torch.optim.NAdam, _same_options(NAdam, f"{_MOMENTS} momentum_decay", "maximize decoupled_weight_decay", "betas")),
    (torch.optim.RAdam, _same_options(RAdam, _MOMENTS, "maximize decoupled_weight_decay", "betas")),
    (torch.optim.ASGD, _same_options(ASGD, "lr lambd alpha t0 weight_decay")),
    (torch.optim.Rprop, _same_options(Rprop, "lr", pairs="etas step_sizes")),
)


def num_planes(rule: UpdateRule) -> int:
    """Return the number of state planes of a rule in a dense table: one per state, and one for a step count."""
    return rule.num_states + rule.has_count


def state_to_torch(
    rule: UpdateRule, planes: npt.NDArray[np.float32], shape: Sequence[int], *, num_steps: int = 0
) -> dict[str, Any]:
    """Return a parameter's state in torch's form, as float32 tensors on the CPU; empty before the first step.

    `planes` is float32 [num_planes, n]. `num_steps` is the step count for rules that store no count in the table.
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
    """Convert a state in torch's form to float32 [num_planes, num_elements]. Missing states get initial values."""
    planes = np.zeros((num_planes(rule), num_elements), np.float32)
    if isinstance(rule, Adagrad):
        planes[0] = rule.initial_accumulator
    for plane, name in zip(planes, rule.states, strict=False):
        found = state.get(name)
        if found is not None:
            plane[:] = found.detach().to("cpu", torch.float32).reshape(-1).numpy()
            if isinstance(rule, Momentum) and rule.has_count:
                # torch stores no step count. Any count above 0 has the same effect, because only the first step, which
                # has no dampening, is different.
                planes[-1] = 1
    if rule.has_count and "step" in state:
        planes[-1] = float(state["step"])
    return planes
