"""Compare predictions with labels: a table of groups by rising prediction."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paceline.errors import DataError
from paceline.models.metrics import Evaluation
from paceline.models.prediction import Predictor
from paceline.tables.types import Floats
from paceline.training.files.bad_data import find_bad_lines, no_line_left

NUM_GROUPS = 10


@dataclass(frozen=True)
class CalibrationGroup:
    """Examples of similar predictions."""

    count: int
    lowest: float
    highest: float
    predicted: float
    """The mean prediction."""
    observed: float
    """The mean label: for clicks, their fraction."""


@dataclass(frozen=True)
class Calibration:
    """Groups of equal size by prediction, for a model with one output, and the metrics of all examples."""

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
    """Predict data files with a saved model, and compare predictions and labels. Raises DataError without labels."""
    predictor = Predictor(directory)
    with predictor.open_data(data, format) as dataset:
        found = list(predictor.predict(dataset))
        if not found:
            raise no_line_left(data[0], "predicted", find_bad_lines(dataset))
    labels, predictions = np.concatenate([labels for labels, _ in found]), np.concatenate([p for _, p in found])
    has_label = ~np.isnan(labels)
    if not has_label.any():
        raise DataError(f"{data[0]} has no labels: calibration compares predictions with labels")
    labels, predictions = labels[has_label], predictions[has_label]
    groups = group_by_prediction(labels, predictions) if predictions.ndim == 1 else []
    return Calibration(groups, predictor.model.evaluate(labels, predictions))
