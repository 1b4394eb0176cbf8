"""Factorization machine as an estimator of scikit-learn."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral

from sklearn.utils._param_validation import Interval
from typing_extensions import override

from paceline.models.base import SparseModel
from paceline.models.features.counting import MOST_COUNTED
from paceline.models.fm import MAX_FACTORS
from paceline.models.registry import make_model
from paceline.sklearn.classifier import CLASSIFIER_PARAMETERS, Classifier
from paceline.sklearn.estimator import AT_LEAST_0


@dataclass(kw_only=True, eq=False, repr=False)
class FactorizationMachine(Classifier):
    """Factorization machine for two classes by minibatches, like ``paceline train --model fm``.

    In contrast to a linear model it learns the effects of pairs of features. Each feature has a weight, as in
    :class:`LogisticRegression`, and `dim` factors, whose products are the weights of pairs (Rendle, ICDM 2010). X has
    the same form as for :class:`LogisticRegression`.

    Parameters, with the defaults of ``paceline train --model fm``:

    - `dim`: number of factors per feature.
    - `factor_lr`, `factor_l1`, `factor_l2`: learning rate, L1 and L2 penalty of AdaGrad for the factors.
    - `factor_min_count`: occurrences, over all passes, after which a feature gets factors.
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
