"""What models of clicks have in common: log odds that margins are counted from, and what is made of them."""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from typing_extensions import Self, override

from paceline.data import Batch
from paceline.data.labels import clicks_where, resolve_positive
from paceline.kernels.csr import logistic
from paceline.models.base import KeyedMatrix, KeyedMinibatch, Optimism, SparseModel, sum_examples
from paceline.models.metrics import ClickEvaluation, evaluate
from paceline.models.progressive import ExampleSums
from paceline.tables.types import Doubles, Floats

_CHANCE = 3.0  # standard errors
_USUAL_OPTIMISM = 0.01  # log-odds: the standard deviation where a trial says too little
_OTHER_TIMES = 4.0  # standard errors: several parts are looked at, and the first that differs ends the search
_NEWEST = 8
_LEAST_PROBABILITY = 1e-7  # a float32 is no nearer to 1
_LEAST_LABELS = 100  # of either kind: fewer say too little of how many there should be


class ClickMinibatch(KeyedMinibatch):
    """A minibatch of clicks. Abstract: margins, and gradients by what they are made of, are missing."""

    __slots__ = ("probabilities",)

    def __init__(self, batch: Batch, rows: KeyedMatrix) -> None:
        super().__init__(batch, rows)
        self.probabilities = np.empty(self.num_examples, np.float32)

    @abstractmethod
    def margins(self, weights: Sequence[Floats]) -> Floats:
        """Return the log odds of a click of each example: float32 [n]; `weights` as in :meth:`gradients`."""

    @override
    def sums(self) -> ExampleSums:
        return sum_examples(self._rows, self.labels, self._weights, self.probabilities)

    @override
    def predict(self, weights: Sequence[Floats]) -> Floats:
        self._forward(weights, np.empty(self.num_examples, np.float32))
        return self.probabilities

    def _forward(self, weights: Sequence[Floats], residuals: Floats) -> float:
        """Return the summed loss; write P(click), and the loss's derivative by each margin (float32 [n])."""
        return click_loss(self.margins(weights), self.labels, self._weights, self.probabilities, residuals)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClickProbabilityModel(SparseModel):
    """A model whose predictions are P(click) = 1/(1 + exp(−margin)). Abstract."""

    loss_name: ClassVar[str] = "log loss"
    evaluation: ClassVar[type[ClickEvaluation]] = ClickEvaluation
    diverged_loss: ClassVar[float] = 20.0  # nats; who always says 0.5 has 0.69
    found: ClassVar[tuple[str, ...]] = ("offset",)

    offset: float = 0.0
    """What is added to every margin."""
    positive: float | str | None = None
    """The label of clicks, where others are of none; None: those above 0 are. A word until :func:`for_classes`."""

    @property
    @override
    def read_labels_as(self) -> str:
        assert not isinstance(self.positive, str), "the data were not looked at"
        return clicks_where(self.positive)

    @override
    def describe(self) -> dict[str, Any]:
        settings = super().describe()
        if self.positive is None:
            del settings["positive"]  # as before there was one
        return settings

    @override
    def evaluate(self, labels: Floats, predictions: Floats) -> ClickEvaluation:
        return evaluate(labels, predictions)

    @override
    def losses_of(self, labels: Floats, predictions: Floats) -> Doubles:
        y, p = labels.astype(np.float64), np.clip(predictions.astype(np.float64), _LEAST_PROBABILITY, None)
        return -y * np.log(p) - (1 - y) * np.log(np.maximum(1 - p, _LEAST_PROBABILITY))

    @override
    def starting_from(self, labels: Floats, weights: Floats | None = None) -> Self:
        counts = _counts(labels, weights)
        positive, total = float(labels @ counts), float(counts.sum())
        return dataclasses.replace(self, offset=math.log((positive + 0.5) / (total - positive + 0.5)))

    @override
    def calibrated(
        self,
        labels: Floats,
        predictions: Floats,
        weights: Floats | None = None,
        optimism: Optimism | None = None,
    ) -> Self:
        counts, p = _counts(labels, weights), np.clip(predictions.astype(np.float64), 1e-12, 1 - 1e-12)
        first, is_drifting = _where_rates_hold(labels, p, counts)
        newest = slice(first, None)
        y, p, counts = labels[newest].astype(np.float64), p[newest], counts[newest]
        if min((counts * y > 0).sum(), (counts * (1 - y) > 0).sum()) < _LEAST_LABELS:
            return self
        shift, error = log_odds_shift(np.log(p / (1 - p)), y, counts)
        if is_drifting:  # the trial's held-out rows are the newest ones: its error is the same drift
            optimism = None
        beyond, error_beyond = _expected(optimism or Optimism())
        off, variance = shift + beyond, error * error + error_beyond * error_beyond
        share = 1 - variance / max(off * off, 1e-30)
        return self if share <= 0 else dataclasses.replace(self, offset=self.offset + share * off)


def for_classes(model: SparseModel, classes: Sequence[str]) -> SparseModel:
    """Return the model for data whose labels are words, read as their places in `classes`; () if they are numbers.

    Raises UsageError where the positive label is a word that is no label of the data.
    """
    if not isinstance(model, ClickProbabilityModel):
        return model
    return dataclasses.replace(model, positive=resolve_positive(model.positive, classes))


def log_odds_shift(margins: Doubles, labels: Doubles, counts: Doubles) -> tuple[float, float]:
    """Return what margins must get more for P(click) to be right in the mean, and the standard error of that.

    `margins`, `labels` (0 and 1) and `counts`, how often each counts, are float64 [n]. Newton's method.
    """
    shift, error = 0.0, math.inf
    for _ in range(20):
        p = 1 / (1 + np.exp(-np.clip(margins + shift, -500, 500)))
        spread = p * (1 - p)
        total = max(float(counts @ spread), 1e-9)
        shift -= float(np.clip(counts @ (p - labels) / total, -1, 1))
        error = math.sqrt(float((counts * counts) @ spread)) / total
    return shift, error


def _expected(optimism: Optimism) -> Optimism:
    """Return what is to be expected after a trial: what it showed if that is beyond chance, else hardly anything.

    What it showed is mostly the chance of what was held out, and models are hardly off: so the trial's shift and the
    usual deviation are weighed by their precision.
    """
    shift, error = optimism
    if abs(shift) > _CHANCE * error:
        return optimism
    share = _USUAL_OPTIMISM**2 / (_USUAL_OPTIMISM**2 + error**2)
    return Optimism(share * shift, math.sqrt(share) * error)


def _counts(labels: Floats, weights: Floats | None) -> Doubles:
    return np.ones(len(labels)) if weights is None else weights.astype(np.float64)


def _off(y: Floats | Doubles, p: Doubles, counts: Doubles) -> tuple[float, float]:
    """Return by how much the predictions exceed the labels in sum, and the standard error of that."""
    return float(counts @ (p - y)), math.sqrt(float((counts * counts) @ (p * (1 - p))))


def _where_rates_hold(labels: Floats, p: Doubles, counts: Doubles) -> tuple[int, bool]:
    """Return the start of the newest examples, an eighth, a quarter, a half or all, and whether the rate drifts.

    The part doubles while predictions are off by the same share in the part before it. It halves again while the rate
    changes within it. If the rate changes within the newest eighth, no rate holds: all examples count.
    """
    n = len(labels)
    first = n - min(max(n // _NEWEST, 1), n)
    while first > 0:
        before, after = slice(max(2 * first - n, 0), first), slice(first, n)
        (off, error), (off_then, error_then) = (_off(labels[part], p[part], counts[part]) for part in (after, before))
        now, then = (max(float(counts[part] @ p[part]), 1e-12) for part in (after, before))
        if abs(off / now - off_then / then) > _OTHER_TIMES * math.hypot(error / now, error_then / then):
            break
        first = max(2 * first - n, 0)
    is_drifting = first > 0
    while first > 0 and _is_changing(labels[first:], counts[first:]):
        first = (first + n) // 2 if n - first > n // _NEWEST + 1 else 0
    return first, is_drifting


def _is_changing(labels: Floats, counts: Doubles) -> bool:
    """Return whether the rates of positives in the two halves of the examples differ by more than chance."""
    rate = float(np.average(labels, weights=np.maximum(counts, 1e-30)))
    constant: Doubles = np.full(len(labels), rate, np.float64)
    halves = slice(0, len(labels) // 2), slice(len(labels) // 2, None)
    (older, error), (newer, other_error) = (_off(labels[half], constant[half], counts[half]) for half in halves)
    total, other_total = (max(float(counts[half].sum()), 1e-12) for half in halves)
    return abs(older / total - newer / other_total) > _OTHER_TIMES * math.hypot(
        error / total, other_error / other_total
    )


def click_loss(
    margins: Floats, labels: Floats, weights: Floats | None, probabilities: Floats, residuals: Floats
) -> float:
    """Return the log loss summed over a minibatch; write P(click), and the loss's derivative by each margin.

    All arrays are float32 [n]; `weights` say how often each example counts, None that all count once.
    """
    loss = float(logistic(margins, labels, probabilities, residuals))
    if weights is None:
        return loss
    residuals *= weights
    wide = margins.astype(np.float64)
    return float(((np.logaddexp(0.0, wide) - wide * labels) * weights).sum())
