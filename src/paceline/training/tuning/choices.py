"""How long, and how fast, a logistic regression should be trained, found on a sample of its data.

Rules are tried by training in this process (:mod:`paceline.training.tuning.trial`). What else is chosen is derived:

- FTRL's alpha is 0.35 or 0.7 / sqrt(x), whichever does better, x being the mean over examples of the sum of squared
  values: the number of features of an example where all values are 1. All of them move at once, so the more there are,
  the less each may. That is the global rate of "Normalized online learning" (Ross, Mineiro, Langford, UAI 2013, NG);
  its rates by feature are in the values, which have been brought to one scale (:mod:`paceline.data.key_scaling`).
  Where 0.7 is clearly better, 1.4 and 2.8 are tried too: where the truth drifts, what is learned has to be forgotten.
- A minibatch is a 64th of the examples, within 8 and 256, so that small data gives as many steps as it can.
- L1 is 1; of small data, and where there are fewer than 20 examples for a feature, 100 and 300 are tried too: where few
  of many features matter, nothing but a large penalty finds them. It must be better by more than chance.
- L2 is 0; of small data, 30, 100 and 300 are tried too; where one class is rare, 100 and 300. FTRL's penalty stands
  against the gradients of all passes, so that 30 in 30 passes is what scikit-learn calls C = 1.
- Of more data the first rule is taken unless another is better by more than a standard error of the difference.
- Where labels stand in runs, as in a sorted file, shards are read many at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from paceline.data.key_scaling import distinct_keys
from paceline.data.sample import ExampleSample
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
"""Rates, L1 and L2 penalties where few of many features may matter."""
FASTER_RATES = (1.4, 2.8)
_L2_OF_SMALL = (0.0, 30.0, 100.0, 300.0)
_L2_OF_RARE = (0.0, 100.0, 300.0)
_EXAMPLES_PER_FEATURE = 20
_LEAST_PASSES = 6
_SORTED = 0.7
_MOST_FOLDS = 5
_SPARSE_CAUTION = 2.0  # standard errors, where examples are few


def suggested_alpha(sample: ExampleSample, rate: float = RATE) -> float:
    """Return the alpha that suits examples like these, as FTRL has it."""
    batch = sample.batch
    squares = float(len(batch.keys)) if batch.values is None else float(np.square(batch.values, dtype=np.float64).sum())
    return rate / math.sqrt(max(squares / max(batch.num_examples, 1), 1.0))


def suggested_batch_size(num_examples: int, least: int = 8) -> int:
    """Return the minibatch that suits so many examples: a power of two, `least` to 256."""
    return int(2 ** np.clip(np.floor(np.log2(max(num_examples, 1) / 64)), math.log2(least), 8))


def suggested_l2(sample: ExampleSample) -> tuple[float, ...]:
    """Return the L2 penalties to try: none is needed of many examples of both classes."""
    if sample.num_examples <= SMALL:
        return _L2_OF_SMALL
    return _L2_OF_RARE if num_folds(sample.batch) == _MOST_FOLDS else (0.0,)


def is_sorted_by_label(sample: ExampleSample) -> bool:
    """Return whether where an example stands tells much of its label: over 0.3 of the labels' variance."""
    labels = sample.batch.labels.astype(np.float64)
    runs = [run for run in np.split(labels, sample.starts[1:]) if len(run) > 1]
    total = float(labels.var())
    if not total or len(runs) < 2:
        return False
    within = [run.var(ddof=1) for run in runs]  # unbiased by a run's own mean
    return float(np.average(within, weights=[len(run) for run in runs])) < _SORTED * total


def wants_sparsity(sample: ExampleSample) -> bool:
    """Return whether there are so many features, for so few examples, that a large L1 penalty may suit them."""
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
    """Try update rules, each for at most 64 passes, in threads; return what came of `rules`, the best first.

    The best of those that are `sparse` (the first of them has to do, or the others are not tried) and `faster` (tried
    if the fastest of `rules` is best by more than chance) comes before them if it is better than they, and than the
    base rate, by more than chance. `offset` is what the model adds to every margin. Equal arguments give equal results.
    """
    splits = list(held_out_splits(sample.batch, is_mixed=is_mixed))
    trial = SampleTrial(sample.batch, offset, batch_size, splits)
    pool = ThreadPoolExecutor(num_cores())
    usual_losses = trial.usual_losses(rules[0])

    def try_rules(doubted: Sequence[FTRL], others: Sequence[FTRL]) -> list[TriedRule]:
        futures = [pool.submit(trial.run, rule, usual_losses) for rule in doubted]
        futures += [pool.submit(trial.run, rule) for rule in others]
        return [each.result() for each in futures]

    try:
        found = try_rules(rules, sparse[:1])
        usual = sorted(found[: len(rules)], key=_score)
        if usual_losses is None and not usual[0].losses.is_below(found[0].losses):
            usual = sorted(usual, key=lambda each: each is not found[0])
        bounds = (usual[0].losses, trial.base_losses())
        errors = 1.0 if usual_losses is None else _SPARSE_CAUTION
        better = [each for each in found[len(rules) :] if all(each.losses.is_below(bound, errors) for bound in bounds)]
        further = try_rules(faster if _is_fastest_best(usual) else (), sparse[1:] if better else ())
        better += [each for each in further if all(each.losses.is_below(bound, errors) for bound in bounds)]
        return sorted(better, key=_score)[:1] + usual
    finally:
        pool.shutdown(cancel_futures=True)  # after Ctrl-C, none is begun


def _is_fastest_best(tried: Sequence[TriedRule]) -> bool:
    """Return whether the first has the highest rate, and is better by more than chance than all of lower rates."""
    best = tried[0]
    others = [each for each in tried if each.rule.alpha != best.rule.alpha]
    return all(each.rule.alpha < best.rule.alpha and best.losses.is_below(each.losses) for each in others)


def _score(tried: TriedRule) -> float:
    return tried.score


def suits_mixing(sample: ExampleSample, tried: ExampleSample, offset: float, batch_size: int) -> bool:
    """Return whether a trial holds out examples from everywhere: neither the rate of clicks nor the loss drifts.

    The loss is that of `tried`, examples of the sample with scaled values.
    """
    if is_sorted_by_label(sample):
        return True
    is_drifting = changed_rates(sample.batch.labels, sample.batch.weights) is not None
    return not is_drifting and has_steady_loss(tried, offset, batch_size)


def has_steady_loss(sample: ExampleSample, offset: float, batch_size: int) -> bool:
    """Return whether the newest examples are predicted as well as others, tried on more than 5,000 examples."""
    rule = FTRL(alpha=suggested_alpha(sample), l1=L1)
    return sample.num_examples <= SMALL or not has_drifting_loss(sample.batch, offset, batch_size, rule)


def passes_for_all(passes: int, sample: ExampleSample, num_tried: int | None = None) -> int:
    """Return the passes over all data, for those that the sample wants: fewer where there is far more of it.

    `num_tried` is the number of examples of the trial; None: all of the sample. Slow learning ends after so many
    examples, however many passes they are; but no fewer than 6 passes, if as many were wanted, for features that are
    rare in the sample are rare in all.
    """
    needed = -(-passes * (num_tried or sample.batch.num_examples) // max(sample.num_examples, 1))
    return min(passes, max(_LEAST_PASSES, needed))
