"""The update rules' twins in NumPy: what :mod:`.rules` and :mod:`.counted_rules` must compute, readable and slow."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from .rules import (
    ADADELTA,
    ADAGRAD,
    ADAM,
    ADAMAX,
    ADAMW,
    ASGD,
    FTRL,
    MAXIMIZE,
    MOMENTUM,
    NADAM,
    RADAM,
    RMSPROP,
    RPROP,
    SGD,
)

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]


def update_record(
    rule: int,
    record: Floats,
    dim: int,
    start: int,
    stop: int,
    grads: Floats,
    at: int,
    hyper: Doubles,
    per_element: bool,
) -> None:
    """Apply the gradients ``grads[at : at + stop - start]`` to elements ``[start, stop)`` of a record."""
    w, *states = (record[plane + start : plane + stop] for plane in range(0, max(dim, len(record) - dim + 1), dim))
    g = grads[at : at + stop - start].copy()
    if rule == FTRL:
        _ftrl(w, states[0], states[1], g, hyper)
        return
    steps = np.ones(len(w))
    if rule in _COUNTED or (rule in (MOMENTUM, ADAGRAD) and hyper[4]):
        count = states.pop() if per_element or dim == 1 else record[-1:]
        count += np.float32(1)
        steps = steps * count
    if hyper[MAXIMIZE]:
        g = -g
    decouples = {ADAMW: True, NADAM: bool(hyper[6]), RADAM: bool(hyper[5]), RPROP: True}
    if not decouples.get(rule, False):
        g += np.float32(hyper[1]) * w
    elif rule != RPROP:
        w *= np.float32(1.0 - hyper[0] * hyper[1])
    with np.errstate(divide="ignore", invalid="ignore"):
        if rule in _MOMENTS:
            _moments(rule, w, states, steps, g, hyper)
        else:
            _others(rule, w, states, steps, g, hyper)


_MOMENTS = (ADAM, ADAMW, ADAMAX, NADAM, RADAM)
_COUNTED = (*_MOMENTS, ASGD, RPROP)


def _others(rule: int, w: Floats, states: list[Floats], steps: Doubles, g: Floats, hyper: Doubles) -> None:
    single = hyper.astype(np.float32)
    if rule == SGD:
        w -= single[0] * g
    elif rule == MOMENTUM:
        (velocity,) = states
        velocity[:] = single[2] * velocity + np.where(steps == 1, 1, 1 - hyper[4]).astype(np.float32) * g
        w -= single[0] * (g + single[2] * velocity if hyper[3] else velocity)
    elif rule == ADAGRAD:
        (total,) = states
        total += g * g
        w -= (hyper[0] / (1 + (steps - 1) * hyper[4])).astype(np.float32) * (g / (np.sqrt(total) + single[2]))
    elif rule == RMSPROP:
        square, rest = states[0], np.float32(1 - hyper[3])
        square[:] = single[3] * square + rest * g * g
        middle = states[-1] if hyper[5] else np.zeros_like(g)
        if hyper[5]:
            middle += rest * (g - middle)
        g = g / (np.sqrt(square - middle * middle) + single[2])
        if hyper[4]:
            states[1][:] = g = single[4] * states[1] + g
        w -= single[0] * g
    elif rule == ADADELTA:
        square, changes = states
        rest = np.float32(1 - hyper[3])
        square[:] = single[3] * square + rest * g * g
        change = np.sqrt(changes + single[2]) / np.sqrt(square + single[2]) * g
        changes[:] = single[3] * changes + rest * change * change
        w -= single[0] * change
    elif rule == ASGD:
        average, rates = states
        rates[steps == 1] = hyper[0]
        w *= (1 - hyper[2] * rates.astype(np.float64)).astype(np.float32)
        w -= rates * g
        weight = np.where(steps == 1, 1, 1 / np.maximum(1, steps - 1 - hyper[4])).astype(np.float32)
        average[:] = np.where(weight == 1, w, average + (w - average) * weight)
        rates[:] = hyper[0] / (1 + hyper[2] * hyper[0] * steps) ** hyper[3]
    elif rule == RPROP:
        before, sizes = states
        sizes[steps == 1] = hyper[0]
        agreement = np.sign(g * before)
        sizes *= np.select([agreement > 0, agreement < 0], [single[2], single[1]], np.float32(1))
        np.clip(sizes, single[3], single[4], out=sizes)
        before[:] = np.where(agreement < 0, 0, g)
        w -= np.sign(before) * sizes


def _moments(rule: int, w: Floats, states: list[Floats], steps: Doubles, g: Floats, hyper: Doubles) -> None:
    first, second, *more = states
    rate, epsilon, beta1, beta2 = hyper[0], np.float32(hyper[2]), hyper[3], hyper[4]
    first += np.float32(1 - beta1) * (g - first)
    correction1, correction2 = 1 - beta1**steps, 1 - beta2**steps
    if rule == ADAMAX:
        second[:] = np.maximum(np.float32(beta2) * second, np.abs(g) + epsilon)
        w -= (rate / correction1).astype(np.float32) * (first / second)
        return
    second[:] = np.float32(beta2) * second + np.float32(1 - beta2) * g * g
    if rule == NADAM:
        (product,) = more
        mu, following = (beta1 * (1 - 0.5 * 0.96 ** (t * hyper[5])) for t in (steps, steps + 1))
        product[:] = np.where(steps == 1, np.float32(1), product) * mu.astype(np.float32)
        root = np.sqrt(second / correction2.astype(np.float32)) + epsilon
        w -= (rate * (1 - mu) / (1 - product.astype(np.float64))).astype(np.float32) * (g / root)
        w -= (rate * following / (1 - product * following)).astype(np.float32) * (first / root)
    elif rule == RADAM:
        most = 2 / (1 - beta2) - 1
        length = most - 2 * steps * beta2**steps / correction2
        rectified = (length - 4) * (length - 2) * most / ((most - 4) * (most - 2) * length)
        change = first / correction1.astype(np.float32) * np.float32(rate)
        adapted = np.sqrt(correction2).astype(np.float32) / (np.sqrt(second) + epsilon)
        w -= np.where(length > 5, change * adapted * np.sqrt(rectified).astype(np.float32), change)
    else:
        if hyper[5]:
            more[0][:] = second = np.maximum(more[0], second)
        size, root = (rate / correction1).astype(np.float32), np.sqrt(correction2).astype(np.float32)
        w -= size * (first / (np.sqrt(second) / root + epsilon))


def _ftrl(w: Floats, z: Floats, n: Floats, g: Floats, hyper: Doubles) -> None:
    inverse, beta, l1, l2 = (np.float32(value) for value in (1 / hyper[0], hyper[1], hyper[2], hyper[3]))
    after = n + g * g
    z += g - (np.sqrt(after) - np.sqrt(n)) * inverse * w
    n[:] = after
    w[:] = np.where(np.abs(z) > l1, (np.copysign(l1, z) - z) / ((beta + np.sqrt(n)) * inverse + l2), np.float32(0))


def ftrl_float64(gradients: Doubles, alpha: float, beta: float, l1: float, l2: float, start: float = 0.0) -> Doubles:
    """Return the weight after each gradient, by McMahan et al., KDD 2013, algorithm 1, in float64.

    `start`, the weight before the first, is not of the paper: z starts where it gives that weight.
    """
    z, n, weights = 0.0, 0.0, []
    if start:
        z = -start * (beta / alpha + l2) - math.copysign(l1, start)
    for g in gradients.tolist():
        w = 0.0 if abs(z) <= l1 else -(z - math.copysign(l1, z)) / ((beta + math.sqrt(n)) / alpha + l2)
        sigma = (math.sqrt(n + g * g) - math.sqrt(n)) / alpha
        z += g - sigma * w
        n += g * g
        weights.append(0.0 if abs(z) <= l1 else -(z - math.copysign(l1, z)) / ((beta + math.sqrt(n)) / alpha + l2))
    return np.array(weights, np.float64)


def start_state(rule: int, record: Floats, words: int, dim: int, start: int, stop: int, hyper: Doubles) -> None:
    """Set the state of elements ``[start, stop)``, whose values are set, to that of no updates yet."""
    for plane in range(dim, words, dim):
        record[plane + start : min(plane + stop, words)] = 0
    w, first = record[start:stop], record[dim + start : dim + stop]
    if rule == ADAGRAD:
        first[:] = hyper[3]
    elif rule == FTRL:
        z = -w * np.float32(hyper[1] / hyper[0] + hyper[3]) - np.copysign(np.float32(hyper[2]), w)
        first[:] = np.where(w != 0, z, np.float32(0))
