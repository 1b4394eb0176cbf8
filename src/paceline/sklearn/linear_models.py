"""Sparse linear regression and Poisson regression, as estimators of scikit-learn."""

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
    """An estimator of numbers with a linear model. Abstract: a subclass defines :meth:`_model`."""

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train on more examples: one pass, in this process, in the order of X.

        The examples of the first call determine the learning rate, the scale and the mean target.
        """
        self._check_parameters()
        self._check_can_learn_on()
        X, targets = self._read_training_data(X, y, reset=not hasattr(self, "_tables"))
        return self._learn_on(self._to_batch(X, self._to_labels(targets), sample_weight))

    def predict(self, X: Any) -> Doubles:
        """Return the expected target of each example (float64 [n])."""
        examples = self._prepare(X)
        return self._tables.predict(examples)

    @property
    def coef_(self) -> Doubles:
        """The weights by column (float64 [features]). Raises AttributeError after training on a hashed frame."""
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
    """Linear regression by minibatches with squared loss, like ``paceline train --model regression``.

    X and the parameters are those of :class:`LogisticRegression`, without `class_weight`. :meth:`fit` sets
    `n_features_in_`, `coef_` (float64 [features]) and `intercept_`. Reading `coef_` raises AttributeError if the model
    is not linear in X.
    """

    @override
    def _model(self) -> SparseModel:
        return make_model("regression")


class PoissonRegressor(Regressor):
    """Poisson regression of counts by minibatches, like ``paceline train --model poisson``, with a logarithmic link.

    Use it like :class:`LinearRegression`. `coef_` and `intercept_` predict the logarithm of the expected count.
    """

    @override
    def _model(self) -> SparseModel:
        return make_model("poisson")

    @override
    def _to_labels(self, targets: npt.NDArray[Any]) -> Floats:
        labels = super()._to_labels(targets)
        if (labels < 0).any():
            raise UsageError(
                f"y has {labels.min():g}: Some value(s) of y are out of the valid range of counts, 0 or more"
            )
        if not labels.any():
            raise UsageError("y has no count above 0: expected at least one")
        return labels

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.positive_only = True
        return tags
