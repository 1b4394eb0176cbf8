"""Training of a model in this process, without a cluster."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from paceline.data import Batch
from paceline.models.base import KeyScratch, SparseModel
from paceline.ps import FTRL, SparseStore
from paceline.training.tuning.model_trial import InProcessTables

Array = npt.NDArray[Any]


def train(
    model: SparseModel, batch: Batch, rule: FTRL, *, epochs: int, unseen: Batch | None = None
) -> tuple[Array, list[SparseStore]]:
    """Train; return the predictions for `unseen` (or for the training examples) and the tables."""
    tables, scratch = InProcessTables.create(model, rule), KeyScratch()
    for _ in range(epochs):
        for start in range(0, batch.num_examples, 64):
            tables.learn(model.prepare(batch.slice(start, start + 64), scratch))
    minibatch = model.prepare(batch if unseen is None else unseen, scratch)
    return tables.predict(minibatch), list(tables.stores)
