"""Estimators for scikit-learn (the extra ``paceline[sklearn]``): sparse models, trained in this process or on a
cluster."""

try:
    import sklearn
except ImportError as error:
    raise ImportError(
        "paceline.sklearn needs scikit-learn, which is not installed: pip install 'paceline[sklearn]'"
    ) from error
del sklearn

from paceline.sklearn.factorization_machine import FactorizationMachine  # noqa: E402
from paceline.sklearn.linear_models import LinearRegression, PoissonRegressor  # noqa: E402
from paceline.sklearn.logistic_regression import LogisticRegression  # noqa: E402

__all__ = ["FactorizationMachine", "LinearRegression", "LogisticRegression", "PoissonRegressor"]
