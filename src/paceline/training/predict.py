"""The command ``paceline predict``: a file of predictions, and their evaluation."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from paceline.data import FORMATS, Dataset, describe_not_binary
from paceline.data.labels import CLICKS
from paceline.errors import ModelError
from paceline.launch.kernels import prepare_kernels
from paceline.models.metrics import ClickEvaluation, Evaluation
from paceline.models.prediction import Predictor
from paceline.output_files import replacing
from paceline.tables.types import Floats
from paceline.training.bad_data import BadData, find_bad_lines, no_line_left


@dataclass(frozen=True)
class PredictionResult:
    """The result of a prediction."""

    evaluation: Evaluation | None
    """None for data without labels."""
    examples: int
    seconds: float
    loading_seconds: float
    bad_lines: BadData
    warnings: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        found = self.evaluation
        return {
            **({} if found is None else found.as_json()),
            "examples": self.examples,
            "seconds": self.seconds,
            "loading_seconds": self.loading_seconds,
            "examples_per_s": self.examples / max(self.seconds - self.loading_seconds, 1e-9),
            "bad_lines": self.bad_lines.count,
        }

    def sentence(self) -> str:
        found = self.evaluation
        text = f"{self.examples:,} prediction{'s' * (self.examples != 1)} in {self.seconds:.2f} s "
        text += f"({self.loading_seconds:.2f} s to load the model): "
        text += "the data has no labels" if found is None else found.sentence()
        if found is not None and found.examples < self.examples:
            text += f" (on {found.examples:,} labelled examples)"
        return text

    def notes(self) -> list[str]:
        notes = list(self.warnings)
        if self.bad_lines.count:
            notes.append(f"malformed lines have no prediction: {self.bad_lines.sentence(self.examples)}")
        return notes


def run_prediction(
    model: Path,
    data: Sequence[str],
    *,
    output: Path | None,
    format: str | None,
    header: str = "auto",
    strict: bool,
    echo: bool,
) -> PredictionResult:
    prepare_kernels()
    start = time.perf_counter()
    predictor = Predictor(model)
    loading_seconds = time.perf_counter() - start
    with predictor.open_data(data, format, strict=strict, header=header) as dataset:
        labels, predictions = [], []
        with _opened(output, echo) as out:
            for found, predicted in predictor.predict(dataset):
                if not np.isfinite(predicted).all():
                    raise ModelError(
                        f"the model in {model} predicts infinities or NaN: its training diverged. Train again with a "
                        "smaller --lr"
                    )
                labels.append(found.copy())
                predictions.append(predicted)
                if out is not None:
                    out.write(_lines(predicted))
            if not labels:
                raise no_line_left(data[0], "predicted", find_bad_lines(dataset))
        seconds = time.perf_counter() - start
        known, predicted = np.concatenate(labels), np.concatenate(predictions)
        has_label = ~np.isnan(known)
        evaluation = predictor.model.evaluate(known[has_label], predicted[has_label]) if has_label.any() else None
        return PredictionResult(
            evaluation,
            len(known),
            seconds,
            loading_seconds,
            find_bad_lines(dataset),
            tuple(_find_warnings(predictor, dataset, evaluation)),
        )


def _lines(predicted: Floats) -> str:
    if predicted.ndim == 1:
        return "".join([f"{value:.9g}\n" for value in predicted.tolist()])
    return "".join([" ".join([f"{value:.9g}" for value in row]) + "\n" for row in predicted.tolist()])


def _find_warnings(predictor: Predictor, dataset: Dataset, evaluation: Evaluation | None) -> Iterator[str]:
    if not predictor.has_known_features:
        yield (
            "no feature of this data occurs in the model, so all predictions are equal. Use the format of the training "
            "data"
        )
    if evaluation is None:
        return
    if issubclass(predictor.model.evaluation, ClickEvaluation):
        classes = dataset.columns.classes if dataset.columns is not None else ()
        found = FORMATS[dataset.format].sample_labels(dataset.files, dataset.columns)
        odd = describe_not_binary(found, dataset.labels, classes)
        if odd is not None:
            consequence = "labels above 0 as positive" if dataset.labels == CLICKS else "all labels as negative"
            yield f"{odd}: these figures count {consequence}"
    useless = evaluation.find_useless()
    if useless is not None:
        yield f"these predictions are useless: {useless}"


@contextlib.contextmanager
def _opened(output: Path | None, echo: bool) -> Iterator[TextIO | None]:
    """Yield a temporary file, which is renamed at the end, so that a failure leaves no incomplete file."""
    if output is None:
        yield sys.stdout if echo else None
        return
    try:
        with replacing(output) as aside, open(aside, "w", encoding="ascii") as out:
            yield out
    except OSError as error:
        raise ModelError(f"cannot write the predictions to {output}: {error.strerror or error}") from None
