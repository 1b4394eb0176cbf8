"""What every model is: settings, the tables that hold its parameters, and the arithmetic of one minibatch.

A model is one file of this package; :mod:`paceline.models.registry` finds it by name. Workers, the driver of a training
and prediction go by this interface and know no model: where parameters come from and where gradients go is theirs.
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
"""«Paceline» in ASCII: a number that no hashed feature is likely to have."""

_ONES = np.empty(0, np.float32)
_PREDICTED_ROWS = 65_536  # at once


class ModelTable(NamedTuple):
    """A sparse table of a model: a row of `dim` float32 for each key."""

    name: str
    dim: int = 1
    update: UpdateRule | None = None
    """None: the rule that the training is given."""
    initializer: Initializer | None = None
    is_count: bool = False
    """Whether its values count something: what is pushed is applied as it is, behind no filter that is not exact."""
    is_by_feature: bool = True
    """Whether its keys are those of features, as in the model's first table."""


class KeyScratch:
    """Memory that minibatches of one worker are prepared in, one after the other; they are all of one training."""

    def __init__(self) -> None:
        self._slots = np.empty(scratch_size(1 << 14), np.int32)

    @cached_property
    def frequent(self) -> FrequentFeatures:
        """The features that were found to have occurred often enough."""
        return FrequentFeatures()

    def slots(self, num_keys: int) -> npt.NDArray[np.int32]:
        """Return what :func:`dedup` needs for so many keys."""
        size = scratch_size(num_keys)
        if len(self._slots) < size:
            self._slots = np.empty(size, np.int32)
        return self._slots[:size]


class KeyedMatrix:
    """The examples of a minibatch as a CSR matrix whose columns are its distinct keys; the bias' key is the last.

    `keys` uint64 [m + 1]; `indptr` int64 [n + 1]; `indices` int32 [nnz]; `values` float32 [nnz], or of length 0 where
    every value is 1.
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
    """Return how often examples count together; `weights` float32 [n], None where all count once."""
    return float(num_examples) if weights is None else float(weights.sum(dtype=np.float64))


def sum_examples(rows: KeyedMatrix, labels: Floats, weights: Floats | None, predictions: Floats | None) -> ExampleSums:
    """Return sums over the examples of a minibatch; arguments float32 [n], `weights` None where all count once."""
    sums = [
        None if each is None else float(each.sum(dtype=np.float64) if weights is None else each @ weights)
        for each in (labels, predictions)
    ]
    return ExampleSums(summed_weight(rows.num_examples, weights), sums[0] or 0.0, sums[1], len(rows.indices))


class Minibatch(ABC):
    """A minibatch ready for arithmetic. `weights` are float32 [len(keys), dim], a table's after the other's."""

    __slots__ = ()

    num_examples: int
    labels: Floats
    """As the model sees them: what metrics compare predictions with."""
    summed_weight: float
    """How often the examples count, summed: as many as they are, where each counts once."""

    @property
    @abstractmethod
    def keys(self) -> tuple[Keys, ...]:
        """The distinct keys whose rows are needed, by table."""

    @property
    def gradient_keys(self) -> tuple[Keys, ...]:
        """The keys that the last :meth:`gradients` were of, by table: not always all."""
        return self.keys

    @abstractmethod
    def gradients(self, weights: Sequence[Floats]) -> tuple[Sequence[Floats], float]:
        """Return the gradients summed over the minibatch, by table, and the summed loss.

        They are those of :attr:`gradient_keys`: float32 [n, dim], or [n] where dim is 1.
        """

    @abstractmethod
    def sums(self) -> ExampleSums:
        """Return sums over the examples, of the predictions too that the last :meth:`gradients` are of."""

    @abstractmethod
    def predict(self, weights: Sequence[Floats]) -> Floats:
        """Return what the model says of each example: float32 [n], or [n, :attr:`SparseModel.num_outputs`]."""


class KeyedMinibatch(Minibatch):
    """A minibatch as a matrix of distinct keys; all are needed of one table. Abstract: arithmetic is missing."""

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

    def occurrences(self) -> npt.NDArray[np.int64]:
        """Return how often each feature stands in the examples: int64 [m], without the bias."""
        found = np.empty(len(self._rows.keys) - 1, np.int64)
        count_occurrences(self._rows.indices, found)
        return found


class CountedMinibatch(Minibatch):
    """A minibatch of which only features that have occurred `min_count` times are learned from.

    The last table is the sketch that counts them: in the first pass over the data, until a cell has come so far.
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
    """How far predictions of new examples are off beyond those of learned ones, in log-odds, and the standard error."""

    shift: float = 0.0
    error: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseModel(ABC):
    """A model with its settings. Abstract: subclasses are frozen dataclasses whose fields are fit for JSON."""

    name: ClassVar[str]
    """What ``--model`` calls it."""
    title: ClassVar[str]
    """What it is, for people."""
    loss_name: ClassVar[str]
    """What the progress line calls its mean loss."""
    evaluation: ClassVar[type[Evaluation]]
    """Its metrics."""
    labels: ClassVar[str] = "clicks"
    """The kind of labels it learns: ``clicks``, or ``numbers``."""
    has_classes: ClassVar[bool] = True
    """Whether labels are classes, which may have weights."""
    diverged_loss: ClassVar[float] = math.inf
    """A mean loss above this is that of a training that diverged."""
    found: ClassVar[tuple[str, ...]] = ()
    """The settings that :meth:`starting_from` finds."""
    usual: ClassVar[Mapping[str, Any]] = {}
    """The values of the settings that may be left open, which are None then, where no trial finds others."""
    least_batch_size: ClassVar[int] = 8
    """The smallest minibatches that suit it."""

    interactions: Interactions | None = None
    """The columns whose values are features together too."""
    min_count: int = 1
    """How often a feature must have occurred to be learned."""
    count_cells: int = 1 << 24
    """Cells of the sketch that counts features, where they are counted."""

    def __post_init__(self) -> None:
        check_counting(self.min_count, self.count_cells)
        object.__setattr__(self, "interactions", Interactions.of(self.interactions))

    @property
    def tables(self) -> tuple[ModelTable, ...]:
        """The tables of a training: its parameters', and last that of the sketch, if features are counted."""
        if self.min_count == 1:
            return self.parameter_tables
        name = f"{self.name} occurrences"
        sketch = ModelTable(name, BLOCK, update=SGD(lr=1.0), is_count=True, is_by_feature=False)
        return *self.parameter_tables, sketch

    @property
    def read_labels_as(self) -> str:
        """As what labels are read, which data is opened with (:mod:`paceline.data.labels`)."""
        return self.labels

    def settled(self, found: Mapping[str, Any] | None = None) -> Self:
        """Return the model with no setting left open: those that are get the values given, or the usual ones."""
        known = {**self.usual, **(found or {})}
        return dataclasses.replace(self, **{name: known[name] for name in known if getattr(self, name) is None})

    def value_of(self, setting: str) -> Any:
        """Return the value of a setting, which is the usual one if it is left open."""
        value = getattr(self, setting)
        return self.usual[setting] if value is None else value

    @property
    @abstractmethod
    def parameter_tables(self) -> tuple[ModelTable, ...]:
        """The tables that hold its parameters; the first has a row for each feature and one for the bias."""

    @property
    def num_outputs(self) -> int:
        """How many numbers a prediction is."""
        return 1

    def import_libraries(self) -> None:
        """Import what arithmetic needs beyond NumPy, which may take seconds. Raises UsageError where it is missing."""
        return

    def prepare(self, batch: Batch, scratch: KeyScratch) -> Minibatch:
        """Return a batch as it was read ready for predictions, with all that is made of its features."""
        batch = self.crossed(batch)
        return self._to_minibatch(batch, KeyedMatrix(batch, scratch))

    def prepare_training(self, batch: Batch, scratch: KeyScratch, *, is_first_pass: bool) -> Minibatch:
        """Return a batch as it was read ready for gradients, too."""
        batch = self.crossed(batch)
        return self.training_minibatch(batch, KeyedMatrix(batch, scratch), scratch, is_first_pass=is_first_pass)

    def training_minibatch(
        self, batch: Batch, rows: KeyedMatrix, scratch: KeyScratch, *, is_first_pass: bool
    ) -> Minibatch:
        """Do as :meth:`prepare_training` with a batch whose interactions and distinct keys are there."""
        minibatch = self._to_minibatch(batch, rows)
        if self.min_count == 1:
            return minibatch
        settings = self.min_count, self.count_cells, scratch.frequent
        return CountedMinibatch(minibatch, *settings, is_first_pass=is_first_pass)

    def crossed(self, batch: Batch) -> Batch:
        """Return a batch with its interactions."""
        return batch if self.interactions is None else self.interactions.apply(batch)

    @abstractmethod
    def _to_minibatch(self, batch: Batch, rows: KeyedMatrix) -> KeyedMinibatch:
        """Return a batch whose interactions are there ready for arithmetic; `rows` are its examples."""

    @abstractmethod
    def evaluate(self, labels: Floats, predictions: Floats) -> Evaluation:
        """Return how good predictions are; arguments as a minibatch has them."""

    @abstractmethod
    def losses_of(self, labels: Floats, predictions: Floats) -> Doubles:
        """Return the loss of each example: float64 [n]; arguments as a minibatch has them."""

    def starting_from(self, labels: Floats, weights: Floats | None = None) -> SparseModel:
        """Return the model with what it must know of the labels, given those of a sample and how often each counts.

        Raises DataError.
        """
        return self

    def continued_from(self, former: SparseModel) -> SparseModel:
        """Return the model with what `former` has found of the labels, which it goes on from."""
        if type(former) is not type(self):
            return self
        fresh = type(self)()
        found = (*self.found, *self.usual)
        known = {name: getattr(former, name) for name in found if getattr(self, name) == getattr(fresh, name)}
        model: SparseModel = dataclasses.replace(self, **known)
        return model

    def of_columns(self, format: str, columns: Columns | None, fields: Sequence[str] = ()) -> SparseModel:
        """Return the model with what it must know of the columns of the data, which has this format.

        `fields` are those of formats without columns (:class:`RowLayout`). Raises UsageError if it needs others.
        """
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
        is_whole: bool = False,
    ) -> SparseModel:
        """Return the model with a corrected mean prediction, given its predictions for examples of its training.

        The examples are in the order of the data; `weights` are how often each counts. If they are all of the data
        (`is_whole`), their bias is corrected in full, else as far as it is significant.
        """
        return self

    def describe(self) -> dict[str, Any]:
        """Return kind and settings, as they travel and stand in manifests."""
        settings: dict[str, Any] = dataclasses.asdict(self.settled())
        for name in ("interactions", "min_count", "count_cells"):
            if settings[name] == SparseModel.__dataclass_fields__[name].default:
                del settings[name]  # as before there were any
        return {"kind": self.name, **settings}


def open_tables(client: Client, model: SparseModel, update: UpdateRule) -> list[SparseTable]:
    """Open a model's tables on a cluster; `update` is the rule of those that have none of their own."""
    handles = []
    for table in model.tables:
        rule = table.update or update
        handle = client.sparse_table(table.name, dim=table.dim, update=rule, initializer=table.initializer)
        handle.is_count = table.is_count
        handles.append(handle)
    return handles


def predict_on_cluster(model: SparseModel, tables: Sequence[SparseTable], examples: Batch) -> Floats:
    """Return the predictions for examples, by the rows of the model's open tables."""
    predictions = []
    for part in rebatch([examples], _PREDICTED_ROWS):
        minibatch = model.prepare(part, KeyScratch())
        pulled = zip(tables, minibatch.keys, strict=False)
        predictions.append(minibatch.predict([table.pull(keys, assume_unique=True) for table, keys in pulled]))
    return np.concatenate(predictions)
