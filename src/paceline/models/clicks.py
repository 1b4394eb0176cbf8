"""Common parts of click models: the log-odds offset, calibration and loss."""

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
from paceline.models.rate_drift import example_counts, rate_shift, significant_share
from paceline.tables.types import Doubles, Floats

_CHANCE = 3.0  # a result below this number of standard errors may be chance
_USUAL_OPTIMISM = 0.01  # log-odds: the assumed standard deviation if a trial has too little evidence
_LEAST_PROBABILITY = 1e-7  # 1 minus this is the float32 closest to 1
_LEAST_SHIFT = 1e-3  # log-odds: smaller shifts do not visibly change predictions


class ClickMinibatch(KeyedMinibatch):
    """A minibatch of clicks. Abstract: subclasses add margins and gradients."""

    __slots__ = ("probabilities",)

    def __init__(self, batch: Batch, rows: KeyedMatrix) -> None:
        super().__init__(batch, rows)
        self.probabilities = np.empty(self.num_examples, np.float32)

    @abstractmethod
    def margins(self, weights: Sequence[Floats]) -> Floats:
        """Return each example's log-odds of a click, float32 [n]. :meth:`gradients` describes `weights`."""

    @override
    def sums(self) -> ExampleSums:
        return sum_examples(self._rows, self.labels, self._weights, self.probabilities)

    @override
    def predict(self, weights: Sequence[Floats]) -> Floats:
        self._forward(weights, np.empty(self.num_examples, np.float32))
        return self.probabilities

    def _forward(self, weights: Sequence[Floats], residuals: Floats) -> float:
        """Return the summed loss. Write P(click) and the loss's derivatives with respect to the margins."""
        return click_loss(self.margins(weights), self.labels, self._weights, self.probabilities, residuals)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClickProbabilityModel(SparseModel):
    """A model whose predictions are P(click) = 1/(1 + exp(−margin)). Abstract."""

    loss_name: ClassVar[str] = "log loss"
    evaluation: ClassVar[type[ClickEvaluation]] = ClickEvaluation
    diverged_loss: ClassVar[float] = 20.0  # nats; the loss of the constant prediction 0.5 is 0.69
    found: ClassVar[tuple[str, ...]] = ("offset",)

    offset: float = 0.0
    positive: float | str | None = None
    """The label of clicks; None: all labels above 0. :func:`for_classes` replaces a word by a number."""

    @property
    @override
    def read_labels_as(self) -> str:
        assert not isinstance(self.positive, str), "for_classes() was not called"
        return clicks_where(self.positive)

    @override
    def describe(self) -> dict[str, Any]:
        settings = super().describe()
        if self.positive is None:
            del settings["positive"]  # absent in manifests of older versions
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
        counts = example_counts(labels, weights)
        positive, total = float(labels @ counts), float(counts.sum())
        return dataclasses.replace(self, offset=math.log((positive + 0.5) / (total - positive + 0.5)))

    @override
    def calibrated(
        self,
        labels: Floats,
        predictions: Floats,
        weights: Floats | None = None,
        optimism: Optimism | None = None,
        *,
        is_complete: bool = False,
    ) -> Self:
        counts, p = example_counts(labels, weights), np.clip(predictions.astype(np.float64), 1e-12, 1 - 1e-12)
        found = rate_shift(np.log(p / (1 - p)), labels.astype(np.float64), counts)
        beyond, error_beyond = _expected(optimism or Optimism())
        # If the trial held out the newest rows, their error is the drift, which `newest` already includes.
        beyond *= 1 - found.drift
        if is_complete:
            correction = significant_share(found.shift, found.error**2, is_known=True) * found.shift
            correction += significant_share(beyond, error_beyond**2, is_known=False) * beyond
        else:
            off = found.shift + beyond
            correction = significant_share(off, found.error**2 + error_beyond**2, is_known=False) * off
        correction += found.newest
        return self if abs(correction) < _LEAST_SHIFT else dataclasses.replace(self, offset=self.offset + correction)


def for_classes(model: SparseModel, classes: Sequence[str]) -> SparseModel:
    """Return the model for labels that are words, stored as indices into `classes`; () if labels are numbers.

    Raises UsageError if the positive label is a word that the data does not contain.
    """
    if not isinstance(model, ClickProbabilityModel):
        return model
    return dataclasses.replace(model, positive=resolve_positive(model.positive, classes))


def _expected(optimism: Optimism) -> Optimism:
    """Return the expected bias after a trial: the trial's result, or a small share of an insignificant result.

    An insignificant result is weak evidence, and models are rarely biased. Therefore the result is averaged with a bias
    of 0, both weighted by their precision.
    """
    shift, error = optimism
    if abs(shift) > _CHANCE * error:
        return optimism
    share = _USUAL_OPTIMISM**2 / (_USUAL_OPTIMISM**2 + error**2)
    return Optimism(share * shift, math.sqrt(share) * error)


def click_loss(
    margins: Floats, labels: Floats, weights: Floats | None, probabilities: Floats, residuals: Floats
) -> float:
    """Return a minibatch's summed log loss. Write P(click) and the loss's derivatives with respect to the margins.

    All arrays are float32 [n]. `weights` is None if each example counts once.
    """
    loss = float(logistic(margins, labels, probabilities, residuals))
    if weights is None:
        return loss
    residuals *= weights
    wide = margins.astype(np.float64)
    return float(((np.logaddexp(0.0, wide) - wide * labels) * weights).sum())
