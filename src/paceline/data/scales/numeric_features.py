"""Find the features whose values are numbers, and candidates for the scales and bins of all of them together.

The best scale of a feature alone (:mod:`.scaling`) need not be the best one together with other features, and the cost
of a bin depends on the learning algorithm. A trial selects the best candidate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from paceline.data.batch import Batch
from paceline.data.scales.one_column import Doubles
from paceline.data.scales.scaling import TRIED_BINS, ExplainedNumbers, Scale, explain_numbers

_LEAST_SHARE: Final = 0.1
_TABLE_SHARE: Final = 0.9  # if common features have this fraction of the pairs, the data is a table
_DENSE_SHARE: Final = 0.5
_LEAST_ROWS: Final = 20
_LEAST_VALUES: Final = 3
_MOST_FEATURES: Final = 2_000
_MOST_ROWS: Final = 10_000
_MOST_NUMBERS: Final = 1 << 19
_CLASSES: Final = 64
_BINS_OF_ALL: Final = TRIED_BINS[:3]
_SIDES: Final[tuple[Literal["left"], Literal["right"]]] = ("left", "right")

Positions = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class NumericFeature:
    """The numbers of one feature (float64 [m]), and the labels of its examples (float64 [m])."""

    key: int
    field: int | None
    numbers: Doubles
    labels: Doubles


def find_numeric_features(batch: Batch, *, absent_is_zero: bool) -> list[NumericFeature]:
    """Return the features with at least three values that occur in at least a tenth of the rows.

    If `absent_is_zero`, a missing number is 0. If then more than a tenth of the pairs are rare features, such as words,
    a feature must occur in half of the rows, because the zeros would outweigh the rare features. Uses up to 10,000
    evenly spread rows. Returns no features if more than 2,000 remain.
    """
    if batch.values is None:
        return []
    batch = _spread_rows(batch, _MOST_ROWS)
    keys, counts = np.unique(batch.keys, return_counts=True)
    is_common = counts >= max(_LEAST_SHARE * batch.num_examples, _LEAST_ROWS)
    if absent_is_zero and counts[is_common].sum() < _TABLE_SHARE * len(batch.keys):
        is_common &= counts > _DENSE_SHARE * batch.num_examples
    keys = keys[is_common]
    if len(keys) > _MOST_FEATURES:
        return []
    found = numbers_of(batch, keys.tolist(), absent_is_zero=absent_is_zero)
    return [feature for feature in found if len(np.unique(feature.numbers)) >= _LEAST_VALUES]


def numbers_of(batch: Batch, keys: Sequence[int], *, absent_is_zero: bool) -> list[NumericFeature]:
    """Return the features with these `keys`, in this order. :func:`find_numeric_features` explains missing numbers."""
    if not keys:
        return []
    batch = _spread_rows(batch, min(max(_MOST_NUMBERS // len(keys), _LEAST_ROWS), _MOST_ROWS))
    order = np.argsort(batch.keys, kind="stable")
    row = np.repeat(np.arange(batch.num_examples), np.diff(batch.indptr))[order]
    assert batch.values is not None
    sorted_keys, values = batch.keys[order], batch.values[order].astype(np.float64)
    labels = batch.labels.astype(np.float64)
    wanted = np.array(keys, np.uint64)
    starts, stops = (np.searchsorted(sorted_keys, wanted, side=side) for side in _SIDES)
    found = []
    for key, start, stop in zip(keys, starts.tolist(), stops.tolist(), strict=True):
        field = None if batch.fields is None or start == stop else int(batch.fields[order[start]])
        rows, numbers = row[start:stop], values[start:stop]
        if absent_is_zero:
            every = np.zeros(batch.num_examples)
            every[rows] = numbers
            found.append(NumericFeature(key, field, every, labels))
        else:
            found.append(NumericFeature(key, field, numbers, labels[rows]))
    return found


def _spread_rows(batch: Batch, most: int) -> Batch:
    n = batch.num_examples
    return batch if n <= most else batch.take(np.linspace(0, n - 1, most).astype(np.int64))


def known_labels(labels: Doubles) -> Doubles | None:
    """Return the labels; None if 3 to 64 are distinct, because they may be classes, which no line explains."""
    return None if 2 < len(np.unique(labels[np.isfinite(labels)])) <= _CLASSES else labels


def explain_features(features: Sequence[NumericFeature]) -> list[ExplainedNumbers]:
    """Return the scales of each feature, fitted to the labels without the other features.

    If there are many features, some fit better with logarithms by chance. Therefore logarithms must be better by
    additional ln(number of features) nats (the risk inflation criterion: Foster and George, Annals of Statistics 1994).
    """
    chance = math.log(max(len(features), 1))
    return [explain_numbers(feature.numbers, known_labels(feature.labels), chance) for feature in features]


def candidate_scales(explained: Sequence[ExplainedNumbers]) -> list[tuple[Scale, ...]]:
    """Return distinct candidates for the scales of all features. The usual scales come first.

    The other candidates are: 8, 16, 32 or 64 bins for all features that usually have bins; 8, 16 or 32 bins for all
    features; no bins; no bins and no logarithms. No candidate selects features by their gain: some of many features
    gain by chance, even on held-out examples.
    """
    usual = tuple(fit.usual for fit in explained)
    found = [usual]
    for at in range(len(TRIED_BINS)):
        found.append(tuple(fit.bins[at] if scale.edges else scale for fit, scale in zip(explained, usual, strict=True)))
    found += [tuple(fit.bins[TRIED_BINS.index(num_bins)] for fit in explained) for num_bins in _BINS_OF_ALL]
    found += [tuple(fit.line for fit in explained), tuple(fit.plain for fit in explained)]
    return list(dict.fromkeys(found))
