"""Try update rules of a logistic regression on a sample of the data, in a fast loop in this process.

The loop computes the same updates as servers and workers. Some examples are held out. The loss on them is measured
after each pass. The chosen number of passes is the one after which the loss hardly decreases.

Up to 5,000 examples are split into five folds, and each fold is held out in turn. If there are more, an eighth is held
out: the newest examples if the click rate or the loss drifts, otherwise runs of 16 from the whole sample. If these
contain fewer than 500 examples of the rarer class, up to five eighths are held out in turn. If examples have copies, as
after oversampling, either all copies of an example are held out or none. Otherwise memorizing would look like learning.

If there are few examples, the lowest of many losses is low by chance. Therefore results are compared with a standard, 8
passes of the first rule, if there are up to 5,000 examples and fewer features than examples. The loss of any other
result is increased by half a standard error of its difference from the standard. Adding more does harm if L2 penalties
are tried: on 26 small data sets, public and generated (docs/explanation/defaults.md), AUC with half an error is 0.001
higher than with one error and 0.002 higher than with three.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from paceline.data.batch import Batch, pairs_of
from paceline.data.key_scaling import distinct_keys
from paceline.kernels.csr import csr_dot
from paceline.models.base import Optimism
from paceline.models.rate_drift import example_counts, log_odds_shift
from paceline.tables.logistic_pass import ROW_WORDS, logistic_pass
from paceline.tables.rules import FTRL
from paceline.tables.types import Doubles, Floats

MAX_PASSES = 64
SMALL = 5_000
_USUAL_PASSES = 8
_CAUTION = 0.5  # standard errors that are added to the loss of a result other than the standard
_MAX_PAIR_VISITS = 150_000_000
_MAX_PAIR_VISITS_OF_FOLDS = 30_000_000
_FOLDS = 5
_HELD_OUT = 8
RUN = 16  # neighbours that are either all held out or all trained on
_ENOUGH_RARE = 500  # wanted number of held-out examples of the rarer class
_MOST_FOLD_PAIRS = 4 << 20
_DRIFT = 3.0  # standard errors; a larger difference is regarded as drift
_SEPARATED = 0.01  # fraction of the base rate's loss; below it, further passes only enlarge weights
_TOLERANCE = 2e-4  # fraction of the base rate's loss: a smaller gain does not justify more passes
_COPIED_SHARE = 0.05
_EQUAL_LABELS = 0.99  # if rows are equal by chance, as with few categories, fewer of their labels are equal
_LEAST_DISTINCT = 50

_NONE = np.empty(0, np.float32)

Positions = npt.NDArray[np.int64]
Split: TypeAlias = tuple[Positions, Positions]
"""Positions of the training examples, in the order of training, and of the held-out examples."""


@dataclass(frozen=True, slots=True, eq=False)
class HeldOutLosses:
    """The held-out examples' losses and weights, float64 [n], and the weighted mean loss."""

    losses: Doubles
    weights: Doubles
    mean: float

    @classmethod
    def of(cls, losses: Doubles, weights: Doubles) -> HeldOutLosses:
        return cls(losses, weights, float(np.average(losses, weights=weights)) if weights.sum() > 0 else math.inf)

    def is_below(self, other: HeldOutLosses, errors: float = 1.0) -> bool:
        """Return whether the mean is more than `errors` standard errors below that of `other` on the same examples."""
        if not math.isfinite(other.mean):
            return math.isfinite(self.mean)
        return other.mean - self.mean > errors * self._standard_error(other)

    def pessimistic_mean(self, usual: HeldOutLosses) -> float:
        """Return the mean plus half a standard error of its difference from `usual`."""
        return self.mean + _CAUTION * self._standard_error(usual)

    def _standard_error(self, other: HeldOutLosses) -> float:
        differences = (other.losses - self.losses) * self.weights / max(float(self.weights.mean()), 1e-30)
        return float(differences.std()) / math.sqrt(len(differences))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TriedRule:
    """The result of a trial: the number of passes until the model was good enough, and the best pass's losses."""

    rule: FTRL
    passes: int
    losses: HeldOutLosses
    score: float
    """The value to minimize: the mean loss, or :meth:`HeldOutLosses.pessimistic_mean` if there are few examples."""
    optimism: Optimism


def is_over(means: Sequence[float]) -> bool:
    return len(means) >= 1.3 * (1 + int(np.argmin(means))) + 3


def passes_needed(means: Sequence[float], of_constant: float) -> int:
    """Return the number of passes after which the loss hardly decreases. `of_constant` is the base rate's loss."""
    enough = max(min(means) + _TOLERANCE * of_constant, _SEPARATED * of_constant)
    return 1 + next((i for i, mean in enumerate(means) if mean <= enough), 0)


class SampleTrial:
    """The sample with numbered keys, split into examples for training and held-out examples."""

    def __init__(self, batch: Batch, offset: float, batch_size: int, splits: Sequence[Split]) -> None:
        unique, ids = distinct_keys(batch.keys)
        self._num_features = len(unique)
        values, weights = (_NONE if array is None else array for array in (batch.values, batch.weights))
        self._arrays = (batch.indptr, ids, values, batch.labels, weights)
        self._offset, self._batch_size = offset, batch_size
        labels = batch.labels.astype(np.float64)
        counts = example_counts(batch.labels, batch.weights)
        rate = float(np.clip(labels @ counts / max(counts.sum(), 1e-30), 1e-6, 1 - 1e-6))
        self._entropy = -rate * math.log(rate) - (1 - rate) * math.log(1 - rate)
        self._splits = splits
        self._held_out = [self._rows_of(held_out) for _, held_out in self._splits]
        every = np.concatenate([held_out for _, held_out in self._splits])
        self._all_labels, self._all_weights = labels, counts
        self._labels, self._weights = labels[every], counts[every]
        num_pairs = max(len(batch.keys) * len(self._splits), 1)
        most = _MAX_PAIR_VISITS if len(labels) <= SMALL or len(self._splits) == 1 else _MAX_PAIR_VISITS_OF_FOLDS
        self._max_passes = int(np.clip(most // num_pairs, 1, MAX_PASSES))

    def base_losses(self) -> HeldOutLosses:
        return self._losses(np.full(len(self._labels), self._offset))

    def usual_losses(self, rule: FTRL) -> HeldOutLosses | None:
        """Return the losses of the standard, with which other results are compared; None if there are enough examples.

        The result is also None if there are at least as many features as examples. Such data needs fewer than 8 passes.
        """
        if not self._num_features < len(self._all_labels) <= SMALL:
            return None
        states = self._fresh_states()
        for _ in range(_USUAL_PASSES):
            self._train(states, rule)
        return self._losses(self._margins(states))

    def run(self, rule: FTRL, usual: HeldOutLosses | None = None, max_passes: int = MAX_PASSES) -> TriedRule:
        """Train with `rule` until the held-out loss no longer decreases.

        The score is the lowest mean loss of a pass. If `usual` is given, it is the lowest
        :meth:`HeldOutLosses.pessimistic_mean`.
        """
        states = self._fresh_states()
        scores: list[float] = []
        best: HeldOutLosses | None = None
        weights: list[Floats] = []
        for _ in range(min(self._max_passes, max_passes)):
            self._train(states, rule)
            found = self._losses(self._margins(states))
            scores.append(found.mean if usual is None else found.pessimistic_mean(usual))
            if best is None or scores[-1] < min(scores[:-1]):
                best, weights = found, [state.rows[:, 0].copy() for state in states]
            if is_over(scores):
                break
        assert best is not None
        passes = passes_needed(scores, self._entropy)
        return TriedRule(rule=rule, passes=passes, losses=best, score=min(scores), optimism=self._optimism(weights))

    def _fresh_states(self) -> list[_TrialState]:
        return [_TrialState.fresh(self._num_features) for _ in self._splits]

    def _train(self, states: list[_TrialState], rule: FTRL) -> None:
        hyper = np.array(rule.hyper)
        for state, (trained, _) in zip(states, self._splits, strict=True):
            logistic_pass(*self._arrays, trained, self._offset, self._batch_size, hyper, *state)

    def _optimism(self, weights: list[Floats]) -> Optimism:
        indptr, ids, values, labels, _ = self._arrays
        learned, margins = 0.0, []
        for of_one, (trained, held_out) in zip(weights, self._splits, strict=True):
            out = np.empty(len(labels), np.float32)
            csr_dot(indptr, ids, values, of_one, out)
            every = out.astype(np.float64) + self._offset + float(of_one[-1])
            learned += log_odds_shift(every[trained], self._all_labels[trained], self._all_weights[trained])[0]
            margins.append(every[held_out])
        runs = np.concatenate([held_out for _, held_out in self._splits]) // RUN
        shift, error = log_odds_shift(np.concatenate(margins), self._labels, self._weights, runs)
        return Optimism(shift - learned / len(weights), error)

    def _margins(self, states: list[_TrialState]) -> Doubles:
        margins = []
        for state, rows in zip(states, self._held_out, strict=True):
            out = np.empty(len(rows[0]) - 1, np.float32)
            csr_dot(*rows, np.ascontiguousarray(state.rows[:, 0]), out)
            margins.append(out.astype(np.float64) + self._offset + float(state.rows[-1, 0]))  # [-1]: the bias
        return np.concatenate(margins)

    def _losses(self, margins: Doubles) -> HeldOutLosses:
        return HeldOutLosses.of(np.logaddexp(0.0, margins) - self._labels * margins, self._weights)

    def _rows_of(self, positions: Positions) -> tuple[Positions, npt.NDArray[np.int32], Floats]:
        indptr, ids, values, _, _ = self._arrays
        chosen, pairs = pairs_of(indptr, positions)
        return chosen, ids[pairs], values[pairs] if len(values) else values


def num_folds(batch: Batch) -> int:
    """Return the number of parts to hold out in turn. Above 5,000 examples, it depends on the rarer class."""
    n, classes = batch.num_examples, np.unique(batch.labels, return_counts=True)[1]
    if n <= SMALL:
        return min(_FOLDS, n)
    wanted = _ENOUGH_RARE * _HELD_OUT // int(classes.min()) + 1 if len(classes) == 2 else 1
    return max(min(wanted, _FOLDS, _MOST_FOLD_PAIRS // max(len(batch.keys), 1)), 1)


def has_drifting_loss(batch: Batch, offset: float, batch_size: int, rule: FTRL) -> bool:
    """Return whether the newest eighth's loss is higher, by more than chance, than that of held-out older examples."""
    n = batch.num_examples
    older, newest = n - n // _HELD_OUT, n // _HELD_OUT
    is_held_out = np.arange(older) // RUN % _HELD_OUT == 0
    held_out = np.concatenate([np.flatnonzero(is_held_out), np.arange(older, n)])
    trial = SampleTrial(batch, offset, batch_size, [(np.flatnonzero(~is_held_out), held_out)])
    found = trial.run(rule, max_passes=2).losses
    parts = [found.losses[rows] * found.weights[rows] for rows in (slice(-newest, None), slice(-newest))]
    error = math.sqrt(sum(float(part.var()) / max(len(part), 1) for part in parts))
    return float(parts[0].mean() - parts[1].mean()) > _DRIFT * error


def held_out_splits(batch: Batch, *, is_mixed: bool) -> Iterator[Split]:
    """Yield splits of the examples. Examples from the whole batch (`is_mixed`), or else from its end, are held out."""
    n, random = batch.num_examples, np.random.default_rng(0)
    copies = copies_of(batch)
    groups = copies if copies is not None else np.arange(n) // (RUN if n > SMALL else 1)
    anywhere = np.argsort(random.permutation(n)[groups], kind="stable")
    if n > SMALL and copies is None and not is_mixed:
        yield np.arange(n - n // _HELD_OUT), np.arange(n - n // _HELD_OUT, n)
        return
    folds = num_folds(batch)
    sizes = [len(fold) for fold in np.array_split(anywhere, folds)] if n <= SMALL else [n // _HELD_OUT] * folds
    cuts = [0, *np.cumsum(sizes).tolist()]
    if copies is not None:
        ends = np.flatnonzero(np.diff(copies[anywhere], append=-1)) + 1
        cuts = [0, *ends[np.searchsorted(ends, cuts[1:])].tolist()]  # cut only between groups of copies
    for start, stop in pairwise(cuts):
        trained = np.concatenate([anywhere[:start], anywhere[stop:]])
        if start < stop:
            yield trained if copies is None else random.permutation(trained), np.sort(anywhere[start:stop])


def copies_of(batch: Batch) -> Positions | None:
    """Return the number of each example's group of copies; None if copies are irrelevant.

    Copies are relevant if more than 5% of the examples have the same features as another example, and 99% of these also
    the same label. If there are few categories, examples are equal by chance, but their labels differ.
    """
    n = batch.num_examples
    mixed = (batch.keys ^ (batch.keys >> np.uint64(32))) * np.uint64(0x9E3779B97F4A7C15)
    if batch.values is not None:
        mixed ^= batch.values.view(np.uint32).astype(np.uint64) * np.uint64(0xC2B2AE3D27D4EB4F)
    mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    sums = np.append(np.uint64(0), np.cumsum(mixed, dtype=np.uint64))
    _, group, counts = np.unique(np.diff(sums[batch.indptr]), return_inverse=True, return_counts=True)
    is_copied = counts[group] > 1
    if len(counts) < _LEAST_DISTINCT or is_copied.sum() < _COPIED_SHARE * n:
        return None
    positives = np.bincount(group, batch.labels > 0, len(counts))
    num_equal = np.maximum(positives, counts - positives)[counts > 1].sum()
    return group.astype(np.int64) if num_equal >= _EQUAL_LABELS * is_copied.sum() else None


class _TrialState(NamedTuple):
    """A trial's model, in the form of the last arguments of :func:`logistic_pass`."""

    rows: Floats
    gradients: Floats
    touched: npt.NDArray[np.uint8]

    @classmethod
    def fresh(cls, num_features: int) -> _TrialState:
        n = num_features + 1
        return cls(np.zeros((n, ROW_WORDS), np.float32), np.zeros(n, np.float32), np.zeros(n, np.uint8))
