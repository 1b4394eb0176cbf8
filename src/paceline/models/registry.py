"""Models by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from paceline.errors import UsageError
from paceline.models.base import SparseModel
from paceline.models.deep.dcn import DeepCrossNetwork
from paceline.models.deep.deepfm import DeepFactorizationMachine
from paceline.models.ffm import FieldAwareMachine
from paceline.models.fm import SparseFactorizationMachine
from paceline.models.logistic import SparseLogisticRegression
from paceline.models.poisson import PoissonRegression
from paceline.models.regression import LeastSquares
from paceline.models.softmax import SoftmaxRegression

MODELS: Final[dict[str, type[SparseModel]]] = {
    kind.name: kind
    for kind in (
        SparseLogisticRegression,
        SparseFactorizationMachine,
        FieldAwareMachine,
        DeepFactorizationMachine,
        DeepCrossNetwork,
        LeastSquares,
        PoissonRegression,
        SoftmaxRegression,
    )
}


def make_model(name: str = SparseLogisticRegression.name, **settings: Any) -> SparseModel:
    """Create a model. A setting that is None gets its default. Raises UsageError for settings of other models."""
    kind = MODELS.get(name)
    if kind is None:
        raise UsageError(f"model={name!r}: expected one of {', '.join(MODELS)}")
    given = {key: value for key, value in settings.items() if value is not None}
    for key in given:
        if key not in _settings_of(kind):
            takers = ", ".join(model.name for model in MODELS.values() if key in _settings_of(model))
            raise UsageError(f"--{key.replace('_', '-')} is not an option of --model {name}, only of {takers}")
    return kind(**given)


def read_model_settings(described: Mapping[str, Any]) -> SparseModel:
    """Create the model for the output of :meth:`SparseModel.describe`; other fields are ignored."""
    kind = MODELS.get(described.get("kind", ""))
    if kind is None:
        raise UsageError(f"model of kind {described.get('kind')!r}: expected one of {', '.join(MODELS)}")
    known = _settings_of(kind)
    return kind(**{key: value for key, value in described.items() if key in known})


def _settings_of(kind: type[SparseModel]) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def describe_settings(described: Mapping[str, Any]) -> str:
    settings = ", ".join(f"{key}={value}" for key, value in described.items() if key != "kind")
    return f"{described.get('kind')}({settings})" if settings else str(described.get("kind"))
