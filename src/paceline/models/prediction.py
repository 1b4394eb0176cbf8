"""Prediction from a saved model, without a cluster."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from paceline.data import (
    FORMATS,
    Batch,
    Columns,
    Dataset,
    detect_format,
    have_same_features,
    open_dataset,
    source_format,
)
from paceline.data.dialect import check_header
from paceline.data.key_scaling import read_key_scaling
from paceline.errors import DataError, ModelError, UsageError
from paceline.models.base import KeyScratch
from paceline.models.registry import MODELS, read_model_settings
from paceline.models.stored import read_stored_model
from paceline.tables.types import Floats

_BATCH = 4096


class _Scratch(threading.local):
    """Separate scratch memory for each thread."""

    def __init__(self) -> None:
        self.keys = KeyScratch()


class Predictor:
    """A saved model, or the model in the newest snapshot. Thread-safe. Raises ModelError if there is none."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        stored = read_stored_model(directory)
        described = stored.described
        if described.get("kind") not in MODELS:
            raise ModelError(
                f"the model in {directory} is of kind {described.get('kind')!r}: expected one of {', '.join(MODELS)}, "
                "saved by 'paceline train'"
            )
        try:
            self.model = read_model_settings(described)
        except (UsageError, TypeError) as error:
            raise ModelError(f"the model in {directory} is damaged: {error}") from None
        self.model.import_libraries()
        self.format = str(described["format"])
        columns = described.get("columns")
        self.columns = None if columns is None else Columns.from_fields(columns)
        self.scaling = read_key_scaling(described)
        """The scaling of values before the model uses them."""
        self.stores = [stored.load_store(table.name, values_only=True) for table in self.model.parameter_tables]
        """The model's tables; the first has a row per feature and one for the bias."""
        self.has_known_features = False
        """Whether the predicted data had any feature of the model."""
        self._directory = directory
        self._scratch = _Scratch()

    def open_data(
        self, paths: Sequence[str | Path], format: str | None = None, *, strict: bool = False, header: str = "auto"
    ) -> Dataset:
        """Open data for prediction, with the training data's columns. Raises DataError if it has other features."""
        for path in paths:
            found = format or self._format_of(path)
            features = source_format(path, found)
            if not have_same_features(features, self.format):
                raise DataError(
                    f"{path} {'is declared as' if format else 'looks like'} {features}, but the model in "
                    f"{self._directory} was trained on {self.format}, which has other features. Pass data of that "
                    "format"
                )
        columns = self.columns
        if header != "auto":
            if columns is None or "--header" not in FORMATS[found].column_options:
                raise UsageError(f"--header {header}: data of format {found} has no header. Leave the option out")
            check_header(header)
            columns = replace(columns, header=header)
        try:
            return open_dataset(
                paths, found, columns, strict=strict, labels=self.model.read_labels_as, needs_labels=False
            )
        except UsageError as error:
            if columns is None:
                raise
            raise DataError(f"{error}; the model in {self._directory} needs {', '.join(columns.names[1:])}") from error

    def predict(self, dataset: Dataset) -> Iterator[tuple[Floats, Floats]]:
        """Yield labels (float32 [n]) and predictions (float32 [n], or [n, outputs]) batch by batch, in order."""
        for batch in dataset.batches(_BATCH):
            yield self._predict(batch)

    def predict_batch(self, batch: Batch) -> Floats:
        """Return the predictions for one batch: float32 [n], or [n, outputs]."""
        return self._predict(batch)[1]

    def _predict(self, batch: Batch) -> tuple[Floats, Floats]:
        if self.scaling is not None:
            batch = self.scaling.apply(batch)
        minibatch = self.model.prepare(batch, self._scratch.keys)
        if not self.has_known_features:
            self.has_known_features = bool(self.stores[0].read_records(minibatch.keys[0][:-1])[1].any())
        weights = []
        for keys, store in zip(minibatch.keys, self.stores, strict=True):
            weights.append(np.empty((len(keys), store.dim), np.float32))
            store.pull(keys, weights[-1])
        return minibatch.labels, minibatch.predict(weights)

    def _format_of(self, path: str | Path) -> str:
        try:
            if self.format in FORMATS and FORMATS[self.format].matches_unlabelled(str(path)):
                return self.format
            return detect_format(path)
        except DataError:
            return self.format  # the reader of this format reports the problem
