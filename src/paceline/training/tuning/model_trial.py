"""Try settings of any model on a sample of the data, in this process.

A trial uses the model's own minibatches and update rules. It chooses the held-out examples and the number of passes
like :mod:`paceline.training.tuning.trial`.

A trial of one setting takes about one second on one core. The numbers of examples, passes and folds depend on an
estimate of the model's speed. The speed is not measured, because equal data must lead to equal choices. Slower models
are tried on fewer examples, but at least on 8,192, in runs of consecutive examples from the whole sample. If the labels
have two classes, the rarer class keeps all its examples, up to half of this number. On small data, slow models are
tried on fewer of the five folds, but at least on one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import numpy as np
from typing_extensions import Self

from paceline.data.batch import Batch
from paceline.data.example_sampling import thin
from paceline.data.sampling import ExampleSample
from paceline.environment import num_cores
from paceline.models.base import KeyScratch, Minibatch, Optimism, SparseModel
from paceline.models.deep.base import DeepModel
from paceline.models.fm import FactorModel
from paceline.models.rate_drift import log_odds_shift
from paceline.ps import SparseStore, UpdateRule
from paceline.tables.initializers import Zeros
from paceline.tables.types import Doubles, Floats
from paceline.training.tuning.trial import (
    MAX_PASSES,
    RUN,
    HeldOutLosses,
    Positions,
    held_out_splits,
    is_over,
    passes_needed,
)

SECONDS: Final = 1.0
_LEAST_ROWS = 8_192
_USUAL_PASSES = 3
_PASSES_OF_SMALL = 12
_AT_ONCE = 4096


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TriedModel:
    """The result of a trial: the number of passes until the model was good enough, and the best pass's losses."""

    model: SparseModel
    rule: UpdateRule
    passes: int
    losses: HeldOutLosses


class ModelTrial:
    """A part of a sample, split into examples for training and held-out examples.

    Each setting's best pass counts. If `passes` is given and the trial has all the data, settings are compared after
    this number of passes. In a trial with a part of the data, models overfit after fewer passes than in the training.
    """

    def __init__(
        self,
        model: SparseModel,
        sample: ExampleSample,
        batch_size: int,
        *,
        is_mixed: bool,
        passes: int | None = None,
        seconds: float = SECONDS,
    ) -> None:
        def seconds_of(part: Batch) -> float:
            return seconds_per_pass(model, part.num_examples, len(part.keys), batch_size)

        n = sample.batch.num_examples
        affordable = int(n * seconds / (_USUAL_PASSES * seconds_of(sample.batch)))
        self.batch, self.num_represented = thin(sample, max(affordable, _LEAST_ROWS))
        self.is_complete = self.num_examples == n and sample.is_whole
        pass_s = seconds_of(self.batch)
        splits = held_out_splits(self.batch, is_mixed=is_mixed)
        num_splits = max(int(seconds / (_PASSES_OF_SMALL * pass_s)), 1)
        self.splits = list(itertools.islice(splits, num_splits))
        self._passes = passes
        most = int(np.clip(seconds / (pass_s * max(len(self.splits), 1)), _USUAL_PASSES, MAX_PASSES))
        self.max_passes = most if passes is None else min(passes, most)
        self._batch_size = batch_size
        counts = self.batch.weights
        every = np.concatenate([held_out for _, held_out in self.splits])
        self._labels = self.batch.labels[every]
        self._weights = np.ones(len(every)) if counts is None else counts[every].astype(np.float64)

    @property
    def num_examples(self) -> int:
        return self.batch.num_examples

    def run_all(self, settings: Sequence[tuple[SparseModel, UpdateRule]]) -> list[TriedModel]:
        if settings:
            settings[0][0].import_libraries()
        pool = ThreadPoolExecutor(num_cores())
        try:
            return list(pool.map(lambda setting: self.run(*setting), settings))
        finally:
            pool.shutdown(cancel_futures=True)  # after Ctrl-C, no further trial starts

    def run(self, model: SparseModel, rule: UpdateRule) -> TriedModel:
        learners = [_Learner(model, rule, self.batch, split, self._batch_size) for split in self.splits]
        of_constant = self._losses(model, learners).mean
        means: list[float] = []
        best: HeldOutLosses | None = None
        for number in range(self.max_passes):
            for learner in learners:
                learner.learn(is_first_pass=not number)
            found = self._losses(model, learners)
            means.append(found.mean if math.isfinite(found.mean) else math.inf)
            if best is None or found.mean < best.mean or (self._passes is not None and self.is_complete):
                best = found
            if (self._passes is None and is_over(means)) or not math.isfinite(means[-1]):
                break
        assert best is not None
        passes = passes_needed(means, of_constant) if self._passes is None else self._passes
        return TriedModel(model=model, rule=rule, passes=passes, losses=best)

    def optimism(self, tried: TriedModel) -> Optimism:
        """Return a click model's calibration error on held-out examples, minus its error on training examples."""
        learned, held_out = [], []
        for split in self.splits:
            learner = _Learner(tried.model, tried.rule, self.batch, split, self._batch_size)
            for number in range(tried.passes):
                learner.learn(is_first_pass=not number)
            learned.append(self._shift(learner.predict(split[0]), split[0])[0])
            held_out.append(learner.predict(split[1]))
        shift, error = self._shift(np.concatenate(held_out), np.concatenate([rows for _, rows in self.splits]))
        return Optimism(shift - float(np.mean(learned)), error)

    def _shift(self, predictions: Floats, rows: Positions) -> tuple[float, float]:
        p, weights = np.clip(predictions.astype(np.float64), 1e-7, 1 - 1e-7), self.batch.weights
        counts = np.ones(len(rows)) if weights is None else weights[rows].astype(np.float64)
        return log_odds_shift(np.log(p / (1 - p)), self.batch.labels[rows].astype(np.float64), counts, rows // RUN)

    def _losses(self, model: SparseModel, learners: Sequence[_Learner]) -> HeldOutLosses:
        held_out = (learner.predict(split[1]) for learner, split in zip(learners, self.splits, strict=True))
        losses: Doubles = model.losses_of(self._labels, np.concatenate(list(held_out)))
        return HeldOutLosses.of(losses, self._weights)


class _Learner:
    def __init__(
        self,
        model: SparseModel,
        rule: UpdateRule,
        batch: Batch,
        split: tuple[Positions, Positions],
        batch_size: int,
    ) -> None:
        self._model, self._batch, self._batch_size = model, batch, batch_size
        self._trained = batch.take(split[0])
        self._tables, self._scratch = InProcessTables.create(model, rule), KeyScratch()

    def learn(self, *, is_first_pass: bool) -> None:
        n = self._trained.num_examples
        for start in range(0, n, self._batch_size):
            part = self._trained.slice(start, min(start + self._batch_size, n))
            self._tables.learn(self._model.prepare_training(part, self._scratch, is_first_pass=is_first_pass))

    def predict(self, rows: Positions) -> Floats:
        found = []
        for start in range(0, len(rows), _AT_ONCE):
            minibatch = self._model.prepare(self._batch.take(rows[start : start + _AT_ONCE]), self._scratch)
            found.append(self._tables.predict(minibatch).copy())
        return np.concatenate(found)


def seconds_per_pass(model: SparseModel, num_examples: int, num_pairs: int, batch_size: int) -> float:
    """Return an estimate of the seconds per pass on one core. `num_pairs` is the number of all examples' values."""
    num_batches = num_examples / batch_size
    if not isinstance(model, FactorModel):
        return num_pairs * 0.05e-6 * model.num_outputs + num_batches * 0.1e-3
    seconds = num_pairs * (0.1e-6 + 0.012e-6 * model.num_factors) + num_batches * 0.1e-3
    if isinstance(model, DeepModel):
        num_weights = sum((layer.num_inputs + 1) * layer.num_units for layer in model.layers)
        seconds += num_examples * num_weights * 0.3e-9 + num_batches * 1.5e-3
    return seconds


class InProcessTables:
    """The rows of a model's tables in this process. A training updates rows in the same way. Not thread-safe."""

    def __init__(self, stores: Sequence[SparseStore]) -> None:
        self.stores = stores

    @classmethod
    def create(cls, model: SparseModel, rule: UpdateRule) -> Self:
        return cls(
            [
                SparseStore(dim=table.dim, rule=table.update or rule, initializer=table.initializer or Zeros())
                for table in model.tables
            ]
        )

    def pull(self, minibatch: Minibatch) -> list[Floats]:
        """Return a minibatch's rows by table. A minibatch for prediction omits tables that only training needs."""
        rows = []
        for store, keys in zip(self.stores, minibatch.keys, strict=False):
            rows.append(np.empty((len(keys), store.dim), np.float32))
            store.pull(keys, rows[-1])
        return rows

    def learn(self, minibatch: Minibatch) -> float:
        gradients, loss = minibatch.gradients(self.pull(minibatch))
        for store, keys, gradient in zip(self.stores, minibatch.gradient_keys, gradients, strict=True):
            store.push(keys, gradient)
        return loss

    def predict(self, minibatch: Minibatch) -> Floats:
        return minibatch.predict(self.pull(minibatch))
