"""A model's tables as rows of this process: what servers and one worker make up, without anything between them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from typing_extensions import Self

from paceline.models.base import Minibatch, SparseModel
from paceline.ps import SparseStore, UpdateRule
from paceline.tables.initializers import Zeros
from paceline.tables.types import Floats


class InProcessTables:
    """The rows of a model's tables, one store for each in the order of ``model.tables``. Not safe for several threads.

    A minibatch is learned from by the arithmetic of workers and the update rules of servers.
    """

    def __init__(self, stores: Sequence[SparseStore]) -> None:
        self.stores = stores

    @classmethod
    def create(cls, model: SparseModel, rule: UpdateRule) -> Self:
        """Return tables without rows; `rule` updates those that have none of their own."""
        return cls(
            [
                SparseStore(dim=table.dim, rule=table.update or rule, initializer=table.initializer or Zeros())
                for table in model.tables
            ]
        )

    def pull(self, minibatch: Minibatch) -> list[Floats]:
        """Return the rows that a minibatch needs, by table; of a table that is for training alone none to predict."""
        rows = []
        for store, keys in zip(self.stores, minibatch.keys, strict=False):
            rows.append(np.empty((len(keys), store.dim), np.float32))
            store.pull(keys, rows[-1])
        return rows

    def learn(self, minibatch: Minibatch) -> float:
        """Update the rows by the gradients of a minibatch; return its summed loss before."""
        gradients, loss = minibatch.gradients(self.pull(minibatch))
        for store, keys, gradient in zip(self.stores, minibatch.gradient_keys, gradients, strict=True):
            store.push(keys, gradient)
        return loss

    def predict(self, minibatch: Minibatch) -> Floats:
        """Return what the model says of each example, as :meth:`Minibatch.predict` does."""
        return minibatch.predict(self.pull(minibatch))
