"""Detect whether the rate of positives drifts over a file, and estimate the error of the log odds at its end.

Each hypothesis adds one term to the log odds: a step at the start of the newest half, quarter, eighth or sixteenth, or
a ramp that begins there or at the start of the file. A hypothesis's evidence is Laplace's approximation of the marginal
likelihood (MacKay, Information Theory, Inference, and Learning Algorithms, 2003, chapter 27), given the labels alone.
The estimates are averaged, weighted by the hypotheses' probabilities, so a small step is corrected in part.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.tables.types import Doubles, Floats

_STARTS: Final = (1 / 2, 3 / 4, 7 / 8, 15 / 16)
_OF_STEP, _OF_RAMP = 0.03, 0.003  # prior probabilities of one step and of one ramp, relative to no drift
_CELLS: Final = 32  # number of cells in each of the two dimensions: time and margin
_DEVIATION: Final = 1.0  # prior standard deviation of a drift, in log odds
_LEAST_LABELS: Final = 20  # if a class has fewer labels, no drift can be detected
_MOST_STEPS: Final = 30


class RateShift(NamedTuple):
    """A correction of the log odds for all examples, and a second one for the newest examples.

    `shift` corrects all examples. `error` is its standard error. `newest` is added for the newest examples; it is the
    mean over the hypotheses. `drift` is the probability that the rate drifts.
    """

    shift: float
    error: float
    newest: float
    drift: float


def log_odds_shift(
    margins: Doubles, labels: Doubles, counts: Doubles, groups: npt.NDArray[np.int64] | None = None
) -> tuple[float, float]:
    """Return the constant to add to margins so that the mean of P(click) is correct, and its standard error.

    `margins`, `labels` (0 and 1) and `counts`, the weights of the examples, are float64 [n]. The labels of a group of
    examples may be correlated: neighbours in a file often are. With `groups`, int64 [n], the standard error accounts
    for this (Liang and Zeger, Biometrika 73, 1986).
    """
    shift, error, _ = _fit(np.zeros(len(margins)), margins, labels, counts)
    if groups is None or not len(groups):
        return shift, error
    residuals = counts * (labels - 1 / (1 + np.exp(-np.clip(margins + shift, -500, 500))))
    sums = np.bincount(np.unique(groups, return_inverse=True)[1], residuals)
    return shift, error * math.sqrt(max(float(sums @ sums) / max(float(residuals @ residuals), 1e-30), 1.0))


def example_counts(labels: Floats, weights: Floats | None) -> Doubles:
    return np.ones(len(labels)) if weights is None else weights.astype(np.float64)


def significant_share(bias: float, variance: float, *, is_known: bool) -> float:
    """Return the share of an estimated bias to correct, from 0 to 1.

    If the bias was computed from all rows of the training (`is_known`), the share is almost 1, and smaller only if
    there are few labels (unit prior variance). The bias of a sample is an estimate, which its variance shrinks (James
    and Stein, 1961).
    """
    return 1 / (1 + variance) if is_known else max(1 - variance / max(bias * bias, 1e-30), 0.0)


def changed_rates(labels: Floats, weights: Floats | None) -> tuple[float, float] | None:
    """Return the rates of positives in the oldest and the newest sixteenth of rows; None if the rate does not drift."""
    y, counts, part = labels.astype(np.float64), example_counts(labels, weights), len(labels) // 16
    if not part or rate_shift(np.zeros(len(y)), y, counts).drift < 0.5:
        return None
    oldest, newest = (np.average(y[rows], weights=counts[rows] + 1e-30) for rows in (slice(part), slice(-part, None)))
    return float(oldest), float(newest)


def rate_shift(margins: Doubles, labels: Doubles, counts: Doubles) -> RateShift:
    """Return the corrections of the log odds. The arguments have one element per example, in the order of the file."""
    if min(float((counts * labels > 0).sum()), float((counts * (1 - labels) > 0).sum())) < _LEAST_LABELS:
        return RateShift(*log_odds_shift(margins, labels, counts), 0.0, 0.0)
    counts = counts * (counts.sum() / max(float(counts @ counts), 1e-30))  # the sum is the effective sample size
    n = len(margins)
    blocks = np.arange(n) * _CELLS // max(n, 1)
    ranks = np.argsort(np.argsort(margins, kind="stable"), kind="stable")
    cells = blocks * _CELLS + ranks * _CELLS // max(n, 1)
    totals, positives, sums = (
        np.bincount(cells, amounts, _CELLS**2).astype(np.float64)
        for amounts in (counts, counts * labels, counts * margins)
    )
    kept = np.flatnonzero(totals > 0)
    data = sums[kept] / totals[kept], positives[kept] / totals[kept], totals[kept]
    time = (kept // _CELLS + 0.5) / _CELLS
    none = np.zeros(len(time))
    steps = [(time >= start).astype(np.float64) for start in _STARTS]
    ramps = [np.maximum(time - start, 0) / (1 - start) for start in (0.0, *_STARTS)]
    # The evidence ignores margins. If the model has followed a ramp, its margins make the ramp look like a step.
    evidence = np.array([_fit(term, none, *data[1:])[2] for term in (none, *steps, *ramps)])
    evidence += np.log([1.0] + [_OF_STEP] * len(steps) + [_OF_RAMP] * len(ramps))
    shares = np.exp(evidence - evidence.max())
    shares /= shares.sum()
    shift, error, _ = _fit(none, *data)
    newest = sum(float(share) * (_fit(step, *data)[0] - shift) for share, step in zip(shares[1:], steps, strict=False))
    return RateShift(shift, error, newest, float(1 - shares[0]))


def _fit(term: Doubles, margins: Doubles, labels: Doubles, counts: Doubles) -> tuple[float, float, float]:
    """Return the correction at the newest example, its standard error and the evidence, by Newton's method."""
    design = np.stack([np.ones(len(term)), term])
    prior = np.array([1e-9, 1 / _DEVIATION**2])
    found, newest = np.zeros(2), np.array([1.0, 1.0 if term.any() else 0.0])
    for _ in range(_MOST_STEPS):
        p = 1 / (1 + np.exp(-np.clip(margins + found @ design, -500, 500)))
        curvature = (design * (counts * p * (1 - p))) @ design.T + np.diag(prior)
        step = np.linalg.solve(curvature, design @ (counts * (labels - p)) - prior * found)
        found += np.clip(step, -1, 1)
        if np.abs(step).max() < 1e-8:
            break
    logits = margins + found @ design
    likelihood = float(counts @ (labels * logits - np.logaddexp(0.0, logits)))
    penalty = 0.5 * float(prior @ (found * found)) + 0.5 * float(np.linalg.slogdet(curvature)[1]) + math.log(_DEVIATION)
    variance = float(newest @ np.linalg.solve(curvature, newest))
    return float(newest @ found), math.sqrt(max(variance, 0.0)), likelihood - penalty
