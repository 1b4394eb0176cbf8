"""Sparse logistic regression: P(click) = 1/(1 + exp(−(offset + bias + Σ w[key]·value))).

The offset, the log-odds of a click, is fixed before training, so a weight learns only the effect of its feature. The
bias is the weight of a separate key, which has value 1 in every example. Gradients are summed over the minibatch, not
averaged, as is usual for sparse features (McMahan et al., KDD 2013).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from typing_extensions import override

from paceline.data import Batch
from paceline.models.base import KeyedMatrix, KeyedMinibatch, ModelTable
from paceline.models.clicks import ClickMinibatch, ClickProbabilityModel
from paceline.tables.types import Floats


class LogisticMinibatch(ClickMinibatch):
    """A minibatch of clicks."""

    __slots__ = ("_offset",)

    def __init__(self, batch: Batch, rows: KeyedMatrix, offset: float) -> None:
        super().__init__(batch, rows)
        self._offset = np.float32(offset)

    @override
    def gradients(self, weights: Sequence[Floats]) -> tuple[Sequence[Floats], float]:
        residuals = np.empty(self.num_examples, np.float32)
        loss = self._forward(weights, residuals)
        return (self._linear_gradient(residuals, residuals.sum(dtype=np.float64)),), loss

    @override
    def margins(self, weights: Sequence[Floats]) -> Floats:
        first = weights[0].reshape(-1)
        margins = self._linear_margins(first)
        margins += first[-1] + self._offset
        return margins


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseLogisticRegression(ClickProbabilityModel):
    """P(click) from a weight per feature."""

    name: ClassVar[str] = "lr"
    title: ClassVar[str] = "a sparse logistic regression"

    @property
    @override
    def parameter_tables(self) -> tuple[ModelTable, ...]:
        return (ModelTable("lr"),)

    @override
    def _to_minibatch(self, batch: Batch, rows: KeyedMatrix) -> KeyedMinibatch:
        return LogisticMinibatch(batch, rows, self.offset)
