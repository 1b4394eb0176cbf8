"""Sparse logistic regression as an estimator of scikit-learn."""

from __future__ import annotations

import numpy as np
from sklearn.utils.validation import check_is_fitted
from typing_extensions import override

from paceline.models.base import SparseModel
from paceline.models.registry import make_model
from paceline.sklearn.binary_classifier import BinaryClassifier
from paceline.tables.types import Doubles


class LogisticRegression(BinaryClassifier):
    """Logistic regression by minibatches, as ``paceline train`` has it: for two classes.

    X is an array or a SciPy sparse matrix of numbers [n, features]; or a DataFrame of pandas or polars, whose columns
    that are not numbers are hashed as categories, without a vocabulary.

    Parameters, whose defaults are those of ``paceline train``:

    - `update`, `lr`, `l1`, `l2`, `beta`: the update rule and its settings, as options of that command.
    - `epochs`, `batch_size`: passes over the data, and examples per minibatch; None: chosen, as the rate (FTRL's alpha)
      is, by a look at a sample of X, whose values are scaled too (docs/defaults.md).
    - `shuffle`, `random_state`: whether examples are shuffled before each pass (on a cluster: once), and by what.
    - `class_weight`: None; ``balanced``, so that both classes count as much together; or a dict of weights by class. It
      multiplies on `sample_weight`, and counts on a cluster too.
    - `workers`: None trains in this process. A number starts a cluster on this machine for each :meth:`fit`, of so many
      worker processes and `servers` servers, with this `consistency`.
    - `scheduler`, `token`: train on the cluster that this scheduler leads; its workers must see the folder for
      temporary files (TMPDIR) of this machine. `token` may be in PACELINE_TOKEN instead.

    After :meth:`fit` there are `classes_` and `n_features_in_`; `coef_` and `intercept_` are made when asked for, but
    not of a frame whose columns were hashed.
    """

    @override
    def _model(self) -> SparseModel:
        return make_model("lr")

    @property
    def coef_(self) -> Doubles:
        """The weights by column (float64 [1, features]); of a hashed frame there are none."""
        check_is_fitted(self, "_tables")
        if self._columns is not None:
            raise AttributeError("the columns of a frame were hashed: a category has a key, and no number")
        weights, out = self._tables.linear_weights(), np.zeros((1, self.n_features_in_))
        out[0, weights.keys.astype(np.int64)] = weights.values[:, 0]
        return out

    @property
    def intercept_(self) -> Doubles:
        """The bias (float64 [1])."""
        check_is_fitted(self, "_tables")
        return self._tables.linear_weights().bias.astype(np.float64)
