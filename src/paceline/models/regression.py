"""Linear regression with squared loss."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import numpy as np
from typing_extensions import override

from paceline.models.linear import LinearModel, mean_and_deviation
from paceline.models.metrics import Evaluation, sum_pieces
from paceline.tables.types import Doubles, Floats


@dataclasses.dataclass(frozen=True)
class RegressionEvaluation(Evaluation):
    """Errors of predictions; R² is the share of the labels' variance that the predictions explain."""

    rmse: float
    mae: float
    r2: float

    @property
    @override
    def loss(self) -> float:
        return self.rmse

    @override
    def sentence(self) -> str:
        return f"RMSE {self.rmse:.6g}, MAE {self.mae:.6g}, R² {self.r2:.4f}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeastSquares(LinearModel):
    """Predicts a number from a weight per feature.

    The model learns (label - `center`) / `scale`, so that the learning rate does not depend on the labels' unit.
    `center` is the mean label of a sample, and `scale` the standard deviation.
    """

    name: ClassVar[str] = "regression"
    title: ClassVar[str] = "a linear regression"
    loss_name: ClassVar[str] = "squared error"
    labels: ClassVar[str] = "numbers"
    evaluation: ClassVar[type[RegressionEvaluation]] = RegressionEvaluation
    found: ClassVar[tuple[str, ...]] = ("center", "scale")

    center: float = 0.0
    scale: float = 1.0

    @override
    def starting_from(self, labels: Floats, weights: Floats | None = None) -> LeastSquares:
        if not len(labels):
            return self
        center, deviation = mean_and_deviation(labels, weights)
        return dataclasses.replace(self, center=center, scale=deviation or 1.0)

    @override
    def outcome(self, margins: Doubles) -> Doubles:
        return self.center + self.scale * margins

    @override
    def _deviations(self, labels: Doubles, predictions: Doubles) -> Doubles:
        return np.square(predictions - labels)

    @override
    def losses(self, margins: Doubles, labels: Floats) -> tuple[Doubles, Doubles]:
        slopes = margins - (labels - self.center) / self.scale
        return (self.scale * slopes) ** 2, slopes

    @override
    def evaluate(self, labels: Floats, predictions: Floats) -> RegressionEvaluation:
        n = len(labels)
        if not n:
            return RegressionEvaluation(0, math.nan, math.nan, math.nan)
        mean = float(labels.mean(dtype=np.float64))
        squares = sum_pieces(lambda y, p: (p - y) ** 2, labels, predictions)
        variance = sum_pieces(lambda y, _: (y - mean) ** 2, labels, predictions)
        distance = sum_pieces(lambda y, p: np.abs(p - y), labels, predictions)
        r2 = 1 - squares / variance if variance else math.nan
        return RegressionEvaluation(n, math.sqrt(squares / n), distance / n, r2)
