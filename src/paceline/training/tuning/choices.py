"""Choose the learning rate, penalties and passes of a logistic regression on a sample of its data.

Trials train in this process (:mod:`paceline.training.tuning.trial`). The choices are:

- FTRL's alpha is the better of 0.35 / sqrt(x) and 0.7 / sqrt(x). x is the mean over examples of the sum of squared
values; if all values are 1, it is the number of features in an example. The weights of all features in an example
change at once, so more features need a smaller rate. This is the global rate of NG, "Normalized online learning" (Ross,
Mineiro, Langford, UAI 2013). Scaling the values (:mod:`paceline.data.key_scaling`) replaces NG's rates by feature. If
0.7 is clearly better, the data may drift and the model must forget, so 1.4 and 2.8 are tried too.
- A minibatch has a 64th of the examples, but at least 8 and at most 256, so that small data gives many steps.
- L1 is 1. For small data, and for data with at most 20 examples per feature, 100 is tried too, because only a large
penalty finds a few relevant features among many. If 100 is better by more than chance, 100 and 300 are tried with a
higher rate. A large penalty is chosen only if it is better by more than chance.
- L2 is 0. For small data, 30, 100 and 300 are tried too. If one class is rare, 100 and 300 are tried. FTRL's penalty is
relative to the sum of gradients of all passes: a penalty of 30 in 30 passes is the same as C = 1 in scikit-learn.
- For larger data, the first rule is chosen unless another rule is better by more than a standard error.
- If equal labels come in runs, as in a sorted file, many shards are read at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from paceline.data.key_scaling import distinct_keys
from paceline.data.sampling import ExampleSample
from paceline.environment import num_cores
from paceline.models.rate_drift import changed_rates
from paceline.tables.rules import FTRL
from paceline.training.tuning.trial import SMALL, SampleTrial, TriedRule, has_drifting_loss, held_out_splits, num_folds

RATE = 0.35
L1 = 1.0
RATES = (RATE, 0.7)
WIDE_RATES = (0.2, *RATES)
LINEAR_RATES = (0.1, RATE, 1.0)
WIDE_L1 = (0.1, L1, 3.0)
SPARSE = ((0.7, 100.0, 0.0), (1.4, 100.0, 0.0), (1.4, 300.0, 0.0))
"""Rates, L1 and L2 penalties for data with few relevant features among many."""
FASTER_RATES = (1.4, 2.8)
_L2_OF_SMALL = (0.0, 30.0, 100.0, 300.0)
_L2_OF_RARE = (0.0, 100.0, 300.0)
_EXAMPLES_PER_FEATURE = 20
_LEAST_PASSES = 6
_SORTED = 0.7
_MOST_FOLDS = 5
_SPARSE_CAUTION = 2.0  # standard errors by which `sparse` rules must be better if there are few examples


def suggested_alpha(sample: ExampleSample, rate: float = RATE) -> float:
    batch = sample.batch
    squares = float(len(batch.keys)) if batch.values is None else float(np.square(batch.values, dtype=np.float64).sum())
    return rate / math.sqrt(max(squares / max(batch.num_examples, 1), 1.0))


def suggested_batch_size(num_examples: int, least: int = 8) -> int:
    """Return the number of examples in a minibatch: a power of two from `least` to 256."""
    return int(2 ** np.clip(np.floor(np.log2(max(num_examples, 1) / 64)), math.log2(least), 8))


def suggested_l2(sample: ExampleSample) -> tuple[float, ...]:
    """Return the L2 penalties to try. If both classes have many examples, only 0 is tried."""
    if sample.num_examples <= SMALL:
        return _L2_OF_SMALL
    return _L2_OF_RARE if num_folds(sample.batch) == _MOST_FOLDS else (0.0,)


def is_sorted_by_label(sample: ExampleSample) -> bool:
    """Return whether the position in the file explains more than 30% of the labels' variance."""
    labels = sample.batch.labels.astype(np.float64)
    runs = [run for run in np.split(labels, sample.starts[1:]) if len(run) > 1]
    total = float(labels.var())
    if not total or len(runs) < 2:
        return False
    within = [run.var(ddof=1) for run in runs]  # unbiased estimate
    return float(np.average(within, weights=[len(run) for run in runs])) < _SORTED * total


def wants_sparsity(sample: ExampleSample) -> bool:
    unique, _ = distinct_keys(sample.batch.keys)
    return sample.num_examples <= max(SMALL, _EXAMPLES_PER_FEATURE * len(unique))


def tune(
    sample: ExampleSample,
    offset: float,
    batch_size: int,
    rules: Sequence[FTRL],
    *,
    sparse: Sequence[FTRL] = (),
    faster: Sequence[FTRL] = (),
    is_mixed: bool,
) -> list[TriedRule]:
    """Try update rules, each in a thread for at most 64 passes. Return the results for `rules`, the best first.

    The first of the `sparse` rules is tried too; if it is better by more than chance, all are tried. The `faster` rules
    are tried if the rule with the highest rate in `rules` is best by more than chance. The best `sparse` or `faster`
    rule comes first if it is better, by more than chance, than both the best of `rules` and the base rate. `offset` is
    the constant part of every margin. Equal arguments give equal results.
    """
    splits = list(held_out_splits(sample.batch, is_mixed=is_mixed))
    trial = SampleTrial(sample.batch, offset, batch_size, splits)
    pool = ThreadPoolExecutor(num_cores())
    usual_losses = trial.usual_losses(rules[0])

    def try_rules(uncertain: Sequence[FTRL], further: Sequence[FTRL]) -> list[TriedRule]:
        futures = [pool.submit(trial.run, rule, usual_losses) for rule in uncertain]
        futures += [pool.submit(trial.run, rule) for rule in further]
        return [future.result() for future in futures]

    try:
        found = try_rules(rules, sparse[:1])
        usual = sorted(found[: len(rules)], key=_score)
        if usual_losses is None and not usual[0].losses.is_below(found[0].losses):
            usual = sorted(usual, key=lambda tried: tried is not found[0])
        bounds = (usual[0].losses, trial.base_losses())
        errors = 1.0 if usual_losses is None else _SPARSE_CAUTION

        def is_better(tried: TriedRule) -> bool:
            return all(tried.losses.is_below(bound, errors) for bound in bounds)

        better = [*filter(is_better, found[len(rules) :])]
        further = try_rules(faster if _is_fastest_best(usual) else (), sparse[1:] if better else ())
        better += filter(is_better, further)
        return sorted(better, key=_score)[:1] + usual
    finally:
        pool.shutdown(cancel_futures=True)  # after Ctrl-C, no further trial starts


def _is_fastest_best(tried: Sequence[TriedRule]) -> bool:
    """Return whether the best rule has the highest rate and is better than all lower rates by more than chance."""
    best = tried[0]
    slower = [other for other in tried if other.rule.alpha != best.rule.alpha]
    return all(other.rule.alpha < best.rule.alpha and best.losses.is_below(other.losses) for other in slower)


def _score(tried: TriedRule) -> float:
    return tried.score


def suits_mixing(sample: ExampleSample, tried: ExampleSample, offset: float, batch_size: int) -> bool:
    """Return whether neither click rate nor loss drifts, so that trials may hold out examples from the whole sample.

    The loss is measured on `tried`: the sample's examples with scaled values.
    """
    if is_sorted_by_label(sample):
        return True
    is_drifting = changed_rates(sample.batch.labels, sample.batch.weights) is not None
    return not is_drifting and has_steady_loss(tried, offset, batch_size)


def has_steady_loss(sample: ExampleSample, offset: float, batch_size: int) -> bool:
    """Return whether the newest examples are predicted as well as older ones, or there are at most 5,000."""
    rule = FTRL(alpha=suggested_alpha(sample), l1=L1)
    return sample.num_examples <= SMALL or not has_drifting_loss(sample.batch, offset, batch_size, rule)


def passes_for_all(passes: int, sample: ExampleSample, num_tried: int | None = None) -> int:
    """Return the number of passes over all data, given the best number of passes over the sample.

    The result is smaller if there is more data, because learning needs a certain number of examples, not of passes. But
    features that are rare in the sample are also rare in all data. Therefore the result is at least 6, or `passes` if
    this is less. `num_tried` is the trial's number of examples; None means the whole sample.
    """
    needed = -(-passes * (num_tried or sample.batch.num_examples) // max(sample.num_examples, 1))
    return min(passes, max(_LEAST_PASSES, needed))
