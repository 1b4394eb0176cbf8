"""The weights of an estimator: rows in this process, trained by minibatches, that can be pickled and saved."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.data import Batch, Columns
from paceline.data.key_scaling import KeyScaling, read_key_scaling
from paceline.inference.weights import Weights, join_weights, unscaled_weights
from paceline.kernels.csr import csr_dot
from paceline.models.base import KeyedMatrix, KeyScratch
from paceline.models.logistic import LogisticRegression as SparseLogisticRegression
from paceline.ps import SparseStore, UpdateRule, to_fields
from paceline.storage.model_directory import save_model
from paceline.tables.initializers import Zeros
from paceline.tables.spec import TableSpec
from paceline.tables.types import Doubles, Floats, Keys

_BATCH = 4096


class WeightTable:
    """A row for each feature, and one for the bias, with the state of an update rule."""

    def __init__(
        self,
        rule: UpdateRule,
        store: SparseStore | None = None,
        *,
        offset: float = 0.0,
        scaling: KeyScaling | None = None,
    ) -> None:
        self._rule = rule
        self._scaling = scaling
        self._store = SparseStore(dim=1, rule=rule) if store is None else store
        self._scratch = KeyScratch()
        self._model = SparseLogisticRegression(offset=offset)

    def __getstate__(self) -> dict[str, Any]:
        """Return rule and rows: memory at an address does not travel."""
        keys, records = self._rows()
        scaling = None if self._scaling is None else self._scaling.spec()
        return {"rule": self._rule, "keys": keys, "records": records, "offset": self._model.offset, "scaling": scaling}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["rule"], offset=state["offset"], scaling=read_key_scaling(state))  # type: ignore[misc]
        self._store.write_records(state["keys"], state["records"])

    def _rows(self) -> tuple[Keys, Floats]:
        pieces = list(self._store.items())
        keys = np.concatenate([np.empty(0, np.uint64), *(keys for keys, _ in pieces)])
        none = np.empty((0, self._store.row_words), np.float32)
        return keys, np.concatenate([none, *(records for _, records in pieces)])

    def scaled(self, examples: Batch) -> Batch:
        """Return examples with the values that :meth:`train` takes."""
        return examples if self._scaling is None else self._scaling.apply(examples)

    def train(self, examples: Batch, batch_size: int, order: npt.NDArray[np.int64] | None) -> None:
        """Make a pass over examples whose values are scaled, in an order if one is given."""
        if order is not None:
            examples = examples.take(order)
        for start in range(0, examples.num_examples, batch_size):
            minibatch = self._model.prepare(examples.slice(start, start + batch_size), self._scratch)
            (keys,) = minibatch.keys
            weights = np.empty((len(keys), 1), np.float32)
            self._store.pull(keys, weights)
            (gradient,), _ = minibatch.gradients([weights])
            self._store.push(keys, gradient)

    def decide(self, examples: Batch) -> Doubles:
        """Return the logit of each example (float64 [n])."""
        margins = np.empty(examples.num_examples, np.float32)
        for start in range(0, examples.num_examples, _BATCH):
            part = self.scaled(examples.slice(start, start + _BATCH))
            rows = KeyedMatrix(part, self._scratch)
            weights = np.empty(len(rows.keys), np.float32)
            self._store.pull(rows.keys, weights)
            out = margins[start : start + _BATCH]
            csr_dot(rows.indptr, rows.indices, rows.values, weights, out)
            out += weights[-1] + np.float32(self._model.offset)
        return margins.astype(np.float64)

    def is_known(self, keys: Keys) -> npt.NDArray[np.bool_]:
        """Return which keys have a row."""
        return self._store.read_records(keys)[1]

    @property
    def bias(self) -> float:
        """What is added to all logits, where values are as they were given."""
        return float(self._weights().bias[0])

    def spread(self, num_features: int) -> Doubles:
        """Return the weights of features that are numbered (float64 [num_features])."""
        weights = self._weights()
        out = np.zeros(num_features)
        out[weights.keys.astype(np.int64)] = weights.values[:, 0]
        return out

    def _weights(self) -> Weights:
        return unscaled_weights(join_weights(self._store.items(), 1), self._scaling, self._model.offset)

    def save(self, directory: str | os.PathLike[str], columns: Columns | None) -> None:
        """Write a model as trainings do: of numbered features, or of the columns of a frame."""
        update, start = to_fields(self._rule), to_fields(Zeros())
        (table,) = self._model.tables
        spec = TableSpec(name=table.name, kind="sparse", update=update, initializer=start, dim=table.dim)
        described = {**self._model.describe(), "finished": True, "format": "libsvm", "columns": None}
        if self._scaling is not None:
            described = {**described, "scaling": self._scaling.spec()}
        if columns is not None:
            described = {**described, "format": "parquet", "columns": columns.to_fields()}
        save_model(directory, [(spec, self._store.items())], described)
