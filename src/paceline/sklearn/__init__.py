"""Estimators for scikit-learn (the extra ``paceline[sklearn]``). They train in this process or on a cluster."""

try:
    import sklearn as _sklearn  # noqa: F401
except ImportError as error:
    raise ImportError(
        "paceline.sklearn needs scikit-learn, which is not installed: pip install 'paceline[sklearn]'"
    ) from error

from paceline.sklearn.estimators import FactorizationMachine, LinearRegression, LogisticRegression, PoissonRegressor

__all__ = ["FactorizationMachine", "LinearRegression", "LogisticRegression", "PoissonRegressor"]
