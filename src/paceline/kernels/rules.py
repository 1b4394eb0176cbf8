"""Update rules: what a server does to a row when a gradient arrives.

A rule is one function on one *record*: a float32 view that holds the values first, then the state planes,
each `dim` long, and a step count last where the rule has one. A sparse row is a record of its own; a dense
table is a single long one, updated on ``[start, stop)``. All arithmetic is float32, in the order of
``torch.optim``'s single-tensor code, so that results agree to 1e-6 over 100 steps. To add a rule, see
docs/extending.md.

Sources: SGD, momentum and Nesterov as ``torch.optim.SGD`` (Sutskever et al., ICML 2013); Adagrad (Duchi et
al., JMLR 2011); RMSprop (Hinton, lecture 6e); Adam (Kingma & Ba, ICLR 2015); AdamW (Loshchilov & Hutter, ICLR
2019); FTRL-proximal (McMahan et al., KDD 2013, algorithm 1).
"""

from __future__ import annotations

import numpy as np

from .jit import njit

SGD, MOMENTUM, ADAGRAD, RMSPROP, ADAM, ADAMW, FTRL = range(7)

# The parameter array of a table, float64 (so that 1 - beta**step is exact): a rule's hyperparameters, then
# the initializer's two.
NUM_HYPER = 8
INITIAL_A, INITIAL_B = 8, 9
NUM_PARAMETERS = 10

_F0 = np.float32(0)


@njit(cache=True, nogil=True, error_model="numpy", forceinline=True)
def _sgd(record, start, stop, grads, at, hyper):  # type: ignore[no-untyped-def]
    rate, decay = np.float32(hyper[0]), np.float32(hyper[1])
    for j in range(start, stop):
        gradient = grads[at + j - start] + decay * record[j]
        record[j] -= rate * gradient


@njit(cache=True, nogil=True, error_model="numpy", forceinline=True)
def _momentum(record, dim, start, stop, grads, at, hyper):  # type: ignore[no-untyped-def]
    """State: velocity."""
    rate, decay, momentum = np.float32(hyper[0]), np.float32(hyper[1]), np.float32(hyper[2])
    nesterov = hyper[3] != 0.0
    for j in range(start, stop):
        gradient = grads[at + j - start] + decay * record[j]
        velocity = momentum * record[dim + j] + gradient
        record[dim + j] = velocity
        record[j] -= rate * (gradient + momentum * velocity if nesterov else velocity)


@njit(cache=True, nogil=True, error_model="numpy", forceinline=True)
def _adagrad(record, dim, start, stop, grads, at, hyper):  # type: ignore[no-untyped-def]
    """State: sum of squares."""
    rate, decay, epsilon = np.float32(hyper[0]), np.float32(hyper[1]), np.float32(hyper[2])
    for j in range(start, stop):
        gradient = grads[at + j - start] + decay * record[j]
        total = record[dim + j] + gradient * gradient
        record[dim + j] = total
        record[j] -= rate * (gradient / (np.sqrt(total) + epsilon))


@njit(cache=True, nogil=True, error_model="numpy", forceinline=True)
def _rmsprop(record, dim, start, stop, grads, at, hyper):  # type: ignore[no-untyped-def]
    """State: moving average of squares."""
    rate, decay, epsilon = np.float32(hyper[0]), np.float32(hyper[1]), np.float32(hyper[2])
    alpha, rest = np.float32(hyper[3]), np.float32(1.0 - hyper[3])
    for j in range(start, stop):
        gradient = grads[at + j - start] + decay * record[j]
        square = alpha * record[dim + j] + rest * gradient * gradient
        record[dim + j] = square
        record[j] -= rate * (gradient / (np.sqrt(square) + epsilon))


@njit(cache=True, nogil=True, error_model="numpy", forceinline=True)
def _adam(record, dim, start, stop, grads, at, hyper, decoupled, per_element):  # type: ignore[no-untyped-def]
    """State: first moment, second moment, step count (of a sparse row or of a dense element)."""
    decay, epsilon = np.float32(0.0 if decoupled else hyper[1]), np.float32(hyper[2])
    shrink = np.float32(1.0 - hyper[0] * hyper[1]) if decoupled else np.float32(1.0)
    rest1, beta2, rest2 = np.float32(1.0 - hyper[3]), np.float32(hyper[4]), np.float32(1.0 - hyper[4])
    first, second, count = dim, 2 * dim, 3 * dim
    begin = start
    while begin < stop:
        place, end = count, stop
        if per_element:  # a run of elements with the same count shares the bias corrections
            place, end = count + begin, begin + 1
            while end < stop and record[count + end] == record[place]:
                end += 1
        step = np.float64(record[place]) + 1.0
        size = np.float32(hyper[0] / (1.0 - hyper[3] ** step))
        root = np.float32(np.sqrt(1.0 - hyper[4] ** step))
        for j in range(begin, end):
            value = record[j] * shrink
            gradient = grads[at + j - start] + decay * value
            moment = record[first + j] + rest1 * (gradient - record[first + j])
            square = beta2 * record[second + j] + rest2 * gradient * gradient
            record[first + j] = moment
            record[second + j] = square
            record[j] = value - size * (moment / (np.sqrt(square) / root + epsilon))
        if per_element:
            for j in range(begin, end):
                record[count + j] = np.float32(step)
        else:
            record[place] = np.float32(step)
        begin = end


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
def update_record(rule, record, dim, start, stop, grads, at, hyper, per_element):  # type: ignore[no-untyped-def]
    """Apply the gradients ``grads[at : at + stop - start]`` to elements ``[start, stop)`` of a record."""
    if rule == FTRL:
        _ftrl(record, dim, start, stop, grads, at, hyper)
    elif rule == SGD:
        _sgd(record, start, stop, grads, at, hyper)
    elif rule == ADAGRAD:
        _adagrad(record, dim, start, stop, grads, at, hyper)
    elif rule == MOMENTUM:
        _momentum(record, dim, start, stop, grads, at, hyper)
    elif rule == RMSPROP:
        _rmsprop(record, dim, start, stop, grads, at, hyper)
    else:
        _adam(record, dim, start, stop, grads, at, hyper, rule == ADAMW, per_element)


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
