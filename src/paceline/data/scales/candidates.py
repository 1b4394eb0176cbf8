"""Candidate scales and bins of all numeric features together; a trial selects the best.

The fit of a single feature (:mod:`.scaling`) is a good guide, but not exact: together with other features it may
explain more or less, and the cost of a bin depends on the learning algorithm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, TypeAlias

import numpy as np

from paceline.data.scales.numeric_features import NumericFeature
from paceline.data.scales.one_column import Doubles
from paceline.data.scales.scaling import TRIED_BINS, ExplainedNumbers, Scale, explain_numbers

Scales: TypeAlias = tuple[Scale, ...]

_CLASSES: Final = 64
_BINS_OF_ALL: Final = TRIED_BINS[:3]


def known_labels(labels: Doubles) -> Doubles | None:
    """Return labels that a line can explain; None for 3 to 64 values, which may be classes or counts."""
    return None if 2 < len(np.unique(labels[np.isfinite(labels)])) <= _CLASSES else labels


def explain_features(features: Sequence[NumericFeature]) -> list[ExplainedNumbers]:
    """Return the fit of each single feature.

    Among many features some fit better on logarithms by chance, so logarithms must be better by ln(number of features)
    nats more (the risk inflation criterion: Foster and George, Annals of Statistics 1994).
    """
    chance = math.log(max(len(features), 1))
    return [explain_numbers(feature.numbers, known_labels(feature.labels), chance) for feature in features]


def candidate_scales(explained: Sequence[ExplainedNumbers]) -> list[Scales]:
    """Return distinct candidates for the scales of all features, the usual ones first.

    The other candidates are: 8, 16, 32 or 64 bins for all features that usually have bins; 8, 16 or 32 bins for all; no
    bins; no bins and no logarithms. No candidate selects features by their gain, because some of many features gain by
    chance, on held-out examples too.
    """
    usual = tuple(fit.usual for fit in explained)
    found = [usual]
    for at in range(len(TRIED_BINS)):
        found.append(tuple(fit.bins[at] if scale.edges else scale for fit, scale in zip(explained, usual, strict=True)))
    found += [tuple(fit.bins[TRIED_BINS.index(num_bins)] for fit in explained) for num_bins in _BINS_OF_ALL]
    found += [tuple(fit.line for fit in explained), tuple(fit.plain for fit in explained)]
    return list(dict.fromkeys(found))
