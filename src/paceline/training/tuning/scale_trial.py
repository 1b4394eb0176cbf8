"""Choose scales and bins of numbers: compare a logistic regression's held-out losses on a sample.

The usual scales are chosen for each feature alone (:mod:`paceline.data.scales.numeric_features`). Other scales must be
better by more than one standard error, or by more than two for up to 5,000 examples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Protocol

import numpy as np

from paceline.data.batch import Batch
from paceline.data.example_sampling import thin
from paceline.data.sampling import ExampleSample
from paceline.environment import num_cores
from paceline.models.fm import FactorModel
from paceline.models.logistic import SparseLogisticRegression
from paceline.tables.rules import FTRL
from paceline.training.tuning.choices import L1, suggested_alpha, suggested_batch_size, suits_mixing
from paceline.training.tuning.model_trial import ModelTrial
from paceline.training.tuning.search import FACTORS
from paceline.training.tuning.trial import MAX_PASSES, SMALL, HeldOutLosses, SampleTrial, Split, held_out_splits

_MAX_PAIRS: Final = 1 << 20
_MAX_PAIR_VISITS: Final = 12_000_000
_LEAST_PASSES: Final = 6
_CAUTION: Final = 2.0
_RATE: Final = 0.7


class Scaling(Protocol):
    """A way to scale the numbers of examples."""

    def apply(self, batch: Batch) -> Batch:
        """Return scaled examples. `batch` itself does not change."""


def best_scaling(sample: ExampleSample, scalings: Sequence[Scaling | None]) -> int:
    """Return the index of the best scaling for a sample with labels 0 and 1. Index 0 is the usual scaling."""
    if len(scalings) < 2:
        return 0
    offset = SparseLogisticRegression().starting_from(sample.batch.labels, sample.batch.weights).offset
    batch, _ = thin(sample, sample.batch.num_examples * _MAX_PAIRS // max(len(sample.batch.keys), _MAX_PAIRS))
    part = dataclasses.replace(sample, batch=batch, num_examples=batch.num_examples)
    batch_size = suggested_batch_size(part.num_examples)
    is_mixed = suits_mixing(sample, scaled_sample(part, scalings[0]), offset, batch_size)
    splits = list(held_out_splits(batch, is_mixed=is_mixed))
    pool = ThreadPoolExecutor(num_cores())
    try:
        tried = list(pool.map(lambda scaling: _try(part, scaling, offset, splits), scalings))
    finally:
        pool.shutdown(cancel_futures=True)  # after Ctrl-C, no further trial starts
    best = int(np.argmin([trial.mean for trial in tried]))
    errors = _CAUTION if part.num_examples <= SMALL else 1.0
    return best if tried[best].is_below(tried[0], errors) else 0


def is_worse_for_factors(
    model: FactorModel, sample: ExampleSample, nonlinear: Scaling | None, plain: Scaling | None
) -> bool:
    """Return whether a factorization machine is better, by more than chance, on `plain` than on `nonlinear` scales.

    This may be so, because each pair of bins is rarer than the pair of their numbers.
    """
    batch_size = suggested_batch_size(sample.num_examples, model.least_batch_size)
    model = model.starting_from(sample.batch.labels, sample.batch.weights).with_defaults(FACTORS[2])
    is_mixed, losses = suits_mixing(sample, scaled_sample(sample, nonlinear), model.offset, batch_size), []
    for scaling in (nonlinear, plain):
        part = scaled_sample(sample, scaling)
        trial = ModelTrial(model, part, batch_size, is_mixed=is_mixed)
        losses.append(trial.run(model, FTRL(alpha=suggested_alpha(part, _RATE), l1=L1)).losses)
    return len(losses[0].losses) == len(losses[1].losses) and losses[1].is_below(losses[0])


def scaled_sample(sample: ExampleSample, scaling: Scaling | None) -> ExampleSample:
    return sample if scaling is None else dataclasses.replace(sample, batch=scaling.apply(sample.batch))


def _try(part: ExampleSample, scaling: Scaling | None, offset: float, splits: Sequence[Split]) -> HeldOutLosses:
    part = scaled_sample(part, scaling)
    batch_size = suggested_batch_size(part.num_examples)
    rule = FTRL(alpha=suggested_alpha(part, _RATE), l1=L1)
    affordable = _MAX_PAIR_VISITS // max(len(part.batch.keys) * len(splits), 1)
    passes = min(max(affordable, _LEAST_PASSES), MAX_PASSES)
    return SampleTrial(part.batch, offset, batch_size, splits).run(rule, max_passes=passes).losses
