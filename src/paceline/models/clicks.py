"""What models of clicks have in common: log odds that margins are counted from, and what is made of them."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import numpy as np
from typing_extensions import Self, override

from paceline.kernels.csr import logistic
from paceline.models.base import SparseModel
from paceline.models.metrics import ClickEvaluation, evaluate
from paceline.tables.types import Floats

_GOOD_ENOUGH = 0.05
_LEAST_LABELS = 100  # of either kind: fewer say too little of how many there should be


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClickProbabilityModel(SparseModel):
    """A model whose predictions are P(click) = 1/(1 + exp(−margin)). Abstract."""

    loss_name: ClassVar[str] = "log loss"
    evaluation: ClassVar[type[ClickEvaluation]] = ClickEvaluation
    diverged_loss: ClassVar[float] = 20.0  # nats; who always says 0.5 has 0.69
    found: ClassVar[tuple[str, ...]] = ("offset",)
    is_tuned: ClassVar[bool] = True

    offset: float = 0.0
    """What is added to every margin."""

    @override
    def evaluate(self, labels: Floats, predictions: Floats) -> ClickEvaluation:
        return evaluate(labels, predictions)

    @override
    def starting_from(self, labels: Floats) -> Self:
        positive = float(labels.sum(dtype=np.float64))
        return dataclasses.replace(self, offset=math.log((positive + 0.5) / (len(labels) - positive + 0.5)))

    @override
    def calibrated(self, labels: Floats, predictions: Floats) -> Self:
        p, clicks = np.clip(predictions.astype(np.float64), 1e-12, 1 - 1e-12), float(labels.sum(dtype=np.float64))
        off = abs(p.sum() - clicks)
        is_chance = off < 3 * math.sqrt((p * (1 - p)).sum()) or off < _GOOD_ENOUGH * clicks
        if is_chance or min(clicks, len(labels) - clicks) < _LEAST_LABELS:
            return self
        margins, shift = np.log(p / (1 - p)), 0.0
        for _ in range(20):  # Newton's method
            p = 1 / (1 + np.exp(-margins - shift))
            shift -= float(np.clip((p.sum() - clicks) / max(float((p * (1 - p)).sum()), 1e-9), -1, 1))
        return dataclasses.replace(self, offset=self.offset + shift)


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
