"""How long, and how fast, a logistic regression should be trained, found on a sample of its data.

The sample's examples are trained on in this process, in the loop that servers and workers make up otherwise, but for a
part that is held out; after each pass the loss on that part is taken, and the passes are those after which it hardly
falls any more. What else is chosen is derived:

- FTRL's alpha is 0.35 or 0.7 / sqrt(x), whichever does better, x being the mean over examples of the sum of squared
  values: the number of features of an example where all values are 1. All of them move at once, so the more there are,
  the less each may. That is the global rate of "Normalized online learning" (Ross, Mineiro, Langford, UAI 2013, NG);
  its rates by feature are in the values, which have been brought to one scale (:mod:`paceline.data.key_scaling`).
- A minibatch is a 64th of the examples, within 8 and 256, so that small data gives as many steps as it can.
- Where labels stand in runs, as in a sorted file, shards are read many at a time, and the held-out examples are drawn
  from everywhere. Otherwise they are the last ones: in logs, what is predicted comes later than what is learned.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.data.batch import pairs_of
from paceline.data.example_sampling import ExampleSample
from paceline.data.key_scaling import distinct_keys
from paceline.environment import num_cores
from paceline.kernels.csr import csr_dot, logistic
from paceline.tables.logistic_pass import ROW_WORDS, logistic_pass
from paceline.tables.rules import FTRL
from paceline.tables.types import Floats

RATE = 0.35
L1 = 1.0
RATES = (RATE, 0.7)
WIDE_RATES = (0.2, *RATES)
WIDE_L1 = (0.1, L1, 3.0)
MAX_PASSES = 64
_LEAST_PASSES = 6
_MAX_PAIR_VISITS = 150_000_000
_SMALL = 5_000
_FOLDS = 5
_HELD_OUT = 8
_SORTED = 0.7
_SEPARATED = 0.01  # of that loss: labels are all but certain, and more passes make weights large, not right
_TOLERANCE = 2e-4  # of the loss of who says the mean always: so much is not worth more passes

_NONE = np.empty(0, np.float32)

Positions = npt.NDArray[np.int64]


def suggested_alpha(sample: ExampleSample, rate: float = RATE) -> float:
    """Return the alpha that suits examples like these, as FTRL has it."""
    batch = sample.batch
    squares = float(len(batch.keys)) if batch.values is None else float(np.square(batch.values, dtype=np.float64).sum())
    return rate / math.sqrt(max(squares / max(batch.num_examples, 1), 1.0))


def suggested_batch_size(num_examples: int) -> int:
    """Return the minibatch that suits so many examples: a power of two."""
    return int(2 ** np.clip(np.floor(np.log2(max(num_examples, 1) / 64)), 3, 8))


def is_sorted_by_label(sample: ExampleSample) -> bool:
    """Return whether where an example stands tells much of its label: over 0.3 of the labels' variance."""
    labels = sample.batch.labels.astype(np.float64)
    runs = [run for run in np.split(labels, sample.starts[1:]) if len(run) > 1]
    total = float(labels.var())
    if not total or len(runs) < 2:
        return False
    within = [run.var(ddof=1) for run in runs]  # unbiased by a run's own mean
    return float(np.average(within, weights=[len(run) for run in runs])) < _SORTED * total


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedRule:
    """An update rule that was tried: after how many passes it was good enough, and its least loss."""

    rule: FTRL
    passes: int
    loss: float


def tune(
    sample: ExampleSample, offset: float, batch_size: int, rules: Sequence[FTRL], *, is_sorted: bool
) -> list[TriedRule]:
    """Try update rules, each for at most 64 passes, in threads; return what came of them, the best first.

    `offset` is what the model adds to every margin. Equal arguments give equal results.
    """
    trial = _SampleTrial(sample, offset, batch_size, is_sorted=is_sorted)
    pool = ThreadPoolExecutor(num_cores())
    try:
        return sorted(pool.map(trial.run, rules), key=lambda found: found.loss)
    finally:
        pool.shutdown(cancel_futures=True)  # after Ctrl-C, none is begun


def passes_for_all(passes: int, sample: ExampleSample) -> int:
    """Return the passes over all data, for those that the sample wants: fewer where there is far more of it.

    Slow learning ends after so many examples, however many passes they are; but no fewer than 6 passes, if as many were
    wanted, for features that are rare in the sample are rare in all.
    """
    needed = -(-passes * sample.batch.num_examples // max(sample.num_examples, 1))
    return min(passes, max(_LEAST_PASSES, needed))


class _SampleTrial:
    """The sample, its keys numbered, cut into what is trained on and what is held out."""

    def __init__(self, sample: ExampleSample, offset: float, batch_size: int, *, is_sorted: bool) -> None:
        batch = sample.batch
        unique, self._ids = distinct_keys(batch.keys)
        self._num_features = len(unique)
        values, weights = (_NONE if each is None else each for each in (batch.values, batch.weights))
        self._arrays = (batch.indptr, self._ids, values, batch.labels, weights)
        self._offset, self._batch_size = offset, batch_size
        rate = float(np.clip(batch.labels.mean(), 1e-6, 1 - 1e-6))
        self._entropy = -rate * math.log(rate) - (1 - rate) * math.log(1 - rate)
        self._splits = [
            (trained, _HeldOut(self._rows_of(held_out), batch.labels[held_out]))
            for trained, held_out in self._split(batch.num_examples, is_sorted)
        ]
        num_pairs = max(len(batch.keys) * len(self._splits), 1)
        self._max_passes = int(np.clip(_MAX_PAIR_VISITS // num_pairs, 1, MAX_PASSES))

    def _split(self, n: int, is_sorted: bool) -> Iterator[tuple[Positions, Positions]]:
        anywhere = np.random.default_rng(0).permutation(n)
        if n <= _SMALL:
            for fold in np.array_split(anywhere, min(_FOLDS, n)):
                yield anywhere[~np.isin(anywhere, fold)], np.sort(fold)
        elif is_sorted:
            yield anywhere[n // _HELD_OUT :], np.sort(anywhere[: n // _HELD_OUT])
        else:
            yield np.arange(n - n // _HELD_OUT), np.arange(n - n // _HELD_OUT, n)

    def run(self, rule: FTRL) -> TriedRule:
        """Train by a rule, as long as it gets better."""
        states = [_TrialState.fresh(self._num_features) for _ in self._splits]
        hyper = np.array(rule.hyper)
        found: list[float] = []
        for passes in range(1, self._max_passes + 1):
            losses = []
            for state, (trained, held_out) in zip(states, self._splits, strict=True):
                logistic_pass(*self._arrays, trained, self._offset, self._batch_size, hyper, *state)
                losses.append(held_out.loss(np.ascontiguousarray(state.rows[:, 0]), self._offset))
            found.append(float(np.mean(losses)))
            if passes >= 1.3 * (1 + np.argmin(found)) + 3:
                break
        enough = max(min(found) + _TOLERANCE * self._entropy, _SEPARATED * self._entropy)
        passes = 1 + next(i for i, loss in enumerate(found) if loss <= enough)
        return TriedRule(rule=rule, passes=passes, loss=min(found))

    def _rows_of(self, positions: Positions) -> tuple[Positions, npt.NDArray[np.int32], Floats]:
        """Return some of the examples, as CSR."""
        indptr, ids, values, _, _ = self._arrays
        chosen, pairs = pairs_of(indptr, positions)
        return chosen, ids[pairs], values[pairs] if len(values) else values


class _HeldOut:
    """Examples that the loss is taken on."""

    def __init__(self, rows: tuple[Positions, npt.NDArray[np.int32], Floats], labels: Floats) -> None:
        self._rows = rows
        self._labels = labels

    def loss(self, weights: Floats, offset: float) -> float:
        """Return the mean log loss; the bias' weight is the last."""
        out = np.empty((3, len(self._labels)), np.float32)
        csr_dot(*self._rows, weights, out[0])
        out[0] += np.float32(offset) + weights[-1]
        return float(logistic(out[0], self._labels, out[1], out[2])) / max(len(self._labels), 1)


class _TrialState(NamedTuple):
    """A model that is tried: as :func:`logistic_pass` has it."""

    rows: Floats
    gradients: Floats
    touched: npt.NDArray[np.uint8]

    @classmethod
    def fresh(cls, num_features: int) -> _TrialState:
        n = num_features + 1
        return cls(np.zeros((n, ROW_WORDS), np.float32), np.zeros(n, np.float32), np.zeros(n, np.uint8))
