"""Scales and bins of all numeric features together, of which a trial takes the best.

What a feature explains of the labels by itself (:mod:`.scaling`) is a good guide, but not the last word: beside others
it may explain more or less, and what a bin costs depends on how it is learned.
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
    """Return labels that a line can explain; None for 3 to 64 values: they may be classes or counts."""
    return None if 2 < len(np.unique(labels[np.isfinite(labels)])) <= _CLASSES else labels


def explain_features(features: Sequence[NumericFeature]) -> list[ExplainedNumbers]:
    """Return what each feature explains of the labels by itself.

    Of many features some explain more on logarithms by chance: they must by ln(number of features) nats more (the risk
    inflation criterion: Foster and George, Annals of Statistics 1994).
    """
    chance = math.log(max(len(features), 1))
    return [explain_numbers(each.numbers, known_labels(each.labels), chance) for each in features]


def candidate_scales(explained: Sequence[ExplainedNumbers]) -> list[Scales]:
    """Return scales of all features, the usual ones first, none twice.

    Others are: as many bins for all that usually have some (8, 16, 32 or 64); 8, 16 or 32 bins for all; no bins; and no
    logarithms either. None gives bins to more features by what they gain: of many some gain by chance, on examples that
    are held out later too.
    """
    usual = tuple(each.usual for each in explained)
    found = [usual]
    for at in range(len(TRIED_BINS)):
        found.append(
            tuple(each.bins[at] if scale.edges else scale for each, scale in zip(explained, usual, strict=True))
        )
    found += [tuple(each.bins[TRIED_BINS.index(num_bins)] for each in explained) for num_bins in _BINS_OF_ALL]
    found += [tuple(each.line for each in explained), tuple(each.plain for each in explained)]
    return list(dict.fromkeys(found))
