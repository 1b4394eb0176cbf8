"""Model the relation between one column and the label, to choose the column's scale and kind.

A column is modelled as a *line* or as a *table*. For a line, the label's log-odds, or the label's mean for quantities,
are linear in the number. A table has a rate for each value. The models are compared by their mean loss, with a penalty
of 1 / rows for each parameter beyond the first (Akaike, "A new look at the statistical model identification", 1974).
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

Doubles = npt.NDArray[np.float64]

_STEPS: Final = 25
_HALVINGS: Final = 6
_ENOUGH: Final = 1e-9
_SAME: Final = 1e-12
_MOST: Final = 1e6  # upper limit of the ratio: variance of a quantity / residual variance


def line_loss(numbers: Doubles, labels: Doubles) -> float:
    """Return the mean loss in nats of the best line, including the penalty. Both arrays are float64 [n].

    If labels have two values, they are classes (logistic regression by Newton's method). Otherwise they are quantities
    (least squares).
    """
    x, classes = _standardised(numbers), _as_classes(labels)
    cost = 1 / max(len(x), 1)
    if classes is None:
        y = _standardised(labels)
        return _gaussian_loss(y - x * float(x @ y) * cost) + cost
    return _logistic_line(x, classes) + cost


def table_loss(codes: npt.NDArray[np.int64], labels: Doubles) -> float:
    """Return the mean loss in nats of a rate (a mean) for each value, including the penalty.

    `codes` int64 [n] has each row's value as a number from 0.
    """
    counts = np.bincount(codes)
    cost = (np.count_nonzero(counts) - 1) / max(len(codes), 1)
    classes = _as_classes(labels)
    y = _standardised(labels) if classes is None else classes
    means = (np.bincount(codes, y) / np.maximum(counts, 1))[codes]
    return cost + (_gaussian_loss(y - means) if classes is None else _log_loss(means, classes))


def _as_classes(labels: Doubles) -> Doubles | None:
    """Return labels as 0 and 1 if they have at most two values; otherwise None."""
    values = np.unique(labels)
    return None if len(values) > 2 else np.searchsorted(values, labels).astype(np.float64)


def _standardised(numbers: Doubles) -> Doubles:
    largest = float(np.abs(numbers).max(initial=0.0))
    if not 0 < largest < np.inf:
        return np.zeros(len(numbers))
    centred = numbers / largest  # squares of the result do not overflow
    centred -= centred.mean()
    deviation = float(np.sqrt(np.mean(centred * centred)))
    return centred / deviation if deviation > _SAME else np.zeros(len(numbers))


def _gaussian_loss(residuals: Doubles) -> float:
    """Return half the logarithm of the unexplained share of the variance."""
    return 0.5 * float(np.log(max(float(np.mean(residuals * residuals)), 1 / _MOST))) if len(residuals) else 0.0


def _log_loss(rates: Doubles, classes: Doubles) -> float:
    """Return the mean log loss. A rate is 0 or 1 only if all its labels are equal."""
    predicted = np.where(classes > 0, rates, 1.0 - rates)
    return float(-np.log(np.maximum(predicted, 1e-300)).mean()) if len(predicted) else 0.0


def _logistic_line(x: Doubles, y: Doubles) -> float:
    rate = float(np.clip(y.mean(), 1e-9, 1 - 1e-9)) if len(y) else 0.5
    line = np.array([np.log(rate / (1 - rate)), 0.0])
    loss = _loss_of(line, x, y)
    for _ in range(_STEPS):
        p = 1.0 / (1.0 + np.exp(-np.clip(line[0] + line[1] * x, -500, 500)))
        left, curvature = p - y, p * (1.0 - p)
        gradient = np.array([left.sum(), left @ x])
        across = curvature @ x
        hessian = np.array([[curvature.sum(), across], [across, curvature @ (x * x)]]) + 1e-9 * np.eye(2)
        step = np.linalg.solve(hessian, gradient)
        for halving in range(_HALVINGS):
            tried = line - step / 2**halving
            found = _loss_of(tried, x, y)
            if found < loss:
                break
        else:
            return loss
        is_enough = loss - found < _ENOUGH
        line, loss = tried, found
        if is_enough:
            break
    return loss


def _loss_of(line: Doubles, x: Doubles, y: Doubles) -> float:
    margins = line[0] + line[1] * x
    return float(np.mean(np.logaddexp(0.0, margins) - y * margins)) if len(x) else 0.0
