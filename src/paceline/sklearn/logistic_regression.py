"""Sparse logistic regression, of two classes and of more, as an estimator of scikit-learn."""

from __future__ import annotations

import numpy as np
from sklearn.utils.validation import check_is_fitted
from typing_extensions import override

from paceline.models.base import SparseModel
from paceline.models.registry import make_model
from paceline.sklearn.classifier import Classifier
from paceline.tables.types import Doubles


class LogisticRegression(Classifier):
    """Logistic regression by minibatches, as ``paceline train`` has it; of more than two classes multinomial.

    X is an array or a SciPy sparse matrix of numbers [n, features]; or a DataFrame of pandas or polars, whose columns
    that are not numbers are hashed as categories, without a vocabulary.

    Parameters, whose defaults are those of ``paceline train``:

    - `update`, `lr`, `l1`, `l2`, `beta`: the update rule and its settings, as options of that command.
    - `epochs`, `batch_size`: passes over the data, and examples per minibatch; None: chosen, as the rate (FTRL's alpha)
      is, by a look at a sample of X, whose values are scaled too (docs/defaults.md).
    - `shuffle`, `random_state`: whether examples are shuffled before each pass (on a cluster: once), and by what.
    - `numeric_scale`: how numbers are brought to a scale, as ``--numeric-scale`` has it: ``auto`` takes logarithms, or
      bins by quantiles, of columns whose effect is bent (docs/data.md), where that predicts better what is held out.
      ``standard`` leaves the model linear in X, ``none`` leaves X as it is.
    - `class_weight`: None; ``balanced``, so that both classes count as much together; or a dict of weights by class. It
      multiplies on `sample_weight`, and counts on a cluster too.
    - `workers`: None trains in this process. A number starts a cluster on this machine for each :meth:`fit`, of so many
      worker processes and `servers` servers, with this `consistency`.
    - `scheduler`, `token`: train on the cluster that this scheduler leads; its workers must see the folder for
      temporary files (TMPDIR) of this machine. `token` may be in PACELINE_TOKEN instead.

    After :meth:`fit` there are `classes_` and `n_features_in_`; `coef_` and `intercept_` are made when asked for;
    `coef_` needs a model that is linear in X: there is none of a frame whose columns were hashed, nor where columns are
    on logarithms or in bins.
    """

    @override
    def _model(self) -> SparseModel:
        classes = tuple(range(len(self.classes_)))
        return make_model("lr") if len(classes) == 2 else make_model("softmax", classes=classes)

    @property
    def coef_(self) -> Doubles:
        """The weights by column (float64 [1, features], of more than two classes [classes, features])."""
        return self._coefficients().T

    @property
    def intercept_(self) -> Doubles:
        """The bias (float64 [1], of more than two classes [classes])."""
        check_is_fitted(self, "_tables")
        return self._tables.linear_weights().bias.astype(np.float64)
