"""Prediction from a saved model, in this process alone."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np

from paceline.data import Batch, Columns, Dataset
from paceline.errors import ModelError, UsageError
from paceline.models.base import KeyScratch
from paceline.models.registry import MODELS, read_model_settings
from paceline.ps import SavedModel, read_model
from paceline.tables.types import Floats

_BATCH = 4096


class Predictor:
    """A saved model, loaded. Raises ModelError if the directory holds none that predicts."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        saved: SavedModel = read_model(directory)
        described = saved.manifest.model
        if described.get("kind") not in MODELS:
            raise ModelError(
                f"the model in {directory} is of kind {described.get('kind')!r}: expected one of {', '.join(MODELS)}, "
                "as 'paceline train' saves them"
            )
        try:
            self.model = read_model_settings(described)
        except (UsageError, TypeError) as error:
            raise ModelError(f"the model in {directory} is damaged: {error}") from None
        self.format = str(described["format"])
        columns = described.get("columns")
        self.columns = None if columns is None else Columns(
            columns["label"], tuple(columns["categorical"]), tuple(columns["numeric"])
        )  # fmt: skip
        self.stores = [saved.load_store(table.name) for table in self.model.tables]
        """The model's tables; the first has a row for each feature, and one for the bias."""
        self._scratch = KeyScratch()

    def predict(self, dataset: Dataset) -> Iterator[tuple[Floats, Floats]]:
        """Yield labels (float32 [n]) and predictions (float32 [n], or [n, outputs]), in order, a batch at a time."""
        for batch in dataset.batches(_BATCH):
            yield self._predict(batch)

    def predict_batch(self, batch: Batch) -> Floats:
        """Return the predictions (float32 [n], or [n, outputs]) of one batch."""
        return self._predict(batch)[1]

    def _predict(self, batch: Batch) -> tuple[Floats, Floats]:
        minibatch = self.model.prepare(batch, self._scratch)
        weights = []
        for keys, store in zip(minibatch.keys, self.stores, strict=True):
            weights.append(np.empty((len(keys), store.dim), np.float32))
            store.pull(keys, weights[-1])
        return minibatch.labels, minibatch.predict(weights)
