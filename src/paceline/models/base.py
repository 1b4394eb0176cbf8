"""The interface of models: settings, tables of parameters, and the computations on one minibatch.

Each model is a module of this package; :mod:`paceline.models.registry` finds models by name. Workers, training and
prediction use only this interface. A model does not depend on the source of parameters or the destination of gradients.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
from typing_extensions import Self, override

from paceline.data import Batch, Columns
from paceline.data.batch import rebatch
from paceline.kernels.csr import csr_dot, csr_transposed_dot
from paceline.kernels.dedup import dedup, scratch_size
from paceline.kernels.features.sketch import BLOCK, count_occurrences
from paceline.models.features.counting import FeatureCounts, FrequentFeatures, check_counting
from paceline.models.features.interactions import Interactions
from paceline.models.metrics import Evaluation
from paceline.models.progressive import ExampleSums
from paceline.ps import Client, SparseTable
from paceline.tables.initializers import Initializer
from paceline.tables.rules import SGD, UpdateRule
from paceline.tables.types import Doubles, Floats, Keys

BIAS_KEY = np.uint64(0x5061_6365_6C69_6E65)
"""The key of the bias: «Paceline» in ASCII, because a hashed feature is unlikely to have this number."""

_ONES = np.empty(0, np.float32)
_PREDICTED_ROWS = 65_536  # rows per minibatch of a prediction


class ModelTable(NamedTuple):
    """A sparse table of a model: a row of `dim` float32 for each key."""

    name: str
    dim: int = 1
    update: UpdateRule | None = None
    """The table's own update rule; None: the training's rule."""
    initializer: Initializer | None = None
    is_count: bool = False
    """Whether the values are counts. Servers add counts unchanged, and only lossless filters apply to them."""
    is_by_feature: bool = True
    """Whether the keys are features. They are in the model's first table."""


class KeyScratch:
    """Memory for preparing minibatches, reused during one training of one worker."""

    def __init__(self) -> None:
        self._slots = np.empty(scratch_size(1 << 14), np.int32)

    @cached_property
    def frequent(self) -> FrequentFeatures:
        return FrequentFeatures()

    def slots(self, num_keys: int) -> npt.NDArray[np.int32]:
        size = scratch_size(num_keys)
        if len(self._slots) < size:
            self._slots = np.empty(size, np.int32)
        return self._slots[:size]


class KeyedMatrix:
    """The examples of a minibatch as a CSR matrix. Its columns are the distinct keys; the last one is the bias.

    `keys` uint64 [m + 1]; `indptr` int64 [n + 1]; `indices` int32 [nnz]; `values` float32 [nnz], or of length 0 if all
    values are 1.
    """

    __slots__ = ("indices", "indptr", "keys", "num_examples", "values")

    def __init__(self, batch: Batch, scratch: KeyScratch) -> None:
        num_nonzeros = len(batch.keys)
        unique = np.empty(num_nonzeros + 1, np.uint64)
        self.indices = np.empty(num_nonzeros, np.int32)
        count = dedup(batch.keys, scratch.slots(num_nonzeros), unique, self.indices)
        unique[count] = BIAS_KEY
        self.keys: Keys = unique[: count + 1]
        self.indptr = batch.indptr
        self.values = _ONES if batch.values is None else batch.values
        self.num_examples = batch.num_examples


def summed_weight(num_examples: int, weights: Floats | None) -> float:
    return float(num_examples) if weights is None else float(weights.sum(dtype=np.float64))


def sum_examples(rows: KeyedMatrix, labels: Floats, weights: Floats | None, predictions: Floats | None) -> ExampleSums:
    """Return the sums over a minibatch. All arrays are float32 [n]. `weights` is None if all weights are 1."""
    sums = [
        None if array is None else float(array.sum(dtype=np.float64) if weights is None else array @ weights)
        for array in (labels, predictions)
    ]
    return ExampleSums(summed_weight(rows.num_examples, weights), sums[0] or 0.0, sums[1], len(rows.indices))


class Minibatch(ABC):
    """A minibatch prepared for computation. `weights` are the rows of each table, float32 [len(keys), dim]."""

    __slots__ = ()

    num_examples: int
    labels: Floats
    """The labels as the model uses them, comparable with its predictions."""
    summed_weight: float
    """The sum of the examples' weights. If there are no weights, it is the number of examples."""

    @property
    @abstractmethod
    def keys(self) -> tuple[Keys, ...]:
        """For each table, the distinct keys of the required rows."""

    @property
    def gradient_keys(self) -> tuple[Keys, ...]:
        """For each table, the keys of the last :meth:`gradients`: a subset of :attr:`keys`."""
        return self.keys

    @abstractmethod
    def gradients(self, weights: Sequence[Floats]) -> tuple[Sequence[Floats], float]:
        """Return the gradients of each table and the loss, both summed over the minibatch.

        The gradients belong to :attr:`gradient_keys`: float32 [n, dim], or [n] if dim is 1.
        """

    @abstractmethod
    def sums(self) -> ExampleSums:
        """Return the sums of weights, labels and predictions, with the predictions of the last :meth:`gradients`."""

    @abstractmethod
    def predict(self, weights: Sequence[Floats]) -> Floats:
        """Return the predictions: float32 [n], or [n, :attr:`SparseModel.num_outputs`]."""


class KeyedMinibatch(Minibatch):
    """A minibatch as a matrix of distinct keys, for a model with one table. Abstract: subclasses compute gradients."""

    __slots__ = ("_rows", "_weights", "labels", "num_examples", "summed_weight")

    def __init__(self, batch: Batch, rows: KeyedMatrix) -> None:
        self._rows = rows
        self._weights = batch.weights
        self.summed_weight = summed_weight(batch.num_examples, batch.weights)
        self.labels = batch.labels
        self.num_examples = batch.num_examples

    @property
    @override
    def keys(self) -> tuple[Keys, ...]:
        return (self._rows.keys,)

    def _linear_margins(self, first: Floats) -> Floats:
        """Return Σ w[key]·value without the bias: float32 [n]. `first` has the weights of the first table."""
        rows, margins = self._rows, np.empty(self.num_examples, np.float32)
        csr_dot(rows.indptr, rows.indices, rows.values, first, margins)
        return margins

    def _linear_gradient(self, residuals: Floats, of_bias: np.float64) -> Floats:
        """Return the first table's gradient, given the loss's derivatives with respect to the margins (float32 [n])."""
        rows, gradient = self._rows, np.empty(len(self._rows.keys), np.float32)
        csr_transposed_dot(rows.indptr, rows.indices, rows.values, residuals, gradient[:-1])
        gradient[-1] = of_bias
        return gradient

    def occurrences(self) -> npt.NDArray[np.int64]:
        """Return the number of occurrences of each feature in the minibatch: int64 [m], without the bias."""
        found = np.empty(len(self._rows.keys) - 1, np.int64)
        count_occurrences(self._rows.indices, found)
        return found


class CountedMinibatch(Minibatch):
    """A minibatch that trains only features with at least `min_count` occurrences.

    The last table is a sketch. It counts features up to `min_count` in the first pass over the data.
    """

    __slots__ = (
        "_gradient_keys", "_inner", "_is_first_pass", "_min_count", "_sketched", "labels", "num_examples",
        "summed_weight",
    )  # fmt: skip

    def __init__(
        self,
        inner: KeyedMinibatch,
        min_count: int,
        num_cells: int,
        frequent: FrequentFeatures,
        *,
        is_first_pass: bool,
    ) -> None:
        self._inner = inner
        self._min_count = min_count
        self._is_first_pass = is_first_pass
        self._sketched = FeatureCounts(inner.keys[0][:-1], num_cells, frequent)
        self._gradient_keys: tuple[Keys, ...] = ()
        self.labels = inner.labels
        self.num_examples = inner.num_examples
        self.summed_weight = inner.summed_weight

    @property
    @override
    def keys(self) -> tuple[Keys, ...]:
        return *self._inner.keys, self._sketched.blocks

    @property
    @override
    def gradient_keys(self) -> tuple[Keys, ...]:
        return self._gradient_keys

    @override
    def gradients(self, weights: Sequence[Floats]) -> tuple[Sequence[Floats], float]:
        inner, counts = self._inner, weights[-1]
        occurrences = inner.occurrences() if self._is_first_pass else np.zeros(len(inner.keys[0]) - 1, np.int64)
        learned = self._sketched.have_occurred(counts, occurrences, self._min_count)
        gradients, loss = inner.gradients(weights[:-1])
        rare = inner.keys[0][:-1][~learned]
        chosen = [
            np.append(learned, True) if keys is inner.keys[0] else np.isin(keys, rare, invert=True)
            for keys in inner.gradient_keys
        ]
        blocks, added = self._sketched.added(counts, occurrences, self._min_count)
        pairs = list(zip(inner.gradient_keys, gradients, chosen, strict=True))
        self._gradient_keys = (*(keys[which] for keys, _, which in pairs), blocks)
        return [*(gradient[which] for _, gradient, which in pairs), -added], loss

    @override
    def sums(self) -> ExampleSums:
        return self._inner.sums()

    @override
    def predict(self, weights: Sequence[Floats]) -> Floats:
        return self._inner.predict(weights[:-1])


class Optimism(NamedTuple):
    """How much more predictions are biased on new examples than on training examples: log-odds and standard error."""

    shift: float = 0.0
    error: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseModel(ABC):
    """A model with its settings. Abstract: subclasses are frozen dataclasses whose fields are JSON values."""

    name: ClassVar[str]
    """The name for ``--model``."""
    title: ClassVar[str]
    """A noun phrase for messages."""
    loss_name: ClassVar[str]
    """The name of the mean loss in the progress line."""
    evaluation: ClassVar[type[Evaluation]]
    labels: ClassVar[str] = "clicks"
    """The kind of the labels: ``clicks`` or ``numbers``."""
    has_classes: ClassVar[bool] = True
    """Whether labels are classes and can have weights."""
    diverged_loss: ClassVar[float] = math.inf
    """A higher mean loss means that the training has diverged."""
    found: ClassVar[tuple[str, ...]] = ()
    """The names of the settings that :meth:`starting_from` sets."""
    usual: ClassVar[Mapping[str, Any]] = {}
    """Default values of settings that may be None. Trials may find better values."""
    least_batch_size: ClassVar[int] = 8
    """The smallest suitable batch size."""

    interactions: Interactions | None = None
    """Crosses of columns whose combined values are additional features."""
    min_count: int = 1
    """A feature is trained after this number of occurrences."""
    count_cells: int = 1 << 24
    """Number of cells of the sketch that counts features, if features are counted."""

    def __post_init__(self) -> None:
        check_counting(self.min_count, self.count_cells)
        object.__setattr__(self, "interactions", Interactions.of(self.interactions))

    @property
    def tables(self) -> tuple[ModelTable, ...]:
        """The tables of a training: the parameters' tables, then the sketch if features are counted."""
        if self.min_count == 1:
            return self.parameter_tables
        name = f"{self.name} occurrences"
        sketch = ModelTable(name, BLOCK, update=SGD(lr=1.0), is_count=True, is_by_feature=False)
        return *self.parameter_tables, sketch

    @property
    def read_labels_as(self) -> str:
        """How an opened data set converts labels (:mod:`paceline.data.labels`)."""
        return self.labels

    def with_defaults(self, found: Mapping[str, Any] | None = None) -> Self:
        """Return the model with `found` values, or else default values, for the settings that are None."""
        known = {**self.usual, **(found or {})}
        return dataclasses.replace(self, **{name: known[name] for name in known if getattr(self, name) is None})

    def value_of(self, setting: str) -> Any:
        """Return a setting's value, or its default if the value is None."""
        value = getattr(self, setting)
        return self.usual[setting] if value is None else value

    @property
    @abstractmethod
    def parameter_tables(self) -> tuple[ModelTable, ...]:
        """The tables of the parameters; the first has a row per feature and one for the bias."""

    @property
    def num_outputs(self) -> int:
        return 1

    def import_libraries(self) -> None:
        """Import optional libraries, which may take seconds. Raises UsageError if one is missing."""
        return

    def prepare(self, batch: Batch, scratch: KeyScratch) -> Minibatch:
        batch = self.crossed(batch)
        return self._to_minibatch(batch, KeyedMatrix(batch, scratch))

    def prepare_training(self, batch: Batch, scratch: KeyScratch, *, is_first_pass: bool) -> Minibatch:
        batch = self.crossed(batch)
        return self.training_minibatch(batch, KeyedMatrix(batch, scratch), scratch, is_first_pass=is_first_pass)

    def training_minibatch(
        self, batch: Batch, rows: KeyedMatrix, scratch: KeyScratch, *, is_first_pass: bool
    ) -> Minibatch:
        """Return the minibatch for :meth:`prepare_training`, given a batch with interactions and its distinct keys."""
        minibatch = self._to_minibatch(batch, rows)
        if self.min_count == 1:
            return minibatch
        settings = self.min_count, self.count_cells, scratch.frequent
        return CountedMinibatch(minibatch, *settings, is_first_pass=is_first_pass)

    def crossed(self, batch: Batch) -> Batch:
        return batch if self.interactions is None else self.interactions.apply(batch)

    @abstractmethod
    def _to_minibatch(self, batch: Batch, rows: KeyedMatrix) -> KeyedMinibatch:
        """Return the minibatch for a batch with interactions. `rows` is the matrix of its examples."""

    @abstractmethod
    def evaluate(self, labels: Floats, predictions: Floats) -> Evaluation:
        """Return the metrics of predictions; the arguments have the format of a minibatch."""

    @abstractmethod
    def losses_of(self, labels: Floats, predictions: Floats) -> Doubles:
        """Return the loss of each example, float64 [n]; the arguments have the format of a minibatch."""

    def starting_from(self, labels: Floats, weights: Floats | None = None) -> SparseModel:
        """Return the model adapted to the labels and weights of a sample. Raises DataError."""
        return self

    def continued_from(self, former: SparseModel) -> SparseModel:
        """Return the model with the data-dependent settings of `former`, to continue its training."""
        if type(former) is not type(self):
            return self
        fresh = type(self)()
        found = (*self.found, *self.usual)
        known = {name: getattr(former, name) for name in found if getattr(self, name) == getattr(fresh, name)}
        model: SparseModel = dataclasses.replace(self, **known)
        return model

    def of_columns(self, format: str, columns: Columns | None, fields: Sequence[str] = ()) -> SparseModel:
        """Return the model adapted to the columns of data of this format. Raises UsageError for unsuitable data."""
        if self.interactions is None:
            return self
        return dataclasses.replace(self, interactions=self.interactions.of_columns(format, columns, fields))

    def calibrated(
        self,
        labels: Floats,
        predictions: Floats,
        weights: Floats | None = None,
        optimism: Optimism | None = None,
        *,
        is_complete: bool = False,
    ) -> SparseModel:
        """Return the model with a corrected mean prediction, given predictions for training examples.

        The examples are in the order of the data, with optional `weights`. If the examples are all the data
        (`is_complete`), the whole bias is corrected. Otherwise only its significant part is corrected.
        """
        return self

    def describe(self) -> dict[str, Any]:
        settings: dict[str, Any] = dataclasses.asdict(self.with_defaults())
        for name in ("interactions", "min_count", "count_cells"):
            if settings[name] == SparseModel.__dataclass_fields__[name].default:
                del settings[name]  # older versions reject this setting
        return {"kind": self.name, **settings}


def open_tables(client: Client, model: SparseModel, update: UpdateRule) -> list[SparseTable]:
    """Open a model's tables on a cluster. `update` is the rule of the tables that have no rule of their own."""
    handles = []
    for table in model.tables:
        rule = table.update or update
        handle = client.sparse_table(table.name, dim=table.dim, update=rule, initializer=table.initializer)
        handle.is_count = table.is_count
        handles.append(handle)
    return handles


def predict_on_cluster(model: SparseModel, tables: Sequence[SparseTable], examples: Batch) -> Floats:
    predictions = []
    for part in rebatch([examples], _PREDICTED_ROWS):
        minibatch = model.prepare(part, KeyScratch())
        pulled = zip(tables, minibatch.keys, strict=False)
        predictions.append(minibatch.predict([table.pull(keys, assume_unique=True) for table, keys in pulled]))
    return np.concatenate(predictions)
