"""Linear models other than logistic regression, with margin = bias + Σ w[key]·value.

Each model has its own loss, a function of the margin. The bias is the weight of a separate key. Gradients are summed
over the minibatch.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from typing_extensions import override

from paceline.data import Batch
from paceline.models.base import KeyedMatrix, KeyedMinibatch, ModelTable, SparseModel, sum_examples
from paceline.models.progressive import ExampleSums
from paceline.tables.types import Doubles, Floats


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearModel(SparseModel):
    """A model with one weight per feature. Abstract: subclasses add the loss."""

    has_classes: ClassVar[bool] = False

    @property
    @override
    def parameter_tables(self) -> tuple[ModelTable, ...]:
        return (ModelTable(self.name),)

    @override
    def _to_minibatch(self, batch: Batch, rows: KeyedMatrix) -> KeyedMinibatch:
        return LinearMinibatch(self, batch, rows)

    @override
    def losses_of(self, labels: Floats, predictions: Floats) -> Doubles:
        return self._deviations(labels.astype(np.float64), predictions.astype(np.float64))

    @abstractmethod
    def _deviations(self, labels: Doubles, predictions: Doubles) -> Doubles:
        """Return the reported loss of each example."""

    @abstractmethod
    def outcome(self, margins: Doubles) -> Doubles:
        """Convert margins to predictions."""

    @abstractmethod
    def losses(self, margins: Doubles, labels: Floats) -> tuple[Doubles, Doubles]:
        """Return each example's reported loss, and the minimized loss's derivative with respect to the margin.

        The minimized loss is a multiple of the reported loss. Raises DataError for an invalid label.
        """


class LinearMinibatch(KeyedMinibatch):
    """A minibatch of a linear model."""

    __slots__ = ("_model", "_predictions")

    def __init__(self, model: LinearModel, batch: Batch, rows: KeyedMatrix) -> None:
        super().__init__(batch, rows)
        self._model = model
        self._predictions = np.empty(0, np.float32)

    @override
    def gradients(self, weights: Sequence[Floats]) -> tuple[Sequence[Floats], float]:
        margins = self._margins(weights[0].reshape(-1))
        losses, slopes = self._model.losses(margins, self.labels)
        self._predictions = self._model.outcome(margins).astype(np.float32)
        if self._weights is not None:
            losses, slopes = losses * self._weights, slopes * self._weights
        return (self._linear_gradient(slopes.astype(np.float32), slopes.sum()),), float(losses.sum())

    @override
    def sums(self) -> ExampleSums:
        return sum_examples(self._rows, self.labels, self._weights, self._predictions)

    @override
    def predict(self, weights: Sequence[Floats]) -> Floats:
        return self._model.outcome(self._margins(weights[0].reshape(-1))).astype(np.float32)

    def _margins(self, weights: Floats) -> Doubles:
        wide: Doubles = self._linear_margins(weights).astype(np.float64) + weights[-1]
        return wide


def mean_and_deviation(labels: Floats, weights: Floats | None) -> tuple[float, float]:
    """Return the weighted mean and standard deviation of labels; both are 0 if there are no labels."""
    counts = np.ones(len(labels)) if weights is None else weights.astype(np.float64)
    total = float(counts.sum())
    if not total:
        return 0.0, 0.0
    y = labels.astype(np.float64)
    mean = float(counts @ y) / total
    return mean, float(np.sqrt(counts @ np.square(y - mean) / total))
