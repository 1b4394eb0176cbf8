"""References of the update rules in NumPy (readable and slow), and the cases that compare rules with references."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from paceline.tables.rules import (
    ASGD,
    FTRL,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Momentum,
    NAdam,
    ProximalNewton,
    RAdam,
    RMSprop,
    Rprop,
    UpdateRule,
)
from paceline.tables.rules.proximal import LEAST, MOST, START, proximal_step
from paceline.tables.types import Doubles, Floats

_F0, _F1, _F2 = np.float32(0), np.float32(1), np.float32(2)
_START, _LEAST, _MOST = np.float32(START), np.float32(LEAST), np.float32(MOST)
_LONG, _SHORT = np.float32(1e18), np.float32(1e-18)

Reference: TypeAlias = Callable[[Floats, "list[Floats]", Floats, Doubles, Doubles], None]
"""``(w, states, g, steps, hyper)``: updates values and states in place as :meth:`UpdateRule.update` does.

`g` is a copy of the gradients, with their sign; `steps` has the step of each element.
"""

_REFERENCES: Final[dict[type[UpdateRule], Reference]] = {}
_CASES: Final[dict[type[UpdateRule], Callable[[], dict[str, RuleCase]]]] = {}


def reference_of(rule: type[UpdateRule]) -> Callable[[Reference], Reference]:
    """Register the reference of a rule and its subclasses."""
    return lambda function: _REFERENCES.setdefault(rule, function)


def find_reference(rule: type[UpdateRule]) -> Reference:
    return next(_REFERENCES[kind] for kind in rule.__mro__ if kind in _REFERENCES)


def cases_of(rule: type[UpdateRule]) -> Callable[[Any], Any]:
    """Register the cases of a rule by their names; ``""`` is the plain case."""
    return lambda function: _CASES.setdefault(rule, function)


def find_cases(rule: type[UpdateRule]) -> dict[str, RuleCase]:
    return _CASES[rule]()


class RuleCase(NamedTuple):
    """Settings of a rule for tests (which compare the kernel with the reference) and for the benchmark."""

    rule: UpdateRule
    is_rare: bool = True
    """Whether the benchmark runs the case on few elements only, because its time matters little."""


def decayed(w: Floats, g: Floats, hyper: Doubles) -> Floats:
    """Return gradients with weight decay, which is the second hyperparameter of most rules."""
    result: Floats = g + np.float32(hyper[1]) * w
    return result


def update_moments(w: Floats, states: list[Floats], g: Floats, hyper: Doubles, *, is_decoupled: bool) -> Floats:
    """Apply weight decay and update both moments in NumPy; return the gradient, with decay unless decoupled."""
    if is_decoupled:
        w *= np.float32(1.0 - hyper[0] * hyper[1])
    else:
        g = decayed(w, g, hyper)
    first, second = states[:2]
    first += np.float32(1 - hyper[3]) * (g - first)
    second[:] = np.float32(hyper[4]) * second + np.float32(1 - hyper[4]) * g * g
    return g


def shrink(w: Floats, by: Floats | np.float32) -> None:
    """Apply :func:`shrunk` to each element of `w` in place, in NumPy."""
    w[:] = np.where(np.abs(w) <= by, _F0, w - np.copysign(by, w))


@reference_of(Adadelta)
def adadelta(w: Floats, states: list[Floats], g: Floats, steps: Doubles, hyper: Doubles) -> None:
    (square, changes), g = states, decayed(w, g, hyper)
    rate, _, epsilon, rho = hyper[:4].astype(np.float32)
    complement = np.float32(1 - hyper[3])
    square[:] = rho * square + complement * g * g
    change = np.sqrt(changes + epsilon) / np.sqrt(square + epsilon) * g
    changes[:] = rho * changes + complement * change * change
    w -= rate * change


@cases_of(Adadelta)
def adadelta_cases() -> dict[str, RuleCase]:
    return {"": RuleCase(Adadelta(weight_decay=0.01))}


@reference_of(Adagrad)
def adagrad(w: Floats, states: list[Floats], g: Floats, steps: Doubles, hyper: Doubles) -> None:
    (total,), g = states, decayed(w, g, hyper)
    total += g * g
    rates = (hyper[0] / (1 + (steps - 1) * hyper[4])).astype(np.float32)
    w -= rates * (g / (np.sqrt(total) + np.float32(hyper[2])))
    if hyper[5]:
        shrink(w, rates * np.float32(hyper[5]) / (np.sqrt(total) + np.float32(hyper[2])))


@cases_of(Adagrad)
def adagrad_cases() -> dict[str, RuleCase]:
    plain = Adagrad(lr=0.1, weight_decay=0.01, initial_accumulator=0.1)
    return {
        "": RuleCase(plain, is_rare=False),
        "lr_decay": RuleCase(dataclasses.replace(plain, lr_decay=0.2)),
        "l1": RuleCase(dataclasses.replace(plain, l1=0.5)),
    }


@reference_of(Adam)
def adam(w: Floats, states: list[Floats], g: Floats, steps: Doubles, hyper: Doubles) -> None:
    update_moments(w, states, g, hyper, is_decoupled=hyper[6] != 0.0)
    first, second, *greatest = states
    if greatest:
        greatest[0][:] = second = np.maximum(greatest[0], second)
    size = (hyper[0] / (1 - hyper[3] ** steps)).astype(np.float32)
    root = np.sqrt(1 - hyper[4] ** steps).astype(np.float32)
    w -= size * (first / (np.sqrt(second) / root + np.float32(hyper[2])))
    if hyper[7]:
        step_l1 = np.float32(hyper[0]) * np.float32(hyper[7])
        shrink(w, step_l1 / (np.sqrt(second) / root + np.float32(hyper[2])))


@cases_of(Adam)
def adam_cases() -> dict[str, RuleCase]:
    return {
        "": RuleCase(Adam(lr=0.01, weight_decay=0.01), is_rare=False),
        "amsgrad": RuleCase(Adam(lr=0.01, weight_decay=0.01, amsgrad=True, maximize=True)),
        "l1": RuleCase(Adam(lr=0.01, l1=0.5)),
        "amsgrad l1": RuleCase(Adam(lr=0.01, weight_decay=0.01, amsgrad=True, l1=0.5)),
    }


@cases_of(AdamW)
def adam_w_cases() -> dict[str, RuleCase]:
    return {"": RuleCase(AdamW(lr=0.01), is_rare=False), "l1": RuleCase(AdamW(lr=0.01, l1=0.5))}


@reference_of(Adamax)
def adamax(w: Floats, states: list[Floats], g: Floats, steps: Doubles, hyper: Doubles) -> None:
    (first, norm), g = states, decayed(w, g, hyper)
    first += np.float32(1 - hyper[3]) * (g - first)
    norm[:] = np.maximum(np.float32(hyper[4]) * norm, np.abs(g) + np.float32(hyper[2]))
    w -= (hyper[0] / (1 - hyper[3] ** steps)).astype(np.float32) * (first / norm)


@cases_of(Adamax)
def adamax_cases() -> dict[str, RuleCase]:
    return {"": RuleCase(Adamax(lr=0.01, weight_decay=0.01))}


@reference_of(ASGD)
def asgd(w: Floats, states: list[Floats], g: Floats, steps: Doubles, hyper: Doubles) -> None:
    (average, rates), g = states, decayed(w, g, hyper)
    rates[steps == 1] = hyper[0]
    w *= (1 - hyper[2] * rates.astype(np.float64)).astype(np.float32)
    w -= rates * g
    weight = np.where(steps == 1, 1, 1 / np.maximum(1, steps - 1 - hyper[4])).astype(np.float32)
    average[:] = np.where(weight == 1, w, average + (w - average) * weight)
    rates[:] = hyper[0] / (1 + hyper[2] * hyper[0] * steps) ** hyper[3]


@cases_of(ASGD)
def asgd_cases() -> dict[str, RuleCase]:
    return {"": RuleCase(ASGD(lr=0.1, weight_decay=0.01, lambd=0.01, t0=2.0))}


@reference_of(FTRL)
def ftrl(w: Floats, states: list[Floats], g: Floats, steps: Doubles, hyper: Doubles) -> None:
    z, n = states
    inverse, beta, l1, l2 = (np.float32(value) for value in (1 / hyper[0], hyper[1], hyper[2], hyper[3]))
    after = n + g * g
    z += g - (np.sqrt(after) - np.sqrt(n)) * inverse * w
    n[:] = after
    w[:] = np.where(np.abs(z) > l1, (np.copysign(l1, z) - z) / ((beta + np.sqrt(n)) * inverse + l2), np.float32(0))


@cases_of(FTRL)
def ftrl_cases() -> dict[str, RuleCase]:
    return {"": RuleCase(FTRL(l1=0.1, l2=0.2), is_rare=False)}


@reference_of(Momentum)
def momentum(w: Floats, states: list[Floats], g: Floats, steps: Doubles, hyper: Doubles) -> None:
    (velocity,), g = states, decayed(w, g, hyper)
    rate, _, momentum, nesterov, _ = hyper[:5].astype(np.float32)
    velocity[:] = momentum * velocity + np.where(steps == 1, 1, 1 - hyper[4]).astype(np.float32) * g
    w -= rate * (g + momentum * velocity if nesterov else velocity)


@cases_of(Momentum)
def momentum_cases() -> dict[str, RuleCase]:
    return {
        "": RuleCase(Momentum(lr=0.1, weight_decay=0.01, nesterov=True), is_rare=False),
        "dampening": RuleCase(Momentum(lr=0.1, weight_decay=0.01, dampening=0.5)),
    }


@reference_of(NAdam)
def nadam(w: Floats, states: list[Floats], g: Floats, steps: Doubles, hyper: Doubles) -> None:
    g = update_moments(w, states, g, hyper, is_decoupled=hyper[6] != 0.0)
    first, second, product = states
    rate, beta1 = hyper[0], hyper[3]
    mu, following = (beta1 * (1 - 0.5 * 0.96 ** (t * hyper[5])) for t in (steps, steps + 1))
    product[:] = np.where(steps == 1, np.float32(1), product) * mu.astype(np.float32)
    root = np.sqrt(second / (1 - hyper[4] ** steps).astype(np.float32)) + np.float32(hyper[2])
    w -= (rate * (1 - mu) / (1 - product.astype(np.float64))).astype(np.float32) * (g / root)
    w -= (rate * following / (1 - product * following)).astype(np.float32) * (first / root)


@cases_of(NAdam)
def nadam_cases() -> dict[str, RuleCase]:
    plain = NAdam(lr=0.01, weight_decay=0.01)
    decoupled = dataclasses.replace(plain, decoupled_weight_decay=True, maximize=True)
    return {"": RuleCase(plain), "decoupled": RuleCase(decoupled)}


@reference_of(ProximalNewton)
def proximal_newton(w: Floats, states: list[Floats], g: Floats, steps: Doubles, hyper: Doubles) -> None:
    (plane,), (gradient, curvature) = states, g
    if curvature < 0:
        w[:], plane[:] = (gradient, -curvature), 0
        return
    if curvature == 0:
        w[1] = gradient
        return
    if plane[0] == 0:
        unit = np.clip(np.abs(w[1] / w[0]), _SHORT, _LONG) if w.all() else _F1
        plane[:] = _START * unit, np.copysign(unit, w[0])
        w[0] = 0
    unit, has_penalty = np.abs(plane[1]), plane[1] > 0
    l1, l2 = hyper[:2].astype(np.float32) * has_penalty
    change = proximal_step(w[0], gradient, curvature, l1, l2)
    change = np.clip(change, -plane[0], plane[0])
    w[:] = w[0] + change, gradient
    plane[0] = np.minimum(_MOST * unit, _F2 * np.abs(change) + _LEAST * unit)


@cases_of(ProximalNewton)
def proximal_newton_cases() -> dict[str, RuleCase]:
    return {"": RuleCase(ProximalNewton(l1=0.5, l2=0.2))}


@reference_of(RAdam)
def radam(w: Floats, states: list[Floats], g: Floats, steps: Doubles, hyper: Doubles) -> None:
    update_moments(w, states, g, hyper, is_decoupled=hyper[5] != 0.0)
    first, second = states
    beta2 = hyper[4]
    correction1, correction2 = 1 - hyper[3] ** steps, 1 - beta2**steps
    most = 2 / (1 - beta2) - 1
    length = most - 2 * steps * beta2**steps / correction2
    rectified = (length - 4) * (length - 2) * most / ((most - 4) * (most - 2) * length)
    change = first / correction1.astype(np.float32) * np.float32(hyper[0])
    adapted = np.sqrt(correction2).astype(np.float32) / (np.sqrt(second) + np.float32(hyper[2]))
    w -= np.where(length > 5, change * adapted * np.sqrt(rectified).astype(np.float32), change)


@cases_of(RAdam)
def radam_cases() -> dict[str, RuleCase]:
    plain = RAdam(lr=0.01, weight_decay=0.01)
    decoupled = dataclasses.replace(plain, decoupled_weight_decay=True, maximize=True)
    return {"": RuleCase(plain), "decoupled": RuleCase(decoupled)}


@reference_of(RMSprop)
def rmsprop(w: Floats, states: list[Floats], g: Floats, steps: Doubles, hyper: Doubles) -> None:
    g, complement = decayed(w, g, hyper), np.float32(1 - hyper[3])
    rate, _, epsilon, alpha, momentum, centered = hyper[:6].astype(np.float32)
    square = states[0]
    square[:] = alpha * square + complement * g * g
    middle = states[-1] if centered else np.zeros_like(g)
    if centered:
        middle += complement * (g - middle)
    g = g / (np.sqrt(square - middle * middle) + epsilon)
    if momentum:
        states[1][:] = g = momentum * states[1] + g
    w -= rate * g


@cases_of(RMSprop)
def rmsprop_cases() -> dict[str, RuleCase]:
    plain = RMSprop(lr=0.01, weight_decay=0.01)
    return {
        "": RuleCase(plain, is_rare=False),
        "momentum": RuleCase(dataclasses.replace(plain, momentum=0.9)),
        "centered": RuleCase(dataclasses.replace(plain, centered=True)),
        "both": RuleCase(dataclasses.replace(plain, momentum=0.9, centered=True, maximize=True)),
    }


@reference_of(Rprop)
def rprop(w: Floats, states: list[Floats], g: Floats, steps: Doubles, hyper: Doubles) -> None:
    before, sizes = states
    shrink, grow, least, most = hyper[1:5].astype(np.float32)
    sizes[steps == 1] = hyper[0]
    agreement = np.sign(g * before)
    sizes *= np.select([agreement > 0, agreement < 0], [grow, shrink], np.float32(1))
    np.clip(sizes, least, most, out=sizes)
    before[:] = np.where(agreement < 0, 0, g)
    w -= np.sign(before) * sizes


@cases_of(Rprop)
def rprop_cases() -> dict[str, RuleCase]:
    return {"": RuleCase(Rprop(lr=0.01))}


@reference_of(SGD)
def sgd(w: Floats, states: list[Floats], g: Floats, steps: Doubles, hyper: Doubles) -> None:
    w -= np.float32(hyper[0]) * decayed(w, g, hyper)
    if hyper[2]:
        shrink(w, np.float32(np.float32(hyper[0]) * np.float32(hyper[2])))


@cases_of(SGD)
def sgd_cases() -> dict[str, RuleCase]:
    return {
        "": RuleCase(SGD(lr=0.1, weight_decay=0.01), is_rare=False),
        "maximize": RuleCase(SGD(lr=0.1, weight_decay=0.01, maximize=True)),
        "l1": RuleCase(SGD(lr=0.1, l1=0.5)),
    }
