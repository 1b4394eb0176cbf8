"""Update rules whose step depends on how many came before: the Adam family, averaged SGD, Rprop.

Each is one function on elements ``[start, stop)`` of a *record* (see :mod:`.rules`) that have had the same number of
updates; `step` counts this one too, and `sign` is -1 where the rule ascends. States are zero before the first step.

Sources: Adam (Kingma & Ba, ICLR 2015); AMSGrad (Reddi et al., ICLR 2018); AdamW (Loshchilov & Hutter, ICLR 2019);
Adamax (Kingma & Ba, section 7.1); NAdam (Dozat, ICLR workshop 2016); RAdam (Liu et al., ICLR 2020); averaged SGD
(Polyak & Juditsky, 1992); Rprop (Riedmiller & Braun, 1993); all as ``torch.optim`` has them.
"""

from __future__ import annotations

import numpy as np

from .jit import njit

_F0, _F1 = np.float32(0), np.float32(1)


@njit(cache=True, nogil=True, error_model="numpy", forceinline=True)
def adam(record, dim, start, stop, grads, at, hyper, sign, step, decoupled, amsgrad):  # type: ignore[no-untyped-def]
    """State: first moment, second moment, and for AMSGrad the greatest second moment."""
    decay, epsilon = np.float32(0.0 if decoupled else hyper[1]), np.float32(hyper[2])
    shrink = np.float32(1.0 - hyper[0] * hyper[1]) if decoupled else _F1
    rest1, beta2, rest2 = np.float32(1.0 - hyper[3]), np.float32(hyper[4]), np.float32(1.0 - hyper[4])
    size = np.float32(hyper[0] / (1.0 - hyper[3] ** step))
    root = np.float32(np.sqrt(1.0 - hyper[4] ** step))
    first, second, greatest = dim, 2 * dim, 3 * dim
    for j in range(start, stop):
        value = record[j] * shrink
        gradient = sign * grads[at + j - start] + decay * value
        moment = record[first + j] + rest1 * (gradient - record[first + j])
        square = beta2 * record[second + j] + rest2 * gradient * gradient
        record[first + j] = moment
        record[second + j] = square
        if amsgrad:
            square = max(record[greatest + j], square)
            record[greatest + j] = square
        record[j] = value - size * (moment / (np.sqrt(square) / root + epsilon))


@njit(cache=True, nogil=True, error_model="numpy", forceinline=True)
def adamax(record, dim, start, stop, grads, at, hyper, sign, step):  # type: ignore[no-untyped-def]
    """State: first moment, decayed infinity norm."""
    decay, epsilon = np.float32(hyper[1]), np.float32(hyper[2])
    rest1, beta2 = np.float32(1.0 - hyper[3]), np.float32(hyper[4])
    size = np.float32(hyper[0] / (1.0 - hyper[3] ** step))
    for j in range(start, stop):
        gradient = sign * grads[at + j - start] + decay * record[j]
        moment = record[dim + j] + rest1 * (gradient - record[dim + j])
        norm = max(beta2 * record[2 * dim + j], abs(gradient) + epsilon)
        record[dim + j] = moment
        record[2 * dim + j] = norm
        record[j] -= size * (moment / norm)


@njit(cache=True, nogil=True, error_model="numpy", forceinline=True)
def nadam(record, dim, start, stop, grads, at, hyper, sign, step):  # type: ignore[no-untyped-def]
    """State: first moment, second moment, product of the momenta so far."""
    decoupled = hyper[6] != 0.0
    decay, epsilon = np.float32(0.0 if decoupled else hyper[1]), np.float32(hyper[2])
    shrink = np.float32(1.0 - hyper[0] * hyper[1]) if decoupled else _F1
    rest1, beta2, rest2 = np.float32(1.0 - hyper[3]), np.float32(hyper[4]), np.float32(1.0 - hyper[4])
    correction = np.float32(1.0 - hyper[4] ** step)
    momentum = hyper[3] * (1.0 - 0.5 * 0.96 ** (step * hyper[5]))
    following = hyper[3] * (1.0 - 0.5 * 0.96 ** ((step + 1.0) * hyper[5]))
    for j in range(start, stop):
        value = record[j] * shrink
        gradient = sign * grads[at + j - start] + decay * value
        moment = record[dim + j] + rest1 * (gradient - record[dim + j])
        square = beta2 * record[2 * dim + j] + rest2 * gradient * gradient
        product = (_F1 if step == 1.0 else record[3 * dim + j]) * np.float32(momentum)
        record[dim + j] = moment
        record[2 * dim + j] = square
        record[3 * dim + j] = product
        root = np.sqrt(square / correction) + epsilon
        now = np.float32(hyper[0] * (1.0 - momentum) / (1.0 - np.float64(product)))
        ahead = np.float32(hyper[0] * following / (1.0 - np.float64(product) * following))
        record[j] = value - now * (gradient / root) - ahead * (moment / root)


@njit(cache=True, nogil=True, error_model="numpy", forceinline=True)
def radam(record, dim, start, stop, grads, at, hyper, sign, step):  # type: ignore[no-untyped-def]
    """State: first moment, second moment."""
    decoupled = hyper[5] != 0.0
    decay, epsilon = np.float32(0.0 if decoupled else hyper[1]), np.float32(hyper[2])
    shrink = np.float32(1.0 - hyper[0] * hyper[1]) if decoupled else _F1
    rest1, beta2, rest2 = np.float32(1.0 - hyper[3]), np.float32(hyper[4]), np.float32(1.0 - hyper[4])
    correction1, correction2 = np.float32(1.0 - hyper[3] ** step), 1.0 - hyper[4] ** step
    most = 2.0 / (1.0 - hyper[4]) - 1.0
    length = most - 2.0 * step * hyper[4] ** step / correction2
    is_rectified = length > 5.0
    rate, root, rectification = np.float32(hyper[0]), _F1, _F1
    if is_rectified:
        ratio = (length - 4.0) * (length - 2.0) * most / ((most - 4.0) * (most - 2.0) * length)
        root, rectification = np.float32(np.sqrt(correction2)), np.float32(np.sqrt(ratio))
    for j in range(start, stop):
        value = record[j] * shrink
        gradient = sign * grads[at + j - start] + decay * value
        moment = record[dim + j] + rest1 * (gradient - record[dim + j])
        square = beta2 * record[2 * dim + j] + rest2 * gradient * gradient
        record[dim + j] = moment
        record[2 * dim + j] = square
        change = moment / correction1 * rate
        if is_rectified:
            change = change * (root / (np.sqrt(square) + epsilon)) * rectification
        record[j] = value - change


@njit(cache=True, nogil=True, error_model="numpy", forceinline=True)
def asgd(record, dim, start, stop, grads, at, hyper, sign, step):  # type: ignore[no-untyped-def]
    """State: average of the values, the rate of the next step."""
    decay = np.float32(hyper[1])
    weight = np.float32(1.0 if step == 1.0 else 1.0 / max(1.0, step - 1.0 - hyper[4]))
    following = np.float32(hyper[0] / (1.0 + hyper[2] * hyper[0] * step) ** hyper[3])
    for j in range(start, stop):
        gradient = sign * grads[at + j - start] + decay * record[j]
        rate = np.float32(hyper[0]) if step == 1.0 else record[2 * dim + j]
        value = record[j] * np.float32(1.0 - hyper[2] * np.float64(rate)) - rate * gradient
        average = record[dim + j]
        record[j] = value
        record[dim + j] = value if weight == _F1 else average + (value - average) * weight
        record[2 * dim + j] = following


@njit(cache=True, nogil=True, error_model="numpy", forceinline=True)
def rprop(record, dim, start, stop, grads, at, hyper, sign, step):  # type: ignore[no-untyped-def]
    """State: the gradient before, or zero where the sign changed; the size of the step."""
    shrink, grow = np.float32(hyper[1]), np.float32(hyper[2])
    least, most = np.float32(hyper[3]), np.float32(hyper[4])
    for j in range(start, stop):
        gradient = sign * grads[at + j - start]
        size = np.float32(hyper[0]) if step == 1.0 else record[2 * dim + j]
        agreement = gradient * record[dim + j]
        if agreement > _F0:
            size *= grow
        elif agreement < _F0:
            size *= shrink
            gradient = _F0
        size = min(max(size, least), most)
        record[dim + j] = gradient
        record[2 * dim + j] = size
        record[j] -= np.sign(gradient) * size
