"""Poisson regression: predict counts with mean exp(margin)."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import numpy as np
from typing_extensions import override

from paceline.errors import DataError
from paceline.models.base import Optimism
from paceline.models.linear import LinearModel, mean_and_deviation
from paceline.models.metrics import Evaluation, sum_pieces
from paceline.models.rate_drift import example_counts, significant_share
from paceline.tables.types import Doubles, Floats

_LEAST_CORRECTION = 1e-3  # a prediction of 0 could have an infinite loss
_LEAST_EXPECTED = 1e-100
_MOST_MARGIN = 30.0  # exp(30) squared is below the largest float32


@dataclasses.dataclass(frozen=True)
class PoissonEvaluation(Evaluation):
    """Mean deviance, D² (the explained share of the deviance), and the expected counts divided by the sum of labels."""

    deviance: float
    d2: float
    calibration: float

    @property
    @override
    def loss(self) -> float:
        return self.deviance

    @override
    def sentence(self) -> str:
        return f"deviance {self.deviance:.4f}, D² {self.d2:.4f}, calibration {self.calibration:.3f}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoissonRegression(LinearModel):
    """Predicts the mean of a nonnegative number, such as a count, from a weight per feature. The link is logarithmic.

    `mean` is the mean label of a sample, predicted at margin 0. `scale` divides the gradients, so that large counts do
    not have larger gradients. It is the sample's standard deviation, but at least 1.
    """

    name: ClassVar[str] = "poisson"
    title: ClassVar[str] = "a Poisson regression"
    loss_name: ClassVar[str] = "deviance"
    labels: ClassVar[str] = "numbers"
    evaluation: ClassVar[type[PoissonEvaluation]] = PoissonEvaluation
    found: ClassVar[tuple[str, ...]] = ("mean", "scale")

    mean: float = 1.0
    scale: float = 1.0

    @override
    def starting_from(self, labels: Floats, weights: Floats | None = None) -> PoissonRegression:
        _check(labels)
        mean, deviation = mean_and_deviation(labels, weights)
        return dataclasses.replace(self, mean=mean or 1.0, scale=max(deviation, 1.0))

    @override
    def calibrated(
        self,
        labels: Floats,
        predictions: Floats,
        weights: Floats | None = None,
        optimism: Optimism | None = None,
        *,
        is_complete: bool = False,
    ) -> PoissonRegression:
        counts = example_counts(labels, weights)
        missing, expected = counts * (labels - predictions), float(counts @ predictions)
        if not expected > _LEAST_EXPECTED:  # the training has diverged
            return self
        off = float(missing.sum()) / expected
        variance = len(missing) * float(missing.var()) / expected**2 if len(missing) else 0.0
        share = significant_share(off, variance, is_known=is_complete) if math.isfinite(off) else 0.0
        return dataclasses.replace(self, mean=self.mean * max(1 + share * off, _LEAST_CORRECTION)) if share else self

    @override
    def outcome(self, margins: Doubles) -> Doubles:
        expected: Doubles = self.mean * np.exp(np.minimum(margins, _MOST_MARGIN))
        return expected

    @override
    def _deviations(self, labels: Doubles, predictions: Doubles) -> Doubles:
        return _deviances(labels, predictions)

    @override
    def losses(self, margins: Doubles, labels: Floats) -> tuple[Doubles, Doubles]:
        _check(labels)
        expected = self.outcome(margins)
        return _deviances(labels.astype(np.float64), expected), (expected - labels) / self.scale

    @override
    def evaluate(self, labels: Floats, predictions: Floats) -> PoissonEvaluation:
        _check(labels)
        n = len(labels)
        total = sum_pieces(lambda y, _: y, labels, predictions)
        if not total:
            return PoissonEvaluation(n, math.nan, math.nan, math.nan)
        deviance = sum_pieces(_deviances, labels, predictions)
        of_mean = sum_pieces(lambda y, _: _deviances(y, np.full(len(y), total / n)), labels, predictions)
        expected = sum_pieces(lambda _, p: p, labels, predictions)
        return PoissonEvaluation(n, deviance / n, 1 - deviance / of_mean if of_mean else math.nan, expected / total)


def _deviances(y: Doubles, expected: Doubles) -> Doubles:
    expected = np.maximum(expected, 1e-300)
    return 2 * (np.where(y > 0, y * np.log(np.maximum(y, 1e-300) / expected), 0.0) - y + expected)


def _check(labels: Floats) -> None:
    if len(labels) and labels.min() < 0:
        raise DataError(
            f"the data has the label {labels.min():g}: a Poisson regression needs counts, numbers of at least 0"
        )
