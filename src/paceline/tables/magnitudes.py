"""How large the records of a table part can be: whether a push may make infinities or NaN, told without looking at one.

The finite gradients of a push can overflow in the update rule: a square in Adagrad's, a product with a large rate. To
look at every record after every push would cost more than the push. So a part keeps an upper bound of the magnitudes in
each plane of its records, and raises it with every push by what the rule can add to any record, given the greatest
magnitude of the gradients, which is found by the pass that looks for NaN anyway. While the bounds stay far below the
greatest float32 nothing can have overflowed, on the way neither. Else, and where a rule has no bounds here, the push is
tried on a copy of its records first (:meth:`paceline.tables.part.TablePart.trial`).

The bounds hold for pushes in which no key stands twice, as clients send them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.tables.rules import FTRL, SGD, Adagrad, Adam, AdamW, Initializer, Momentum, RMSprop, UpdateRule

_SAFE = 1e37
"""Bounds up to this are far enough below the greatest float32, 3.4e38, for what rounding adds."""
_LEAST = 1e-37
"""What is less may be 0 as a float32, and nothing may be divided by it."""
_TINY = 1e-16
"""A gradient below this may have a square that, times a small factor, is 0 as a float32."""
_ROUNDING = 1e-6
"""More than the relative errors of all operations of one update together."""
_AHEAD = 64
"""So many pushes are looked ahead, with gradients up to `_MARGIN` times those of the first: the next need no look."""
_MARGIN = 4.0


class Bounds(NamedTuple):
    """Upper bounds of the magnitudes in all records: the values, the state planes by number, and of Adam a ratio."""

    values: float = 0.0
    first: float = 0.0
    second: float = 0.0
    ratio: float = 0.0
    """Of the first moment to the root of the second, where the first is no less than a tiny number."""

    def __or__(self, other: Bounds) -> Bounds:
        """Return the greater ones; NaN of the first stays."""
        return Bounds(*(b if b > a else a for a, b in zip(self, other, strict=True)))


_UNKNOWN = Bounds(math.inf, math.inf, math.inf, math.inf)

Grown = Callable[[Any, Bounds, Bounds, float, int], tuple[Bounds, float]]
"""Takes a rule, the bounds, those of records that the rule has not formed itself, the greatest gradient, and a number
of pushes; returns bounds of the records after so many pushes, and one of what is computed on the way."""


def _over(number: float, divisor: float) -> float:
    return number / divisor if divisor > _LEAST else math.inf


def _power(base: float, exponent: int) -> float:
    return base**exponent if base < 2.0 else base if exponent == 1 else math.inf


def _normed(eps: float) -> float:
    """Return how large a gradient is that is divided by the root of a sum with its square."""
    return max(2.0, _over(_TINY, eps))


def _sgd(rule: SGD, at: Bounds, formed: Bounds, gradient: float, num: int) -> tuple[Bounds, float]:
    shrink = rule.lr * rule.weight_decay
    growth = abs(1.0 - shrink) + _ROUNDING * (1.0 + shrink)
    step = rule.lr * gradient * (1.0 + _ROUNDING)
    values = (at.values + num * step) * _power(max(growth, 1.0), num)
    if growth < 1.0:
        values = min(values, max(at.values, step / (1.0 - growth)))
    total = gradient + rule.weight_decay * values
    return Bounds(values), max(total, rule.lr * total)


def _momentum(rule: Momentum, at: Bounds, formed: Bounds, gradient: float, num: int) -> tuple[Bounds, float]:
    error = _power(1.0 + _ROUNDING, num)
    rest = max(1.0, abs(1.0 - rule.dampening))
    gain = rest * (1.0 / (1.0 - rule.momentum) if rule.momentum < 1.0 else num)  # of the velocity, whatever num
    # The gradient is more by weight decay, and the values by the gradient: solved for the values.
    factor = num * rule.lr * (1.0 + gain) * error
    divisor = 1.0 - factor * rule.weight_decay
    if divisor < 0.5:
        return _UNKNOWN, math.inf
    values = (error * (at.values + num * rule.lr * at.first) + factor * gradient) / divisor
    gradient += rule.weight_decay * values
    velocity = (at.first + gain * gradient) * error if rule.momentum >= 1.0 else max(at.first, gain * gradient) * error
    step = gradient + velocity
    return Bounds(values, velocity), max(step, rule.lr * step)


def _adagrad(rule: Adagrad, at: Bounds, formed: Bounds, gradient: float, num: int) -> tuple[Bounds, float]:
    error = _power(1.0 + _ROUNDING, num)
    values = (at.values + num * rule.lr * _normed(rule.eps)) * error
    gradient += rule.weight_decay * values
    return Bounds(values, (at.first + num * gradient * gradient) * error), gradient


def _rmsprop(rule: RMSprop, at: Bounds, formed: Bounds, gradient: float, num: int) -> tuple[Bounds, float]:
    if rule.centered or rule.momentum >= 1.0:  # a difference, of which a root is taken
        return _UNKNOWN, math.inf
    error = _power(1.0 + _ROUNDING, num)
    step = _over(_normed(rule.eps), math.sqrt(max(1.0 - rule.alpha, 0.0)))
    velocity = max(at.second, step / (1.0 - rule.momentum)) * error if rule.momentum else 0.0
    values = (at.values + num * rule.lr * max(step, velocity)) * error
    gradient += rule.weight_decay * values
    return Bounds(values, max(at.first, gradient * gradient) * error, velocity), gradient


def _adam(rule: Adam, at: Bounds, formed: Bounds, gradient: float, num: int) -> tuple[Bounds, float]:
    is_decoupled = isinstance(rule, AdamW)
    beta1, beta2 = rule.betas
    forgets = 1.0 - _over(beta1 * beta1, beta2) if beta1 else 1.0
    if forgets <= 0.0:
        return _UNKNOWN, math.inf
    error = _power(1.0 + _ROUNDING, num)
    # Cauchy and Schwarz: |b1·m + (1 - b1)·g| where m² ≤ ratio²·v, against the root of b2·v + (1 - b2)·g².
    ratio = max(at.ratio, (1.0 - beta1) / math.sqrt((1.0 - beta2) * forgets)) * error
    step = rule.lr / (1.0 - beta1) * (ratio + _over(_TINY, rule.eps))
    growth = abs(1.0 - rule.lr * rule.weight_decay) if is_decoupled else 1.0
    values = (at.values + num * step) * _power(max(growth, 1.0), num) * error
    gradient += 0.0 if is_decoupled else rule.weight_decay * values
    first = max(at.first, gradient) * error
    second = max(at.second, gradient * gradient) * error
    return Bounds(values, first, second, ratio), max(first + gradient, _over(math.sqrt(second), math.sqrt(1.0 - beta2)))


def _ftrl(rule: FTRL, at: Bounds, formed: Bounds, gradient: float, num: int) -> tuple[Bounds, float]:
    error = _power(1.0 + _ROUNDING, num)
    inverse, least = _over(1.0, rule.alpha), _over(rule.beta, rule.alpha) + rule.l2
    squares = (at.second + num * gradient * gradient) * error
    root = math.sqrt(squares)
    slope = (gradient + _ROUNDING * root) * inverse  # by how much the divisor of a weight grows with one push
    # A weight that these hyperparameters have formed moves by no more than the gradient over its new divisor, which
    # grows with the root of the gradient's square. Others are formed anew.
    anew = formed.first + gradient + slope * formed.values
    moves = num * (rule.alpha + _over(_ROUNDING * rule.l1, least))
    values = (max(at.values, _over(anew + rule.l1, least)) + moves) * error
    first = max(values * (root * inverse + least) + rule.l1, anew) * error
    return Bounds(values, first, squares), max(first + gradient, root * inverse, slope * values)


_GROWN: dict[type[UpdateRule], Grown] = {
    SGD: _sgd,
    Momentum: _momentum,
    Adagrad: _adagrad,
    RMSprop: _rmsprop,
    Adam: _adam,
    AdamW: _adam,
    FTRL: _ftrl,
}
_SQUARES: dict[type[UpdateRule], int] = {Adagrad: 1, RMSprop: 1, Adam: 2, AdamW: 2, FTRL: 2}
"""The plane, counted from the values, of which a root is taken."""


class Magnitudes:
    """The bounds of one part's records."""

    def __init__(self, rule: UpdateRule, initializer: Initializer, dim: int) -> None:
        self._dim = dim
        self._rule = rule
        self._grown = _GROWN.get(type(rule))
        self._initial = _initial(rule, initializer)
        self._bounds = self._formed = self._initial
        self._left = 0  # so many more pushes, of gradients up to the top, are accounted for in the bounds
        self._top = 0.0
        self._num_tried = 0

    def set_rule(self, rule: UpdateRule) -> None:
        """Take other hyperparameters: no record there was formed by them."""
        self._rule = rule
        self._formed = self._bounds
        self._left = 0

    def take(self, gradient: float) -> bool:
        """Take note of a push with gradients up to `gradient`; return False, and do not, if it may overflow."""
        if self._left and gradient <= self._top:
            self._left -= 1
            return True
        return self._look_ahead(gradient * _MARGIN, _AHEAD) or self._look_ahead(gradient, 1)

    def _look_ahead(self, gradient: float, num: int) -> bool:
        if self._grown is None or not self._bounds.values <= _SAFE:
            return False
        bounds, peak = self._grown(self._rule, self._bounds, self._formed, gradient, num)
        bounds |= self._bounds  # rows without a gradient stay
        is_safe = peak <= _SAFE and all(bound <= _SAFE for bound in bounds)  # not where one of them is NaN
        if is_safe:
            self._bounds, self._top, self._left = bounds, gradient, num - 1
        return is_safe

    def take_unseen(self, gradient: float) -> None:
        """Take note of a push that another server has looked at."""
        if not self.take(gradient):
            self._bounds = _UNKNOWN
            self._left = 0

    def widen(self, records: npt.NDArray[np.float32]) -> None:
        """Take note of records (float32 [n, words]) that are written, loaded, or the outcome of a trial."""
        if len(records) and self._grown is not None:
            found = self._bounds_of(records)
            self._bounds |= found
            self._formed |= found
            self._left = 0

    def is_loose(self, num_tried: int, num_rows: int) -> bool:
        """Count the rows of a trial; return whether there were so many that to look at all rows costs little."""
        self._num_tried += num_tried
        return self._grown is not None and self._num_tried >= num_rows

    def begin_anew(self) -> None:
        """Forget the bounds: all records are going to be looked at."""
        self._bounds = self._formed = self._initial
        self._left = self._num_tried = 0

    def _bounds_of(self, records: npt.NDArray[np.float32]) -> Bounds:
        dim = self._dim
        planes = [records[:, at : at + dim] for at in range(0, dim * (1 + self._rule.num_states), dim)]
        with np.errstate(all="ignore"):
            tops = [float(np.abs(plane).max()) for plane in planes]
            squares = _SQUARES.get(type(self._rule), 0)
            has_roots = not squares or float(planes[squares].min()) >= 0.0
            counts = not self._rule.has_count or float(records[:, -1].min()) >= 0.0
            if not all(top <= _SAFE for top in tops) or not has_roots or not counts:
                return _UNKNOWN
            ratio = 0.0
            if isinstance(self._rule, Adam):
                first = np.abs(planes[1].astype(np.float64))
                ratio = float(np.where(first > _TINY, first / np.sqrt(planes[2].astype(np.float64)), 0.0).max())
        tops += [0.0, 0.0]
        return Bounds(tops[0], tops[1], tops[2], ratio)


def _initial(rule: UpdateRule, initializer: Initializer) -> Bounds:
    """Return the bounds of rows that have had no push."""
    values = initializer.largest
    if isinstance(rule, Adagrad):
        return Bounds(values, rule.initial_accumulator)
    if isinstance(rule, FTRL) and values:
        return Bounds(values, values * (_over(rule.beta, rule.alpha) + rule.l2) + rule.l1)
    return Bounds(values)
