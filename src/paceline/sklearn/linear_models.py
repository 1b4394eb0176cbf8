"""Sparse linear regression of quantities and of counts, as estimators of scikit-learn."""

from __future__ import annotations

from abc import ABC
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.base import RegressorMixin
from sklearn.utils.validation import check_is_fitted
from typing_extensions import Self, override

from paceline.errors import UsageError
from paceline.models.base import SparseModel
from paceline.models.registry import make_model
from paceline.sklearn.estimator import SparseEstimator
from paceline.tables.types import Doubles, Floats


class Regressor(RegressorMixin, SparseEstimator, ABC):
    """An estimator of numbers by a linear model. Abstract: :meth:`_model` is missing."""

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train on more examples: one pass, in this process, in their order.

        By the examples of the first call rate, scale and the targets' mean are chosen.
        """
        self._check_parameters()
        self._check_can_learn_on()
        X, targets = self._read_training_data(X, y, reset=not hasattr(self, "_tables"))
        return self._learn_on(self._to_batch(X, self._to_labels(targets), sample_weight))

    def predict(self, X: Any) -> Doubles:
        """Return what is expected of each example (float64 [n])."""
        examples = self._prepare(X)
        return self._tables.predict(examples)

    @property
    def coef_(self) -> Doubles:
        """The weights by column (float64 [features]); of a hashed frame there are none."""
        return self._coefficients()[:, 0]

    @property
    def intercept_(self) -> float:
        """The bias."""
        check_is_fitted(self, "_tables")
        return float(self._tables.linear_weights().bias[0])

    @override
    def _learn_targets(self, targets: npt.NDArray[Any]) -> None:
        self._to_labels(targets)

    @override
    def _to_labels(self, targets: npt.NDArray[Any]) -> Floats:
        try:
            with np.errstate(over="ignore"):
                labels = targets.astype(np.float32)
        except (TypeError, ValueError):
            raise UsageError(f"y has {targets[0]!r}, of type {targets.dtype}: expected numbers") from None
        if not np.isfinite(labels).all():
            raise UsageError("y has NaN, an infinity or a number beyond float32: expected finite numbers")
        return labels


class LinearRegression(Regressor):
    """Linear regression by minibatches, as ``paceline train --model regression`` has it: squared loss.

    X and the parameters are as those of :class:`LogisticRegression`, but there is no `class_weight`. After :meth:`fit`
    there is `n_features_in_`; `coef_` (float64 [features]) and `intercept_` are made when asked for; `coef_` needs a
    model that is linear in X, as there.
    """

    @override
    def _model(self) -> SparseModel:
        return make_model("regression")


class PoissonRegressor(Regressor):
    """Poisson regression by minibatches, as ``paceline train --model poisson`` has it: counts, with a logarithmic link.

    All is as in :class:`LinearRegression`, but `coef_` and `intercept_` give the logarithm of what is expected.
    """

    @override
    def _model(self) -> SparseModel:
        return make_model("poisson")

    @override
    def _to_labels(self, targets: npt.NDArray[Any]) -> Floats:
        labels = super()._to_labels(targets)
        if (labels < 0).any():
            raise UsageError(
                f"y has {labels.min():g}: Some value(s) of y are out of the valid range of counts, from 0 up"
            )
        if not labels.any():
            raise UsageError("y has no count above 0: expected some")
        return labels

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.positive_only = True
        return tags
