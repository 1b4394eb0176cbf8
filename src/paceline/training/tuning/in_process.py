"""Hold a model's tables in this process and train them without a network."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from typing_extensions import Self

from paceline.models.base import Minibatch, SparseModel
from paceline.ps import SparseStore, UpdateRule
from paceline.tables.initializers import Zeros
from paceline.tables.types import Floats


class InProcessTables:
    """The rows of a model's tables in this process, with the arithmetic of a training. Not thread-safe."""

    def __init__(self, stores: Sequence[SparseStore]) -> None:
        self.stores = stores

    @classmethod
    def create(cls, model: SparseModel, rule: UpdateRule) -> Self:
        """Return empty tables; `rule` updates the tables that have no rule of their own."""
        return cls(
            [
                SparseStore(dim=table.dim, rule=table.update or rule, initializer=table.initializer or Zeros())
                for table in model.tables
            ]
        )

    def pull(self, minibatch: Minibatch) -> list[Floats]:
        """Return a minibatch's rows by table. Minibatches of predictions omit tables that only training needs."""
        rows = []
        for store, keys in zip(self.stores, minibatch.keys, strict=False):
            rows.append(np.empty((len(keys), store.dim), np.float32))
            store.pull(keys, rows[-1])
        return rows

    def learn(self, minibatch: Minibatch) -> float:
        """Update the rows with a minibatch's gradients; return its summed loss before the update."""
        gradients, loss = minibatch.gradients(self.pull(minibatch))
        for store, keys, gradient in zip(self.stores, minibatch.gradient_keys, gradients, strict=True):
            store.push(keys, gradient)
        return loss

    def predict(self, minibatch: Minibatch) -> Floats:
        return minibatch.predict(self.pull(minibatch))
