"""Update rules: what a server does to a row when a gradient arrives.

A rule is one function on one *record*: a float32 view that holds the values first, then the state planes,
each `dim` long, and a step count last where the rule has one. A sparse row is a record of its own; a dense
table is a single long one, updated on ``[start, stop)``. All arithmetic is float32, in the order of
``torch.optim``'s single-tensor code, so that results agree to 1e-6 over 100 steps. To add a rule, see
docs/extending.md; those that count their steps are in :mod:`.counted_rules`.

Sources: SGD, momentum and Nesterov as ``torch.optim.SGD`` (Sutskever et al., ICML 2013); Adagrad (Duchi et
al., JMLR 2011); RMSprop (Hinton, lecture 6e), centered (Graves, arXiv:1308.0850); Adadelta (Zeiler, arXiv:1212.5701);
FTRL-proximal (McMahan et al., KDD 2013, algorithm 1).
"""

from __future__ import annotations

import numpy as np

from .counted_rules import adam, adamax, asgd, nadam, radam, rprop
from .jit import njit

SGD, MOMENTUM, ADAGRAD, RMSPROP, ADAM, ADAMW, FTRL, ADADELTA, ADAMAX, NADAM, RADAM, ASGD, RPROP = range(13)

# The parameter array of a table, float64 (so that 1 - beta**step is exact): a rule's hyperparameters, of which the last
# says whether it ascends, then the initializer's two.
NUM_HYPER = 8
MAXIMIZE = 7
INITIAL_A, INITIAL_B = 8, 9
NUM_PARAMETERS = 10

_F0, _F1 = np.float32(0), np.float32(1)


@njit(cache=True, nogil=True, error_model="numpy", forceinline=True)
def _sgd(record, start, stop, grads, at, hyper, sign):  # type: ignore[no-untyped-def]
    rate, decay = np.float32(hyper[0]), np.float32(hyper[1])
    for j in range(start, stop):
        gradient = sign * grads[at + j - start] + decay * record[j]
        record[j] -= rate * gradient


@njit(cache=True, nogil=True, error_model="numpy", forceinline=True)
def _momentum(record, dim, start, stop, grads, at, hyper, sign, rest):  # type: ignore[no-untyped-def]
    """State: velocity, to which `rest` of a gradient is added."""
    rate, decay, momentum = np.float32(hyper[0]), np.float32(hyper[1]), np.float32(hyper[2])
    nesterov = hyper[3] != 0.0
    for j in range(start, stop):
        gradient = sign * grads[at + j - start] + decay * record[j]
        velocity = momentum * record[dim + j] + rest * gradient
        record[dim + j] = velocity
        record[j] -= rate * (gradient + momentum * velocity if nesterov else velocity)


@njit(cache=True, nogil=True, error_model="numpy", forceinline=True)
def _adagrad(record, dim, start, stop, grads, at, hyper, sign, step):  # type: ignore[no-untyped-def]
    """State: sum of squares."""
    decay, epsilon = np.float32(hyper[1]), np.float32(hyper[2])
    rate = np.float32(hyper[0] / (1.0 + (step - 1.0) * hyper[4]))
    for j in range(start, stop):
        gradient = sign * grads[at + j - start] + decay * record[j]
        total = record[dim + j] + gradient * gradient
        record[dim + j] = total
        record[j] -= rate * (gradient / (np.sqrt(total) + epsilon))


@njit(cache=True, nogil=True, error_model="numpy", forceinline=True)
def _rmsprop(record, dim, start, stop, grads, at, hyper, sign, has_momentum, is_centered):  # type: ignore[no-untyped-def]
    """State: moving average of squares, the velocity if there is momentum, the moving average if centered."""
    rate, decay, epsilon = np.float32(hyper[0]), np.float32(hyper[1]), np.float32(hyper[2])
    alpha, rest, momentum = np.float32(hyper[3]), np.float32(1.0 - hyper[3]), np.float32(hyper[4])
    middle = 3 * dim if has_momentum else 2 * dim
    for j in range(start, stop):
        gradient = sign * grads[at + j - start] + decay * record[j]
        square = alpha * record[dim + j] + rest * gradient * gradient
        record[dim + j] = square
        if is_centered:
            mean = record[middle + j] + rest * (gradient - record[middle + j])
            record[middle + j] = mean
            square -= mean * mean
        change = gradient / (np.sqrt(square) + epsilon)
        if has_momentum:
            change = momentum * record[2 * dim + j] + change
            record[2 * dim + j] = change
        record[j] -= rate * change


@njit(cache=True, nogil=True, error_model="numpy", forceinline=True)
def _adadelta(record, dim, start, stop, grads, at, hyper, sign):  # type: ignore[no-untyped-def]
    """State: moving averages of the gradients' squares and of the steps' squares."""
    rate, decay, epsilon = np.float32(hyper[0]), np.float32(hyper[1]), np.float32(hyper[2])
    rho, rest = np.float32(hyper[3]), np.float32(1.0 - hyper[3])
    for j in range(start, stop):
        gradient = sign * grads[at + j - start] + decay * record[j]
        square = rho * record[dim + j] + rest * gradient * gradient
        change = np.sqrt(record[2 * dim + j] + epsilon) / np.sqrt(square + epsilon) * gradient
        record[dim + j] = square
        record[2 * dim + j] = rho * record[2 * dim + j] + rest * change * change
        record[j] -= rate * change


@njit(cache=True, nogil=True, error_model="numpy", forceinline=True)
def _ftrl(record, dim, start, stop, grads, at, hyper):  # type: ignore[no-untyped-def]
    """State: z, n. L1 and L2 act when the weight is formed, so a weight with little evidence is exactly 0."""
    inverse, beta = np.float32(1.0 / hyper[0]), np.float32(hyper[1])
    l1, l2 = np.float32(hyper[2]), np.float32(hyper[3])
    for j in range(start, stop):
        gradient = grads[at + j - start]
        before = record[2 * dim + j]
        after = before + gradient * gradient
        root = np.sqrt(after)
        z = record[dim + j] + gradient - (root - np.sqrt(before)) * inverse * record[j]
        weight = (np.copysign(l1, z) - z) / ((beta + root) * inverse + l2)
        record[dim + j] = z
        record[2 * dim + j] = after
        record[j] = weight if abs(z) > l1 else _F0


@njit(cache=True, nogil=True, error_model="numpy", forceinline=True)
def _count_plane(rule, hyper):  # type: ignore[no-untyped-def]
    """Return how many planes lie before the step count; 0 for a rule that counts none."""
    if rule in (ADAM, ADAMW):
        return 4 if hyper[5] != 0.0 else 3
    if rule == NADAM:
        return 4
    if rule >= ADAMAX:
        return 3
    return 2 if rule in (MOMENTUM, ADAGRAD) and hyper[4] != 0.0 else 0


@njit(cache=True, nogil=True, error_model="numpy", forceinline=True)
def _update_counted(rule, record, dim, start, stop, grads, at, hyper, sign, step):  # type: ignore[no-untyped-def]
    """Update elements that have had `step` - 1 updates each."""
    if rule in (ADAM, ADAMW):
        if hyper[5] != 0.0:
            adam(record, dim, start, stop, grads, at, hyper, sign, step, rule == ADAMW, True)
        else:
            adam(record, dim, start, stop, grads, at, hyper, sign, step, rule == ADAMW, False)
    elif rule == ADAMAX:
        adamax(record, dim, start, stop, grads, at, hyper, sign, step)
    elif rule == NADAM:
        nadam(record, dim, start, stop, grads, at, hyper, sign, step)
    elif rule == RADAM:
        radam(record, dim, start, stop, grads, at, hyper, sign, step)
    elif rule == ASGD:
        asgd(record, dim, start, stop, grads, at, hyper, sign, step)
    elif rule == RPROP:
        rprop(record, dim, start, stop, grads, at, hyper, sign, step)
    elif rule == MOMENTUM:
        rest = _F1 if step == 1.0 else np.float32(1.0 - hyper[4])
        _momentum(record, dim, start, stop, grads, at, hyper, sign, rest)
    elif rule == ADAGRAD:
        _adagrad(record, dim, start, stop, grads, at, hyper, sign, step)


@njit(cache=True, nogil=True, error_model="numpy", forceinline=True)
def _update_runs(rule, record, dim, start, stop, grads, at, hyper, sign, count, per_element):  # type: ignore[no-untyped-def]
    """Update ``[start, stop)`` by a rule that counts in word `count`, or per element in the words from there on."""
    begin = start
    while begin < stop:
        place, end = count, stop
        if per_element:  # a run of elements with the same count shares what depends on it
            place, end = count + begin, begin + 1
            while end < stop and record[count + end] == record[place]:
                end += 1
        step = np.float64(record[place]) + 1.0
        _update_counted(rule, record, dim, begin, end, grads, at + begin - start, hyper, sign, step)
        if per_element:
            for j in range(begin, end):
                record[count + j] = np.float32(step)
        else:
            record[place] = np.float32(step)
        begin = end


@njit(cache=True, nogil=True, error_model="numpy", forceinline=True)
def update_record(rule, record, dim, start, stop, grads, at, hyper, per_element):  # type: ignore[no-untyped-def]
    """Apply the gradients ``grads[at : at + stop - start]`` to elements ``[start, stop)`` of a record."""
    if rule == FTRL:
        _ftrl(record, dim, start, stop, grads, at, hyper)
        return
    sign = np.float32(-1.0 if hyper[MAXIMIZE] != 0.0 else 1.0)
    count = _count_plane(rule, hyper) * dim
    if count > 0:
        _update_runs(rule, record, dim, start, stop, grads, at, hyper, sign, count, per_element)
    elif rule == SGD:
        _sgd(record, start, stop, grads, at, hyper, sign)
    elif rule == ADAGRAD:
        _adagrad(record, dim, start, stop, grads, at, hyper, sign, 1.0)
    elif rule == MOMENTUM:
        _momentum(record, dim, start, stop, grads, at, hyper, sign, _F1)
    elif rule == ADADELTA:
        _adadelta(record, dim, start, stop, grads, at, hyper, sign)
    elif hyper[4] == 0.0 and hyper[5] == 0.0:
        _rmsprop(record, dim, start, stop, grads, at, hyper, sign, False, False)
    else:
        _rmsprop(record, dim, start, stop, grads, at, hyper, sign, hyper[4] != 0.0, hyper[5] != 0.0)


@njit(cache=True, nogil=True, error_model="numpy")
def update_row(rule, record, dim, grads, at, hyper):  # type: ignore[no-untyped-def]
    """Apply the gradients ``grads[at : at + dim]`` to a row, by any rule; inlined nowhere, since it is large."""
    update_record(rule, record, dim, 0, dim, grads, at, hyper, False)


@njit(cache=True, nogil=True, error_model="numpy")
def start_state(rule, record, words, dim, start, stop, hyper):  # type: ignore[no-untyped-def]
    """Set the state of elements ``[start, stop)``, whose values are set, to that of no updates yet."""
    for plane in range(dim, words, dim):
        for j in range(start, min(stop, words - plane)):
            record[plane + j] = _F0
    if rule == ADAGRAD:
        for j in range(start, stop):
            record[dim + j] = np.float32(hyper[3])
    elif rule == FTRL:  # the z that gives this weight at n = 0
        for j in range(start, stop):
            value = record[j]
            if value != _F0:
                slope = np.float32(hyper[1] / hyper[0] + hyper[3])
                record[dim + j] = -value * slope - np.copysign(np.float32(hyper[2]), value)
