"""Common parts of deep click models: a network over the factors of an example's columns.

margin = offset + bias + Σ w[k]·x_k + network(e). The vector e has one part per column: the sum Σ v[k]·x_k over the
column's features. A feature without factors adds zeros. :mod:`paceline.models.fm` explains the weights w and factors v.
The layers are tables too (:mod:`paceline.models.deep.layers`), trained with Adam. PyTorch computes the networks; it is
imported at the first use.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
from typing_extensions import Self, override

from paceline.data import Batch, Columns
from paceline.errors import UsageError
from paceline.kernels.dedup import sum_rows
from paceline.models.base import KeyedMatrix, KeyedMinibatch, ModelTable
from paceline.models.deep.layers import Layer, check_layers
from paceline.models.features.layout import RowLayout
from paceline.models.fm import FactorizationMinibatch, FactorModel, check_penalties
from paceline.tables.rules import Adam
from paceline.tables.types import Floats, Keys

if TYPE_CHECKING:
    from paceline.models.deep.networks import Network

_NUM_TABLES = 3  # weights, factors and counts come before the layers


class ColumnSums:
    """For each example and column of a minibatch: the sum of the features' factors, and its gradient.

    `indices` int32 [pairs] are row numbers of factors. `values` are float32 [pairs], or empty if all are 1.
    """

    def __init__(self, layout: RowLayout, batch: Batch, indices: npt.NDArray[np.int32], values: Floats) -> None:
        examples = np.repeat(np.arange(batch.num_examples), np.diff(batch.indptr))
        self._places = (examples * len(layout) + layout.fields_of(batch)).astype(np.int32)
        self._shape = batch.num_examples, len(layout)
        self._indices, self._values = indices, values

    def sums(self, factors: Floats) -> Floats:
        """Return the sums Σ v[k]·x_k: float32 [n, columns, dim]. `factors` are the v[k]: float32 [features, dim]."""
        n, num_columns = self._shape
        found = self._summed(factors[self._indices], self._places, n * num_columns)
        return found.reshape(n, num_columns, factors.shape[1])

    def gradients(self, by_sums: Floats, num_features: int) -> Floats:
        """Return the gradients with respect to the factors, given the gradients with respect to :meth:`sums`."""
        rows = by_sums.reshape(-1, by_sums.shape[2])[self._places]
        return self._summed(rows, self._indices, num_features)

    def _summed(self, rows: Floats, places: npt.NDArray[np.int32], count: int) -> Floats:
        if len(self._values):
            rows = rows * self._values[:, np.newaxis]
        dim = rows.shape[1]
        out = np.empty(count * dim, np.float32)
        sum_rows(places, rows.reshape(-1), dim, out)
        return out.reshape(count, dim)


class DeepMinibatch(FactorizationMinibatch):
    """A minibatch of clicks for a deep model."""

    __slots__ = ("_columns", "_deep", "_layer_gradients", "_layers", "_networks", "_pass")

    def __init__(self, model: DeepModel, batch: Batch, rows: KeyedMatrix) -> None:
        super().__init__(model, batch, rows)
        assert model.layout is not None, "of_columns() was not called"
        self._deep = model
        self._networks = load_networks(model.name)
        self._columns = ColumnSums(model.layout, batch, self._rows.indices, self._rows.values)
        self._layers: Sequence[Floats] = ()
        self._layer_gradients: Sequence[Floats] = ()
        self._pass: Any = None

    @property
    @override
    def keys(self) -> tuple[Keys, ...]:
        return *super().keys, *self._deep.layer_keys

    @property
    @override
    def gradient_keys(self) -> tuple[Keys, ...]:
        return *super().gradient_keys, *self._deep.layer_keys

    @override
    def gradients(self, weights: Sequence[Floats]) -> tuple[Sequence[Floats], float]:
        gradients, loss = super().gradients(weights)
        return (*gradients, *self._layer_gradients), loss

    @override
    def _forward(self, weights: Sequence[Floats], residuals: Floats) -> float:
        self._layers = weights[_NUM_TABLES:]
        return super()._forward(weights, residuals)

    @override
    def _add_pairs(self, factors: Floats, active: npt.NDArray[np.bool_], margins: Floats) -> None:
        of_columns = self._columns.sums(factors * active[:, np.newaxis])
        self._pass = self._networks.NetworkPass(self._deep.network, of_columns, self._layers)
        margins += self._pass.margins

    @override
    def _pair_gradients(self, residuals: Floats, out: Floats) -> None:
        by_columns, *self._layer_gradients = self._pass.gradients(residuals)
        out[:] = self._columns.gradients(by_columns, len(out))


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepModel(FactorModel):
    """P(click) from a weight and factors per feature, and a network over the factors of all columns. Abstract.

    `hidden` lists the number of units of each hidden layer. `tower_lr`, `tower_l1` and `tower_l2` are Adam's learning
    rate and penalties for all layers.
    """

    usual: ClassVar[Mapping[str, Any]] = {**FactorModel.usual, "tower_lr": 0.002, "tower_l2": 0.0}
    least_batch_size: ClassVar[int] = 32

    hidden: tuple[int, ...] = (64, 32)
    tower_lr: float | None = None
    tower_l1: float = 0.0
    tower_l2: float | None = None
    layout: RowLayout | None = None
    """The columns of the data; None while unknown."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "hidden", tuple(self.hidden))
        object.__setattr__(self, "layout", RowLayout.of(self.layout))
        check_layers(self.hidden, self.num_inputs)
        check_penalties(self, "tower_lr", "tower_l1", "tower_l2")
        super().__post_init__()
        if self.interactions is not None:
            raise UsageError(
                f"--interactions is not an option of --model {self.name}, because its network crosses all columns"
            )

    @property
    @override
    def parameter_tables(self) -> tuple[ModelTable, ...]:
        update = Adam(lr=self.value_of("tower_lr"), l1=self.tower_l1, weight_decay=self.value_of("tower_l2"))
        return *super().parameter_tables, *(layer.table(update) for layer in self.layers)

    @property
    def num_inputs(self) -> int:
        return self.dim * (1 if self.layout is None else len(self.layout))

    @property
    @abstractmethod
    def layers(self) -> tuple[Layer, ...]:
        """The network's layers, in the order of :attr:`network`."""

    @property
    @abstractmethod
    def network(self) -> Network:
        """The function that computes margins from the columns' factors and the layers' weights."""

    @cached_property
    def layer_keys(self) -> tuple[Keys, ...]:
        return tuple(layer.keys for layer in self.layers)

    def hidden_layers(self, first: int) -> tuple[Layer, ...]:
        sizes = zip((self.num_inputs, *self.hidden), self.hidden, strict=False)
        return tuple(
            Layer(f"{self.name} hidden {number + 1}", first + number, *size) for number, size in enumerate(sizes)
        )

    @override
    def import_libraries(self) -> None:
        load_networks(self.name)

    @override
    def of_columns(self, format: str, columns: Columns | None, fields: Sequence[str] = ()) -> Self:
        layout = RowLayout.of_data(format, columns, fields)
        if layout is None:
            raise UsageError(f"--model {self.name} needs columns, but {format} has none. Use --model fm")
        if importlib.util.find_spec("torch") is None:
            raise _missing_torch(self.name)
        return dataclasses.replace(self, layout=layout)

    @override
    def _to_minibatch(self, batch: Batch, rows: KeyedMatrix) -> KeyedMinibatch:
        return DeepMinibatch(self, batch, rows)


def load_networks(model: str) -> ModuleType:
    """Return :mod:`paceline.models.deep.networks`. Raises UsageError if PyTorch is not installed."""
    try:
        from paceline.models.deep import networks
    except ImportError as error:
        raise _missing_torch(model) from error
    return networks


def _missing_torch(model: str) -> UsageError:
    return UsageError(
        f"--model {model} needs PyTorch, which is not installed: pip install 'paceline[torch]', or use --model fm or "
        "ffm"
    )
