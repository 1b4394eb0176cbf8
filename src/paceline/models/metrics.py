"""Compute AUC, log loss, calibration and accuracy of click probabilities exactly and in little memory.

All functions take labels 0 or 1 (of any dtype, including bool) and scores or probabilities of the same length, both
[n]. Sums are computed in float64 over pieces of 64 Ki examples. Other shapes, other labels and NaN raise
:exc:`~paceline.errors.UsageError`.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from paceline.errors import UsageError

Array = npt.NDArray[Any]

_PIECE = 1 << 16
_LEAST_PROBABILITY = 1e-15
"""The limit of scikit-learn up to 1.2; later versions use the dtype's epsilon."""


@dataclasses.dataclass(frozen=True)
class Evaluation(ABC):
    """The metrics of one set of predictions, one per field; NaN if a metric is undefined for these labels."""

    examples: int

    @classmethod
    def names(cls) -> tuple[str, ...]:
        fields = dataclasses.fields(cls)
        return tuple(field.name for field in fields if field.name != "examples" and field.metadata.get("metric", True))

    def as_json(self) -> dict[str, float | None]:
        """Return the metrics by name. Values that are not finite (the AUC if all labels are equal) become None."""
        found = {name: float(getattr(self, name)) for name in self.names()}
        return {name: value if math.isfinite(value) else None for name, value in found.items()}

    @property
    @abstractmethod
    def loss(self) -> float:
        """The metric that training minimizes."""

    @abstractmethod
    def sentence(self) -> str:
        """Return the defined metrics as text."""

    def find_useless(self) -> str | None:
        """Return a warning if the predictions are no better than a constant; otherwise None."""
        return None


@dataclasses.dataclass(frozen=True)
class ClickEvaluation(Evaluation):
    """The metrics of click probabilities."""

    auc: float
    log_loss: float
    calibration: float
    accuracy: float
    positives: int = dataclasses.field(default=0, metadata={"metric": False})

    @property
    @override
    def loss(self) -> float:
        return self.log_loss

    @override
    def sentence(self) -> str:
        if 0 < self.positives < self.examples:
            ranked, calibrated = f"AUC {self.auc:.4f}", f"calibration {self.calibration:.3f}, "
        else:
            ranked = f"no AUC (all labels are {'positive' if self.positives else 'negative'})"
            calibrated = f"calibration {self.calibration:.3f}, " if self.positives else ""
        return f"{ranked}, log loss {self.log_loss:.4f}, {calibrated}accuracy {self.accuracy:.4f}"

    @override
    def find_useless(self) -> str | None:
        return find_useless(self.log_loss, (self.examples - self.positives, self.positives))


_HARDLY_BETTER = 1 - 5e-4


def base_log_loss(counts: Sequence[int]) -> float:
    """Return the log loss if each class's share is its predicted probability: the entropy of the labels, in nats."""
    return -math.fsum(count / sum(counts) * math.log(count / sum(counts)) for count in counts if count > 0)


def find_useless(log_loss: float, counts: Sequence[int]) -> str | None:
    """Return a warning if predicting each class's share, given the classes' `counts`, has no greater log loss."""
    base = base_log_loss(counts)
    if base == 0 or log_loss < base * _HARDLY_BETTER:
        return None
    shares = ", ".join(f"{count / sum(counts):.4g}" for count in counts[:10])
    return (
        f"the log loss, {log_loss:.4f}, is no better than {base:.4f}, the log loss of predicting the shares of "
        f"the classes: {shares}{', ...' * (len(counts) > 10)}"
    )


def evaluate(labels: npt.ArrayLike, probabilities: npt.ArrayLike) -> ClickEvaluation:
    y, p = _checked_probabilities(labels, probabilities)
    correct = _mean(lambda y, p: (p >= 0.5) == y, y, p)
    return ClickEvaluation(len(y), _auc(y, p), _log_loss(y, p), _calibration(y, p), correct, int(np.count_nonzero(y)))


def auc(labels: npt.ArrayLike, scores: npt.ArrayLike) -> float:
    """Return the share of pairs of a positive and a negative example whose order the scores predict.

    A tie counts one half (Fawcett, "An introduction to ROC analysis", 2006, section 7). The result is exact, because
    pairs are counted in integers and divided once; it is NaN if there is only one class. Scores may be infinite. Takes
    O(n log n) time, and memory for a copy of the scores plus one byte per example.
    """
    return _auc(*_checked(labels, scores))


def log_loss(labels: npt.ArrayLike, probabilities: npt.ArrayLike) -> float:
    """Return the mean of -ln(probability of the actual label), in nats; NaN without examples.

    Probabilities are first clipped to [1e-15, 1 - 1e-15], so a certain but wrong prediction costs 34.5.
    """
    return _log_loss(*_checked_probabilities(labels, probabilities))


def _auc(y: Array, scores: Array) -> float:
    positive, negative = scores[y], scores[~y]
    if not len(positive) or not len(negative):
        return math.nan
    pairs = len(positive) * len(negative)
    # Both arrays are sorted, so that the searches of a piece read neighbouring memory.
    positive.sort()
    negative.sort()
    twice = 0
    for start in range(0, len(positive), _PIECE):
        piece = positive[start : start + _PIECE]
        twice += int(np.searchsorted(negative, piece, side="left").sum())
        twice += int(np.searchsorted(negative, piece, side="right").sum())
    return twice / (2 * pairs)


def _log_loss(y: Array, p: Array) -> float:
    def losses(y: Array, p: Array) -> Array:
        p = np.clip(p.astype(np.float64), _LEAST_PROBABILITY, 1 - _LEAST_PROBABILITY)
        # log1p(-p) would be more exact, but for probabilities clipped near 1 other libraries return this value.
        return -np.log(np.where(y, p, 1 - p))

    return _mean(losses, y, p)


def _calibration(y: Array, p: Array) -> float:
    clicks = np.count_nonzero(y)
    return _mean(lambda _, p: p, y, p) * len(y) / clicks if clicks else math.nan


def _mean(function: Callable[[Array, Array], Array], y: Array, p: Array) -> float:
    pieces = (
        float(function(y[start : start + _PIECE], p[start : start + _PIECE]).sum(dtype=np.float64))
        for start in range(0, len(y), _PIECE)
    )
    return math.fsum(pieces) / len(y) if len(y) else math.nan


def sum_pieces(function: Callable[[Array, Array], Array], labels: Array, predictions: Array) -> float:
    return math.fsum(
        float(function(*(array[start : start + _PIECE].astype(np.float64) for array in (labels, predictions))).sum())
        for start in range(0, len(labels), _PIECE)
    )


def _checked(labels: npt.ArrayLike, scores: npt.ArrayLike) -> tuple[Array, Array]:
    y, s = np.asarray(labels), np.asarray(scores)
    if y.ndim != 1 or y.shape != s.shape:
        raise UsageError(
            f"labels have shape {y.shape} and predictions {s.shape}: expected one dimension and equal lengths"
        )
    if s.dtype.kind not in "fiub":
        raise UsageError(f"predictions have dtype {s.dtype}: expected real numbers")
    positive = y == 1
    if np.count_nonzero(positive) + np.count_nonzero(y == 0) != len(y):
        raise UsageError("a label is neither 0 nor 1. These metrics are for clicks. Convert the labels first")
    if s.dtype.kind == "f" and np.isnan(s).any():
        raise UsageError("a prediction is NaN. The model diverged or was not trained. Train it again")
    return positive, s


def _checked_probabilities(labels: npt.ArrayLike, probabilities: npt.ArrayLike) -> tuple[Array, Array]:
    y, p = _checked(labels, probabilities)
    if len(p) and not (p.min() >= 0 and p.max() <= 1):
        raise UsageError(f"probabilities range from {p.min()} to {p.max()}: expected 0 to 1. Do not pass raw scores")
    return y, p
