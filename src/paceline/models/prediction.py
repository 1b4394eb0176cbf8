"""Prediction from a saved model, in this process alone."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from paceline.data import Columns, Dataset
from paceline.errors import ModelError
from paceline.ps import SavedModel, SparseStore, read_model

from .jobs import TABLE
from .logistic import Preparation

_BATCH = 4096
Floats = npt.NDArray[np.float32]


class Predictor:
    """A saved logistic regression, loaded. Raises ModelError if the directory holds none."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        model: SavedModel = read_model(directory)
        described = model.manifest.model
        if described.get("kind") != "lr":
            raise ModelError(
                f"the model in {directory} is of kind {described.get('kind')!r}: expected 'lr', a logistic regression"
            )
        self.format = str(described["format"])
        columns = described.get("columns")
        self.columns = None if columns is None else Columns(
            columns["label"], tuple(columns["categorical"]), tuple(columns["numeric"])
        )  # fmt: skip
        self._store: SparseStore = model.load_store(TABLE)
        self._preparation = Preparation()

    def predict(self, dataset: Dataset) -> Iterator[tuple[Floats, Floats]]:
        """Yield labels and P(click) (float32 [n] each) of a data set, in its order, a batch at a time."""
        for batch in dataset.batches(_BATCH):
            minibatch = self._preparation.prepare(batch)
            weights = np.empty(len(minibatch.keys), np.float32)
            self._store.pull(minibatch.keys, weights)
            yield minibatch.labels, minibatch.predict(weights)
