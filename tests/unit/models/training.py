"""Training of a model in this process, without a cluster."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.data import Batch
from paceline.models.base import KeyScratch, SparseModel
from paceline.ps import FTRL, SparseStore
from paceline.tables.initializers import Zeros

Array = npt.NDArray[Any]


def train(
    model: SparseModel, batch: Batch, rule: FTRL, *, epochs: int, unseen: Batch | None = None
) -> tuple[Array, list[SparseStore]]:
    """Train; return the predictions for other examples (or the same), and the tables."""
    stores = [
        SparseStore(dim=each.dim, rule=each.update or rule, initializer=each.initializer or Zeros(), seed=0)
        for each in model.tables
    ]
    scratch = KeyScratch()

    def pull(keys: tuple[Array, ...]) -> list[Array]:
        weights = [np.empty((len(each), store.dim), np.float32) for each, store in zip(keys, stores, strict=True)]
        for each, store, out in zip(keys, stores, weights, strict=True):
            store.pull(each, out)
        return weights

    for _ in range(epochs):
        for start in range(0, batch.num_examples, 64):
            minibatch = model.prepare(batch.slice(start, start + 64), scratch)
            gradients, _ = minibatch.gradients(pull(minibatch.keys))
            for keys, store, gradient in zip(minibatch.gradient_keys, stores, gradients, strict=True):
                store.push(keys, np.ascontiguousarray(gradient).reshape(-1))
    minibatch = model.prepare(batch if unseen is None else unseen, scratch)
    return minibatch.predict(pull(minibatch.keys)), stores
