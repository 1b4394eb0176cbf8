"""Factorization machine (Rendle, ICDM 2010): a weight and a vector per feature; pairs contribute products of vectors.

margin = offset + bias + Σ w[k]·x_k + Σ_{k<l} ⟨v[k], v[l]⟩·x_k·x_l. The vectors have a separate table and update rule. A
feature has a vector only if it is frequent enough and its weight is not 0, because vectors of rare features would take
memory and overfit (Li et al., DiFacto, WSDM 2016, section 3). A third table counts each feature's occurrences up to
this frequency.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from paceline.data import Batch
from paceline.errors import UsageError
from paceline.kernels.csr import add_interactions, interaction_gradients
from paceline.models.base import KeyedMatrix, KeyedMinibatch, ModelTable, SparseModel
from paceline.models.clicks import ClickMinibatch, ClickProbabilityModel
from paceline.models.features.counting import MOST_COUNTED
from paceline.models.logistic import LogisticMinibatch, SparseLogisticRegression
from paceline.tables.initializers import Normal
from paceline.tables.rules import SGD, Adagrad
from paceline.tables.settings import check_number
from paceline.tables.types import Floats, Keys

MAX_FACTORS = 1024


class FactorizationMinibatch(ClickMinibatch):
    """A minibatch of clicks for a factorization machine."""

    __slots__ = ("_active", "_factors", "_model", "_new", "_sums")

    def __init__(self, model: FactorModel, batch: Batch, rows: KeyedMatrix) -> None:
        super().__init__(batch, rows)
        self._model = model
        self._active = self._new = np.empty(0, np.int64)
        self._factors = self._sums = np.empty((0, 0), np.float32)

    @property
    @override
    def keys(self) -> tuple[Keys, ...]:
        features = self._rows.keys[:-1]
        return self._rows.keys, features, features

    @property
    @override
    def gradient_keys(self) -> tuple[Keys, ...]:
        keys = self._rows.keys
        return keys, keys[self._active], keys[self._new]

    @override
    def gradients(self, weights: Sequence[Floats]) -> tuple[Sequence[Floats], float]:
        rows, first = self._rows, weights[0].reshape(-1)
        residuals = np.empty(self.num_examples, np.float32)
        loss = self._forward(weights, residuals)
        gradient = self._linear_gradient(residuals, residuals.sum(dtype=np.float64))
        of_factors = np.empty(weights[1].shape, np.float32)
        self._pair_gradients(residuals, of_factors)
        counts = weights[2].reshape(-1)
        self._active = np.flatnonzero(self._are_active(first, counts))
        self._new = np.flatnonzero(counts < self._model.value_of("factor_min_count"))
        occurrences = np.bincount(rows.indices, minlength=len(counts))[self._new]
        return (gradient, of_factors[self._active], -occurrences.astype(np.float32)), loss

    @override
    def margins(self, weights: Sequence[Floats]) -> Floats:
        first = weights[0].reshape(-1)
        margins = self._linear_margins(first)
        margins += first[-1] + np.float32(self._model.offset)
        self._add_pairs(weights[1], self._are_active(first, weights[2].reshape(-1)), margins)
        return margins

    def _are_active(self, first: Floats, counts: Floats) -> npt.NDArray[np.bool_]:
        active: npt.NDArray[np.bool_] = (first[:-1] != 0) & (counts >= self._model.value_of("factor_min_count"))
        return active

    def _add_pairs(self, factors: Floats, active: npt.NDArray[np.bool_], margins: Floats) -> None:
        rows = self._rows
        self._factors = factors * active[:, np.newaxis]
        self._sums = np.empty((self.num_examples, factors.shape[1]), np.float32)
        add_interactions(rows.indptr, rows.indices, rows.values, self._factors, self._sums, margins)

    def _pair_gradients(self, residuals: Floats, out: Floats) -> None:
        """Write the factors' gradients, given the loss's derivatives with respect to the last margins."""
        rows = self._rows
        interaction_gradients(rows.indptr, rows.indices, rows.values, self._factors, self._sums, residuals, out)


class MinibatchWithoutFactors(LogisticMinibatch):
    """A minibatch of clicks for a factorization machine in which no feature gets factors."""

    __slots__ = ("_num_factors",)

    def __init__(self, model: FactorModel, batch: Batch, rows: KeyedMatrix) -> None:
        super().__init__(batch, rows, model.offset)
        self._num_factors = model.num_factors

    @property
    @override
    def keys(self) -> tuple[Keys, ...]:
        features = self._rows.keys
        return features, features[:0], features[:0]

    @override
    def gradients(self, weights: Sequence[Floats]) -> tuple[Sequence[Floats], float]:
        gradients, loss = super().gradients(weights)
        return (*gradients, np.empty((0, self._num_factors), np.float32), np.empty(0, np.float32)), loss


@dataclasses.dataclass(frozen=True, kw_only=True)
class FactorModel(ClickProbabilityModel):
    """P(click) from a weight and factors per feature. Abstract: subclasses choose the pairs of factors.

    `factor_lr`, `factor_l1` and `factor_l2` are AdaGrad's rate and penalties for the factors, and `factor_std` is the
    factors' initial standard deviation. A feature gets factors after `factor_min_count` occurrences. With
    `MOST_COUNTED` no feature gets factors.
    """

    usual: ClassVar[Mapping[str, Any]] = {
        "factor_lr": 0.03,
        "factor_l2": 0.5,
        "factor_min_count": 300,
    }

    minibatch: ClassVar[type[FactorizationMinibatch]] = FactorizationMinibatch

    dim: int = 8
    factor_lr: float | None = None
    factor_l1: float = 0.0
    factor_l2: float | None = None
    factor_std: float = 0.05
    factor_min_count: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.dim <= MAX_FACTORS:
            raise UsageError(f"--dim {self.dim}: expected 1 to {MAX_FACTORS:,} factors")
        check_penalties(self, "factor_lr", "factor_l1", "factor_l2", "factor_std")
        if not 0 <= self.value_of("factor_min_count") <= MOST_COUNTED:
            raise UsageError(f"--factor-min-count {self.factor_min_count}: expected 0 to {MOST_COUNTED:,}")
        _ = self.parameter_tables  # raises UsageError for invalid settings

    @property
    @override
    def parameter_tables(self) -> tuple[ModelTable, ...]:
        factors = ModelTable(
            f"{self.name} factors",
            dim=self.num_factors,
            update=Adagrad(
                lr=self.value_of("factor_lr"),
                l1=self.factor_l1,
                weight_decay=self.value_of("factor_l2"),
                initial_accumulator=1.0,
            ),
            initializer=Normal(std=self.factor_std),
        )
        return ModelTable(self.name), factors, ModelTable(f"{self.name} counts", update=SGD(lr=1.0), is_count=True)

    @property
    def num_factors(self) -> int:
        return self.dim

    @override
    def _to_minibatch(self, batch: Batch, rows: KeyedMatrix) -> KeyedMinibatch:
        if self.value_of("factor_min_count") == MOST_COUNTED:
            return MinibatchWithoutFactors(self, batch, rows)
        return self.minibatch(self, batch, rows)

    @property
    def linear(self) -> SparseLogisticRegression:
        return SparseLogisticRegression(
            offset=self.offset,
            positive=self.positive,
            interactions=self.interactions,
            min_count=self.min_count,
            count_cells=self.count_cells,
        )


def check_penalties(model: SparseModel, *names: str) -> None:
    for name in names:
        value = model.value_of(name)
        check_number(f"--{name.replace('_', '-')} {value:g}", value, 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseFactorizationMachine(FactorModel):
    """P(click) from a weight and `dim` factors per feature."""

    name: ClassVar[str] = "fm"
    title: ClassVar[str] = "a factorization machine"
