"""Multinomial logistic regression: predict the probabilities of several classes.

Each key has one weight per class. The classes are whole numbers, known before the training begins.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from paceline.data import Batch
from paceline.errors import DataError, UsageError
from paceline.kernels.csr import csr_dot_rows, csr_transposed_dot_rows
from paceline.models.base import KeyedMatrix, KeyedMinibatch, ModelTable, SparseModel, sum_examples
from paceline.models.metrics import Evaluation, find_useless
from paceline.models.progressive import ExampleSums
from paceline.tables.types import Doubles, Floats

MAX_CLASSES = 4096
_LARGEST_CLASS = 1 << 24
"""Larger integers are not exact in float32, the dtype of labels."""
_LEAST_PROBABILITY = 1e-15


@dataclasses.dataclass(frozen=True)
class ClassEvaluation(Evaluation):
    """The share of examples whose label is the most probable class, and the log loss."""

    accuracy: float
    log_loss: float
    counts: tuple[int, ...] = dataclasses.field(default=(), metadata={"metric": False})

    @property
    @override
    def loss(self) -> float:
        return self.log_loss

    @override
    def sentence(self) -> str:
        return f"accuracy {self.accuracy:.4f}, log loss {self.log_loss:.4f}"

    @override
    def find_useless(self) -> str | None:
        return find_useless(self.log_loss, self.counts)


def label_counts(labels: Floats) -> tuple[int, ...]:
    """Return the number of examples of each class, in the order of the classes."""
    return tuple(np.unique(labels, return_counts=True)[1].tolist())


def parse_classes(text: str) -> tuple[int, ...]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"--classes {text}: expected a number of classes, or whole numbers as in 1,2,5") from None
    if len(numbers) == 1:
        if not 2 <= numbers[0] <= MAX_CLASSES:
            raise UsageError(f"--classes {text}: expected 2 to {MAX_CLASSES:,} classes")
        return tuple(range(numbers[0]))
    return tuple(numbers)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SoftmaxRegression(SparseModel):
    """The probability of each class from a weight per feature and class. `classes` is sorted; () while unknown."""

    name: ClassVar[str] = "softmax"
    title: ClassVar[str] = "a multinomial logistic regression"
    loss_name: ClassVar[str] = "log loss"
    labels: ClassVar[str] = "numbers"
    evaluation: ClassVar[type[ClassEvaluation]] = ClassEvaluation
    diverged_loss: ClassVar[float] = 20.0
    found: ClassVar[tuple[str, ...]] = ("classes",)

    classes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        classes = tuple(sorted(self.classes))
        object.__setattr__(self, "classes", classes)
        if not classes:
            return
        if len(set(classes)) < len(classes) or not 2 <= len(classes) <= MAX_CLASSES:
            raise UsageError(f"{len(classes)} classes {self._list()}: expected 2 to {MAX_CLASSES:,} distinct classes")
        if max(-classes[0], classes[-1]) > _LARGEST_CLASS:
            raise UsageError(f"classes {self._list()}: expected whole numbers from -2^24 to 2^24")

    @property
    @override
    def parameter_tables(self) -> tuple[ModelTable, ...]:
        return (ModelTable(self.name, dim=self.num_outputs),)

    @property
    @override
    def num_outputs(self) -> int:
        return max(len(self.classes), 1)

    @override
    def starting_from(self, labels: Floats, weights: Floats | None = None) -> SoftmaxRegression:
        if self.classes:
            return self
        found = np.unique(labels)
        odd = found[(found != np.floor(found)) | (np.abs(found) > _LARGEST_CLASS)]
        if len(odd) or len(found) > MAX_CLASSES:
            problem = f"the label {odd[0]:g}" if len(odd) else f"{len(found):,} different labels"
            raise DataError(
                f"the data has {problem}: --model softmax needs whole numbers, at most {MAX_CLASSES:,} different "
                "labels. Use --model regression for quantities"
            )
        if len(found) < 2:
            raise DataError(f"a sample of the data has {len(found)} label. Pass all labels as --classes")
        return dataclasses.replace(self, classes=tuple(int(label) for label in found))

    @override
    def _to_minibatch(self, batch: Batch, rows: KeyedMatrix) -> KeyedMinibatch:
        return SoftmaxMinibatch(self, batch, rows)

    @override
    def evaluate(self, labels: Floats, predictions: Floats) -> ClassEvaluation:
        n = len(labels)
        if not n:
            return ClassEvaluation(0, math.nan, math.nan)
        places = self.places(labels)
        accuracy = float(((predictions.argmax(axis=1) == places) & (places >= 0)).mean())
        loss = float(self.losses_of(labels, predictions).mean())
        return ClassEvaluation(n, accuracy, loss, label_counts(labels))

    @override
    def losses_of(self, labels: Floats, predictions: Floats) -> Doubles:
        places = self.places(labels)
        own = np.where(places >= 0, predictions[np.arange(len(labels)), places], 0.0).astype(np.float64)
        return -np.log(np.maximum(own, _LEAST_PROBABILITY))

    def places(self, labels: Floats) -> npt.NDArray[np.int64]:
        """Return the index of each label among the classes, -1 for an unknown label."""
        classes = np.array(self.classes, np.float32)
        found = np.minimum(np.searchsorted(classes, labels), len(classes) - 1)
        return np.where(classes[found] == labels, found, -1)

    def _list(self) -> str:
        names = [str(number) for number in self.classes]
        return ", ".join(names if len(names) <= 8 else [*names[:7], "...", names[-1]])

    def unknown(self, label: float) -> DataError:
        return DataError(
            f"the data has the label {label:g}, but the classes are {self._list()}. Pass all labels as --classes"
        )


class SoftmaxMinibatch(KeyedMinibatch):
    """A minibatch of examples of several classes."""

    __slots__ = ("_model",)

    def __init__(self, model: SoftmaxRegression, batch: Batch, rows: KeyedMatrix) -> None:
        super().__init__(batch, rows)
        self._model = model

    @override
    def gradients(self, weights: Sequence[Floats]) -> tuple[Sequence[Floats], float]:
        rows, places = self._rows, self._model.places(self.labels)
        if len(places) and places.min() < 0:
            raise self._model.unknown(float(self.labels[np.argmin(places)]))
        logits = self.margins(weights)
        slopes = np.exp(logits)
        examples = np.arange(self.num_examples)
        losses = -logits[examples, places]
        slopes[examples, places] -= 1
        if self._weights is not None:
            losses, slopes = losses * self._weights, slopes * self._weights[:, np.newaxis]
        gradient = np.empty(weights[0].shape, np.float32)
        csr_transposed_dot_rows(rows.indptr, rows.indices, rows.values, slopes.astype(np.float32), gradient[:-1])
        gradient[-1] = slopes.sum(axis=0)
        return (gradient,), float(losses.sum())

    @override
    def sums(self) -> ExampleSums:
        return sum_examples(self._rows, self.labels, self._weights, None)

    @override
    def predict(self, weights: Sequence[Floats]) -> Floats:
        return np.exp(self.margins(weights)).astype(np.float32)

    def margins(self, weights: Sequence[Floats]) -> Doubles:
        """Return the log of each class's probability, float64 [n, classes]. :meth:`gradients` describes `weights`."""
        rows, (table, *_) = self._rows, weights
        sums = np.empty((self.num_examples, table.shape[1]), np.float32)
        csr_dot_rows(rows.indptr, rows.indices, rows.values, table, sums)
        logits: Doubles = sums.astype(np.float64) + table[-1]
        logits -= logits.max(axis=1, initial=-np.inf, keepdims=True)
        logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
        return logits
