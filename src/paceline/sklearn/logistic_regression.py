"""Sparse logistic regression for two or more classes, as an estimator of scikit-learn."""

from __future__ import annotations

import numpy as np
from sklearn.utils.validation import check_is_fitted
from typing_extensions import override

from paceline.models.base import SparseModel
from paceline.models.registry import make_model
from paceline.sklearn.classifier import Classifier
from paceline.tables.types import Doubles


class LogisticRegression(Classifier):
    """Logistic regression by minibatches, like ``paceline train``; multinomial for more than two classes.

    X is an array or SciPy sparse matrix of numbers [n, features], or a DataFrame of pandas or polars. Columns of a
    DataFrame that are not numbers are hashed as categories.

    Parameters, with the defaults of ``paceline train``:

    - `update`, `lr`, `l1`, `l2`, `beta`: the update rule and its settings, with the meaning of the command's options.
    - `epochs`, `batch_size`: passes over the data, and examples per minibatch. None chooses them on a sample of X, like
      the learning rate (FTRL's alpha) and the scale of values (docs/explanation/defaults.md).
    - `shuffle`, `random_state`: whether examples are shuffled before each pass (on a cluster: once), and the seed.
    - `numeric_scale`: the scale of numbers, as ``--numeric-scale``. ``auto`` uses logarithms or bins by quantiles for
      columns with a nonlinear effect (guides/data.md), if they predict held-out examples better. ``standard`` keeps the
      model linear in X, ``none`` keeps X unchanged.
    - `class_weight`: None; ``balanced``, which gives all classes the same total weight; or a dict of weights by class.
      It multiplies `sample_weight`, and also works on a cluster.
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
