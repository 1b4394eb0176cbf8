"""Summarize a saved model, compare two models, and compare predictions with labels."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paceline.data import Columns
from paceline.data.key_scaling import read_key_scaling
from paceline.errors import DataError, UsageError
from paceline.inference.weights import Weights, read_weights
from paceline.models.features.interactions import Interactions
from paceline.models.metrics import Evaluation
from paceline.models.prediction import Predictor
from paceline.models.stored import StoredModel, read_stored_model
from paceline.tables.types import Doubles, Floats, Keys
from paceline.training.bad_data import find_bad_lines, no_line_left
from paceline.training.files.feature_names import name_features

_BINS = 21


@dataclass(frozen=True)
class Histogram:
    """The number of values in each interval between successive edges."""

    edges: list[float]
    counts: list[int]


@dataclass(frozen=True)
class LargeWeight:
    """A feature with a large weight. `weight` is a list if the feature has several weights."""

    key: int
    name: str | None
    weight: float | list[float]


@dataclass(frozen=True)
class TableSummary:
    """Statistics of the values in a table, without the bias."""

    name: str
    dim: int
    features: int
    nonzero: int
    l1_norm: float
    l2_norm: float
    largest: float
    bias: float | list[float]
    histogram: Histogram
    """Histogram of the nonzero values."""
    largest_weights: list[LargeWeight]


@dataclass(frozen=True)
class ModelSummary:
    """Summary of a saved model."""

    directory: str
    kind: str
    finished: bool
    """False if the training was interrupted, or if the model is in a snapshot."""
    paceline: str
    """The version of Paceline that wrote the model."""
    description: dict[str, Any]
    """The remaining manifest: format, columns and settings."""
    tables: list[TableSummary]

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class ModelDifference:
    """The differences between two models, by table."""

    tables: list[TableDifference]

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class TableDifference:
    """The differences between two tables. The values of a missing feature count as 0."""

    name: str
    l2_norms: tuple[float, float]
    distance: float
    cosine: float | None
    """The cosine of the angle between the tables; None if one table is zero."""
    only_in: tuple[int, int]
    """How many features have a nonzero weight only in the first model, and how many only in the second."""
    changed: int
    """Number of features with different weights."""
    largest_changes: list[tuple[int, float | list[float], float | list[float]]]
    """The key, the weight in the first model and the weight in the second."""


def inspect_model(
    directory: str | os.PathLike[str], top: int = 20, names: dict[int, str] | None = None
) -> ModelSummary:
    """Summarize a saved model with its `top` largest weights. `names` maps keys to names."""
    saved = read_stored_model(directory)
    described = dict(saved.described)
    kind, finished = str(described.pop("kind", "")), bool(described.pop("finished", True))
    scaling = described.pop("scaling", None)
    if scaling is not None:
        described["scaling"] = f"values of {len(scaling['keys']):,} keys, other values by {scaling['other_scale']:g}"
        if scaling.get("edges"):
            described["scaling"] += f"; {len(scaling['edges']):,} keys in bins"
    _check_kind(saved, kind)
    tables = [_summarize(table.spec.name, read_weights(saved, table), top, names or {}) for table in saved.tables]
    return ModelSummary(str(saved.directory), kind, finished, saved.paceline, described, tables)


def name_weights(summary: ModelSummary, files: Sequence[str], format: str, columns: Columns | None) -> ModelSummary:
    """Return the summary with the names, from the data files, of the features with the largest weights."""
    keys = [weight.key for table in summary.tables for weight in table.largest_weights]
    interactions = Interactions.of(summary.description.get("interactions"))
    scaling = read_key_scaling(read_stored_model(summary.directory).described)
    names = name_features(files, format, columns, interactions, np.array(keys, np.uint64), scaling)
    tables = [
        dataclasses.replace(
            table,
            largest_weights=[
                dataclasses.replace(weight, name=names.get(weight.key, weight.name)) for weight in table.largest_weights
            ],
        )
        for table in summary.tables
    ]
    return dataclasses.replace(summary, tables=tables)


def compare_models(first: str | os.PathLike[str], second: str | os.PathLike[str], top: int = 20) -> ModelDifference:
    """Compare two models of the same kind and list the `top` largest changes. Raises UsageError for different kinds."""
    one, other = read_stored_model(first), read_stored_model(second)
    kinds = [str(model.described.get("kind", "")) for model in (one, other)]
    _check_kind(one, kinds[0])
    shapes = [[(t.spec.name, t.spec.kind, t.spec.dim) for t in model.tables] for model in (one, other)]
    if kinds[0] != kinds[1] or shapes[0] != shapes[1]:
        raise UsageError(
            f"cannot compare {first}, of kind {kinds[0]!r}, with {second}, of kind {kinds[1]!r}: kinds and dimensions "
            "must be equal"
        )
    pairs = zip(one.tables, other.tables, strict=True)
    return ModelDifference([_compare(a.spec.name, read_weights(one, a), read_weights(other, b), top) for a, b in pairs])


def _check_kind(saved: StoredModel, kind: str) -> None:
    if not kind or any(table.spec.kind != "sparse" for table in saved.tables):
        raise UsageError(f"{saved.directory} holds tables of your own program. Pass a model of 'paceline train'")


def _summarize(name: str, weights: Weights, top: int, names: dict[int, str]) -> TableSummary:
    values = weights.values.astype(np.float64)
    sizes = _sizes(values)
    largest = [
        LargeWeight(int(weights.keys[at]), names.get(int(weights.keys[at])), _plain(weights.values[at]))
        for at in _largest(sizes, top)
    ]
    present = values[values != 0]
    counts, edges = np.histogram(present, bins=_BINS) if len(present) else (np.zeros(0, np.int64), np.zeros(0))
    return TableSummary(
        name=name,
        dim=values.shape[1],
        features=len(values),
        nonzero=int(np.count_nonzero(sizes)),
        l1_norm=float(np.abs(values).sum()),
        l2_norm=float(np.sqrt((values**2).sum())),
        largest=float(np.abs(values).max(initial=0.0)),
        bias=_plain(weights.bias),
        histogram=Histogram(edges.tolist(), counts.tolist()),
        largest_weights=largest,
    )


def _compare(name: str, one: Weights, other: Weights, top: int) -> TableDifference:
    keys = np.union1d(one.keys, other.keys)
    a, b = _spread(keys, one), _spread(keys, other)
    changes = _sizes(a - b)
    norms = float(np.sqrt((a**2).sum())), float(np.sqrt((b**2).sum()))
    only = np.count_nonzero(_sizes(a)[_sizes(b) == 0]), np.count_nonzero(_sizes(b)[_sizes(a) == 0])
    return TableDifference(
        name=name,
        l2_norms=norms,
        distance=float(np.sqrt((changes**2).sum())),
        cosine=float((a * b).sum() / (norms[0] * norms[1])) if norms[0] and norms[1] else None,
        only_in=(int(only[0]), int(only[1])),
        changed=int(np.count_nonzero(changes)),
        largest_changes=[(int(keys[at]), _plain(a[at]), _plain(b[at])) for at in _largest(changes, top)],
    )


def _spread(keys: Keys, weights: Weights) -> Doubles:
    out = np.zeros((len(keys), weights.values.shape[1]))
    out[np.searchsorted(keys, weights.keys)] = weights.values
    return out


def _sizes(values: Doubles) -> Doubles:
    return np.abs(values[:, 0]) if values.shape[1] == 1 else np.sqrt((values**2).sum(axis=1))


def _largest(sizes: Doubles, top: int) -> list[int]:
    top = min(top, len(sizes))
    found = np.argpartition(sizes, len(sizes) - top)[len(sizes) - top :] if top else np.zeros(0, np.int64)
    ordered = found[np.lexsort((found, -sizes[found]))]
    return [int(at) for at in ordered if sizes[at] > 0]


def _plain(values: Floats | Doubles) -> float | list[float]:
    found: list[float] = values.tolist()
    return found[0] if len(found) == 1 else found


NUM_GROUPS = 10


@dataclass(frozen=True)
class CalibrationGroup:
    """Examples with similar predictions."""

    count: int
    lowest: float
    highest: float
    predicted: float
    """The mean prediction."""
    observed: float
    """The mean label. For clicks, this is the fraction of clicks."""


@dataclass(frozen=True)
class Calibration:
    """Equal groups of examples, ordered by prediction, and the metrics of all examples. The model has one output."""

    groups: list[CalibrationGroup]
    metrics: Evaluation

    def as_json(self) -> dict[str, Any]:
        groups = [dataclasses.asdict(group) for group in self.groups]
        return {"groups": groups, "metrics": {"examples": self.metrics.examples, **self.metrics.as_json()}}


def group_by_prediction(labels: Floats, predictions: Floats, num_groups: int = NUM_GROUPS) -> list[CalibrationGroup]:
    """Sort examples (float32 [n] each) by prediction and split them into at most `num_groups` equal groups."""
    order = np.argsort(predictions, kind="stable")
    labels, ordered = labels[order], predictions[order]
    return [
        CalibrationGroup(len(p), float(p[0]), float(p[-1]), float(p.mean(dtype=np.float64)), float(y.mean()))
        for y, p in zip(np.array_split(labels, num_groups), np.array_split(ordered, num_groups), strict=True)
        if len(p)
    ]


def calibrate_model(directory: Path, data: Sequence[str], format: str | None = None) -> Calibration:
    """Predict data files with a saved model and compare predictions with labels. Raises DataError without labels."""
    predictor = Predictor(directory)
    with predictor.open_data(data, format) as dataset:
        found = list(predictor.predict(dataset))
        if not found:
            raise no_line_left(data[0], "predicted", find_bad_lines(dataset))
    labels, predictions = np.concatenate([labels for labels, _ in found]), np.concatenate([p for _, p in found])
    has_label = ~np.isnan(labels)
    if not has_label.any():
        raise DataError(f"{data[0]} has no labels, but calibration compares predictions with labels")
    labels, predictions = labels[has_label], predictions[has_label]
    groups = group_by_prediction(labels, predictions) if predictions.ndim == 1 else []
    return Calibration(groups, predictor.model.evaluate(labels, predictions))
