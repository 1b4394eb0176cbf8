"""Predict the waiting of ranks for slower ranks, from the measured variance of step times. Pure.

A worker may begin iteration t when every worker has finished iteration t - τ - 1. Synchronous training is τ = 0, and
asynchronous training has no bound.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Final

import numpy as np

_ITERATIONS: Final = 400
_MOST_DRAWS: Final = 4_000_000
_MOST_RANKS: Final = 100_000
"""Among so many draws of a few thousand values are already the longest ones."""
_AROUND: Final = 5
"""Steps on each side."""


def without_drift(steps_s: Sequence[float]) -> list[float]:
    """Return the durations without slow changes, which all ranks of a machine have in common. The mean does not change.

    Each duration is divided by the median of the steps around it.
    """
    values = np.asarray(steps_s, np.float64)
    medians = [np.median(values[max(number - _AROUND, 0) : number + _AROUND + 1]) for number in range(len(values))]
    ratios = values / medians
    return [*(ratios * (values.mean() / ratios.mean()))]


def spread_of(steps_s: Sequence[float]) -> float:
    """Return the 0.9-quantile of durations divided by their 0.1-quantile."""
    low, high = np.quantile(steps_s, (0.1, 0.9))
    return float(high / low)


def expected_maximum(draws: Sequence[float], count: int) -> float:
    """Return the expected maximum of `count` independent draws from the measured values `draws`.

    The maximum is at most the i-th of m sorted values with the probability (i / m)^n.
    """
    ordered = np.sort(np.asarray(draws, np.float64))
    bounds = (np.arange(len(ordered) + 1) / len(ordered)) ** count
    return float(np.dot(np.diff(bounds), ordered))


def barrier_s(draws: Sequence[float], ranks: int, tau: int | None) -> float:
    """Return the mean seconds of an iteration of `ranks` ranks, whose durations are drawn from `draws`.

    `tau` is the bound of the delay; None for no bound.
    """
    if tau is None or ranks == 1:
        return statistics.fmean(draws)
    if tau == 0:
        return expected_maximum(draws, ranks)
    random, ranks = np.random.default_rng(0), min(ranks, _MOST_RANKS)
    iterations = max(min(_ITERATIONS, _MOST_DRAWS // ranks), 10 * (tau + 1))
    values = np.asarray(draws, np.float64)
    finished = np.zeros((iterations + 1, ranks))
    for number in range(1, iterations + 1):
        begin = finished[number - 1]
        if number > tau + 1:
            begin = np.maximum(begin, finished[number - tau - 1].max())
        finished[number] = begin + values[random.integers(0, len(values), ranks)]
    warm = iterations // 4
    return float((finished[-1].mean() - finished[warm].mean()) / (iterations - warm))
