"""Sparse estimators for scikit-learn: logistic regression, factorization machine, linear and Poisson regression."""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass
from numbers import Integral
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.utils._param_validation import Interval, StrOptions
from sklearn.utils.class_weight import compute_class_weight
from sklearn.utils.multiclass import check_classification_targets, type_of_target
from sklearn.utils.validation import check_is_fitted
from typing_extensions import Self, override

from paceline.errors import UsageError
from paceline.models.base import SparseModel
from paceline.models.features.counting import MOST_COUNTED
from paceline.models.fm import MAX_FACTORS
from paceline.models.registry import make_model
from paceline.sklearn.base import AT_LEAST_0, PARAMETERS, SparseEstimator
from paceline.tables.types import Doubles, Floats
from paceline.training.weighting import BALANCED, Weighting

CLASSIFIER_PARAMETERS: Final[dict[str, list[Any]]] = {
    **PARAMETERS,
    "class_weight": [dict, StrOptions({BALANCED}), None],
}
"""The valid values of a classifier's parameters."""


@dataclass(kw_only=True, eq=False, repr=False)
class Classifier(ClassifierMixin, SparseEstimator, ABC):
    """An estimator of two or more classes. Abstract: a subclass defines :meth:`_model`."""

    _parameter_constraints = CLASSIFIER_PARAMETERS
    _is_binary: ClassVar[bool] = False
    """Whether the estimator supports only two classes."""

    class_weight: Any = None

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> Self:
        """Train on more examples in this process, with one pass in the order of X.

        Pass all `classes` in the first call. The examples of the first call determine the learning rate and the scale.
        """
        self._check_parameters()
        self._check_can_learn_on()
        is_first = not hasattr(self, "_tables")
        X, targets = self._read_training_data(X, y, reset=is_first)
        if is_first:
            if classes is None:
                raise UsageError("the first call of partial_fit needs all classes: partial_fit(X, y, classes=[0, 1])")
            self._learn_targets(np.asarray(classes))
        elif classes is not None and not np.array_equal(self.classes_, np.unique(classes)):
            raise UsageError(f"classes={classes!r}: the first call had {self.classes_.tolist()}. Pass the same classes")
        if self.class_weight == BALANCED:
            raise UsageError(
                "class_weight='balanced' needs the frequencies of the classes, which partial_fit does not have. Pass "
                "weights, for example from sklearn.utils.class_weight.compute_class_weight, or call fit"
            )
        rows = self._to_batch(X, self._to_labels(targets), sample_weight)
        return self._learn_on(self._weighting(targets).weighted(rows))

    def decision_function(self, X: Any) -> Doubles:
        """Return the logit of the second class (float64 [n]).

        If there are more than two classes, return the logarithm of each class's probability (float64 [n, classes]).
        """
        examples = self._prepare(X)
        return self._tables.margins(examples)

    def predict_proba(self, X: Any) -> Doubles:
        """Return the probabilities of the classes, in the order of `classes_` (float64 [n, classes])."""
        found: Doubles = np.exp(self.predict_log_proba(X))
        return found

    def predict_log_proba(self, X: Any) -> Doubles:
        """Return the logarithms of the classes' probabilities, in the order of `classes_` (float64 [n, classes])."""
        margins = self.decision_function(X)
        if margins.ndim == 2:
            return margins
        return np.column_stack([-np.logaddexp(0.0, margins), -np.logaddexp(0.0, -margins)])

    def predict(self, X: Any) -> npt.NDArray[Any]:
        """Return the most probable class of each example."""
        margins = self.decision_function(X)
        places = (margins > 0).astype(np.int64) if margins.ndim == 1 else margins.argmax(axis=1)
        found: npt.NDArray[Any] = self.classes_[places]
        return found

    @override
    def _learn_targets(self, targets: npt.NDArray[Any]) -> None:
        check_classification_targets(targets)
        classes = np.unique(targets)
        if self._is_binary and len(classes) > 2:
            raise UsageError(
                f"Only binary classification is supported. The type of the target is {type_of_target(targets)}: y has "
                f"{len(classes)} classes"
            )
        if len(classes) < 2:
            raise UsageError(f"y has one class, {classes.tolist()[0]!r}: expected two or more")
        self.classes_ = classes

    @override
    def _to_labels(self, targets: npt.NDArray[Any]) -> Floats:
        unknown = np.setdiff1d(targets, self.classes_)
        if len(unknown):
            raise UsageError(f"y has {unknown.tolist()[0]!r}: expected one of the classes {self.classes_.tolist()}")
        return np.searchsorted(self.classes_, targets).astype(np.float32)

    @override
    def _weighting(self, targets: npt.NDArray[Any]) -> Weighting:
        if self.class_weight is None:
            return Weighting()
        try:
            found = compute_class_weight(self.class_weight, classes=self.classes_, y=targets)
        except ValueError:
            raise UsageError(
                f"class_weight={self.class_weight!r}: expected weights of the classes {self.classes_.tolist()}"
            ) from None
        if not ((np.isfinite(found) & (found >= 0)).all() and found.any()):
            raise UsageError(f"class_weight={self.class_weight!r}: expected finite weights of 0 or more, one above 0")
        return Weighting(classes={str(label): float(weight) for label, weight in enumerate(found)})

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = not self._is_binary
        return tags


class LogisticRegression(Classifier):
    """Logistic regression (multinomial if there are more than two classes), trained like ``paceline train``.

    X is an array or SciPy sparse matrix of numbers [n, features], or a DataFrame of pandas or polars. Columns of a
    DataFrame that are not numbers are hashed as categories.

    Parameters, with the defaults of ``paceline train``:

    - `update`, `lr`, `l1`, `l2`, `beta`: the update rule and its settings, with the meaning of the command's options.
    - `epochs`, `batch_size`: passes over the data, and examples per minibatch. If they are None, they are chosen on a
      sample of X, like the learning rate (FTRL's alpha) and the scale of values (docs/explanation/defaults.md).
    - `shuffle`, `random_state`: whether the examples are shuffled before each later pass (on a cluster: once), and the
      seed of the order.
    - `numeric_scale`: the scale of numbers, as ``--numeric-scale``. ``auto`` uses logarithms or bins by quantiles for
      columns with a nonlinear effect (guides/data.md), if they predict held-out examples better. ``standard`` keeps the
      model linear in X, ``none`` keeps X unchanged.
    - `class_weight`: None; ``balanced``, which gives all classes the same total weight; or a dict of weights by class.
      The class weights multiply `sample_weight`, and also work on a cluster.
    - `workers`: None trains in this process. A number makes each :meth:`fit` start a cluster on this machine with
      `workers` worker processes, `servers` servers and this `consistency`.
    - `scheduler`, `token`: train on this scheduler's cluster. The cluster's workers must see this machine's folder for
      temporary files (TMPDIR). The environment variable PACELINE_TOKEN may contain the token instead.

    :meth:`fit` sets `classes_`, `n_features_in_`, `coef_` and `intercept_`. Reading `coef_` raises AttributeError if
    the model is not linear in X, which is the case after training on a hashed frame, or with logarithms or bins.
    """

    @override
    def _model(self) -> SparseModel:
        classes = tuple(range(len(self.classes_)))
        return make_model("lr") if len(classes) == 2 else make_model("softmax", classes=classes)

    @property
    def coef_(self) -> Doubles:
        """The weights by column (float64 [1, features]; for more than two classes [classes, features])."""
        return self._coefficients().T

    @property
    def intercept_(self) -> Doubles:
        """The bias (float64 [1]; for more than two classes [classes])."""
        check_is_fitted(self, "_tables")
        return self._tables.linear_weights().bias.astype(np.float64)


@dataclass(kw_only=True, eq=False, repr=False)
class FactorizationMachine(Classifier):
    """Factorization machine for two classes, trained like ``paceline train --model fm``.

    Unlike a linear model, it learns the effects of pairs of features. Each feature has a weight, as in
    :class:`LogisticRegression`, and `dim` factors, whose products are the weights of pairs (Rendle, ICDM 2010). X has
    the same form as for :class:`LogisticRegression`.

    Parameters, with the defaults of ``paceline train --model fm``:

    - `dim`: number of factors per feature.
    - `factor_lr`, `factor_l1`, `factor_l2`: learning rate, L1 and L2 penalty of AdaGrad for the factors.
    - `factor_min_count`: a feature gets factors after this number of occurrences, counted over all passes.
    - `update`, `lr`, `l1`, `l2`, `beta`: the update rule of the weights and its settings. A feature with weight 0 has
      no factors. Pass l1=0 to keep features whose effect is only in pairs.
    - `random_state`: also seeds the factors, except on a cluster.
    - All other parameters are those of :class:`LogisticRegression`.

    :meth:`fit` sets `classes_` and `n_features_in_`.
    """

    _is_binary = True
    _parameter_constraints = {  # noqa: RUF012
        **CLASSIFIER_PARAMETERS,
        "dim": [Interval(Integral, 1, MAX_FACTORS, closed="both"), None],
        "factor_lr": [AT_LEAST_0, None],
        "factor_l1": [AT_LEAST_0, None],
        "factor_l2": [AT_LEAST_0, None],
        "factor_min_count": [Interval(Integral, 0, MOST_COUNTED, closed="both"), None],
    }

    dim: int | None = None
    factor_lr: float | None = None
    factor_l1: float | None = None
    factor_l2: float | None = None
    factor_min_count: int | None = None

    @override
    def _model(self) -> SparseModel:
        return make_model(
            "fm",
            dim=self.dim,
            factor_lr=self.factor_lr,
            factor_l1=self.factor_l1,
            factor_l2=self.factor_l2,
            factor_min_count=self.factor_min_count,
        )


class Regressor(RegressorMixin, SparseEstimator, ABC):
    """An estimator of numbers with a linear model. Abstract: a subclass defines :meth:`_model`."""

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train on more examples in this process, with one pass in the order of X.

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
    """Linear regression with squared loss, trained like ``paceline train --model regression``.

    X and the parameters are those of :class:`LogisticRegression`, without `class_weight`. :meth:`fit` sets
    `n_features_in_`, `coef_` (float64 [features]) and `intercept_`. Reading `coef_` raises AttributeError if the model
    is not linear in X.
    """

    @override
    def _model(self) -> SparseModel:
        return make_model("regression")


class PoissonRegressor(Regressor):
    """Poisson regression of counts with a logarithmic link, trained like ``paceline train --model poisson``.

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
