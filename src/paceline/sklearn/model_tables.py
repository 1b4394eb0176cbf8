"""The tables of an estimator's model in this process. They can be trained, pickled and saved."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import Self

from paceline.data import Batch, Columns
from paceline.data.key_scaling import KeyScaling, read_key_scaling
from paceline.inference.weights import Weights, join_weights, weights_of_data
from paceline.models.base import KeyScratch, Minibatch, ModelTable, Optimism, SparseModel
from paceline.models.clicks import ClickMinibatch
from paceline.models.softmax import SoftmaxMinibatch
from paceline.ps import SparseStore, UpdateRule, to_fields
from paceline.storage.model_directory import fill_store, save_model
from paceline.tables.initializers import Zeros
from paceline.tables.spec import TableSpec
from paceline.tables.types import Doubles, Floats, Keys
from paceline.training.tuning.model_trial import InProcessTables

_BATCH = 4096
_SEEDS = 1 << 31


class ModelTables:
    """A model with its tables and their specifications. `scaling` is applied before training and prediction."""

    def __init__(
        self,
        model: SparseModel,
        tables: Iterable[tuple[TableSpec, SparseStore]],
        scaling: KeyScaling | None = None,
    ) -> None:
        self._model = model
        self._tables = list(tables)
        self._rows = InProcessTables([store for _, store in self._tables])
        self._scaling = scaling
        self._scratch = KeyScratch()

    @classmethod
    def create(
        cls, model: SparseModel, rule: UpdateRule, scaling: KeyScaling | None, random: np.random.RandomState
    ) -> Self:
        """Create empty tables. `rule` updates tables without their own rule. `random` draws seeds of initial values."""
        specs = [_specification(table, rule, random) for table in model.tables]
        return cls(model, [(spec, fill_store(spec, ())) for spec in specs], scaling)

    def __getstate__(self) -> dict[str, Any]:
        """Return model and rows as Python objects, because stores contain memory addresses."""
        scaling = None if self._scaling is None else self._scaling.spec()
        tables = [(spec, list(store.items())) for spec, store in self._tables]
        return {"model": self._model, "tables": tables, "scaling": scaling}

    def __setstate__(self, state: dict[str, Any]) -> None:
        tables = [(spec, fill_store(spec, pieces)) for spec, pieces in state["tables"]]
        self.__init__(state["model"], tables, read_key_scaling(state))  # type: ignore[misc]

    def scaled(self, examples: Batch) -> Batch:
        return examples if self._scaling is None else self._scaling.apply(examples)

    def train(self, examples: Batch, batch_size: int, order: npt.NDArray[np.int64] | None) -> None:
        """Make a pass over examples, whose values are scaled, in this `order` (None: unchanged)."""
        if order is not None:
            examples = examples.take(order)
        for start in range(0, examples.num_examples, batch_size):
            minibatch = self._model.prepare(examples.slice(start, start + batch_size), self._scratch)
            self._rows.learn(minibatch)

    def calibrate(self, recent: Batch, optimism: Optimism, *, is_complete: bool) -> None:
        """Correct the mean prediction, given scaled training examples. If `is_complete`, these are all of them."""
        predictions = self._collect(recent, self._rows.predict, is_scaled=True).astype(np.float32)
        self._model = self._model.calibrated(
            recent.labels, predictions, recent.weights, optimism, is_complete=is_complete
        )

    def margins(self, examples: Batch) -> Doubles:
        """Return the logit of each example (float64 [n]), or each class's log probability ([n, classes])."""
        return self._collect(examples, self._margins)

    def predict(self, examples: Batch) -> Doubles:
        return self._collect(examples, self._rows.predict)

    def _margins(self, minibatch: Minibatch) -> Floats | Doubles:
        assert isinstance(minibatch, ClickMinibatch | SoftmaxMinibatch)
        return minibatch.margins(self._rows.pull(minibatch))

    def _collect(
        self, examples: Batch, predict: Callable[[Minibatch], Floats | Doubles], *, is_scaled: bool = False
    ) -> Doubles:
        parts = [np.empty((0, self._model.num_outputs) if self._model.num_outputs > 1 else 0, np.float64)]
        for start in range(0, examples.num_examples, _BATCH):
            part = examples.slice(start, start + _BATCH)
            part = part if is_scaled else self.scaled(part)
            parts.append(predict(self._model.prepare(part, self._scratch)).astype(np.float64))
        return np.concatenate(parts)

    def is_known(self, keys: Keys) -> npt.NDArray[np.bool_]:
        return self._tables[0][1].read_records(keys)[1]

    @property
    def is_linear(self) -> bool:
        """Whether a linear model has exactly one weight for each feature of X."""
        return self._scaling is None or self._scaling.is_linear

    def linear_weights(self) -> Weights:
        store = self._tables[0][1]
        return weights_of_data(join_weights(store.items(), store.dim), self._describe())

    def save(self, directory: str | os.PathLike[str], columns: Columns | None) -> None:
        """Write a model of numbered features or of a frame's columns, as ``paceline train --save`` does."""
        described = {**self._describe(), "finished": True, "format": "libsvm", "columns": None}
        if columns is not None:
            described = {**described, "format": "parquet", "columns": columns.to_fields()}
        save_model(directory, [(spec, store.items()) for spec, store in self._tables], described)

    def _describe(self) -> dict[str, Any]:
        described = self._model.describe()
        return described if self._scaling is None else {**described, "scaling": self._scaling.spec()}


def _specification(table: ModelTable, rule: UpdateRule, random: np.random.RandomState) -> TableSpec:
    """Return the specification of a model's table. If initial values are 0, no seed is drawn."""
    return TableSpec(
        name=table.name,
        kind="sparse",
        dim=table.dim,
        update=to_fields(table.update or rule),
        initializer=to_fields(table.initializer or Zeros()),
        seed=0 if table.initializer is None else int(random.randint(_SEEDS, dtype=np.int64)),
    )
