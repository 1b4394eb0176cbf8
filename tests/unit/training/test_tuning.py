"""Settings chosen on a sample: the rate, the passes, and whether the labels are sorted."""

from __future__ import annotations

import numpy as np
import pytest
from tests.reference import update_rules

from paceline.data import Batch
from paceline.data.sampling import ExampleSample
from paceline.kernels.csr import csr_dot, logistic
from paceline.models.base import BIAS_KEY, KeyScratch, Optimism
from paceline.models.logistic import SparseLogisticRegression
from paceline.models.poisson import PoissonRegression
from paceline.models.rate_drift import log_odds_shift
from paceline.ps import FTRL
from paceline.tables.logistic_pass import ROW_WORDS, logistic_pass
from paceline.training.tuning.choices import (
    is_sorted_by_label,
    passes_for_all,
    suggested_alpha,
    suggested_batch_size,
    suggested_l2,
    suits_mixing,
    tune,
    wants_sparsity,
)
from paceline.training.tuning.trial import (
    SMALL,
    HeldOutLosses,
    SampleTrial,
    copies_of,
    has_drifting_loss,
    held_out_splits,
    num_folds,
)


def make_sample(
    n: int = 2000, *, noise: float = 0.0, num_keys: int = 50, num_examples: int | None = None, seed: int = 0
) -> ExampleSample:
    rng = np.random.default_rng(seed)
    keys = rng.integers(0, num_keys, (n, 5)).astype(np.uint64)
    weights = rng.normal(0, 1, num_keys)
    margins = weights[keys.astype(np.int64)].sum(1) + rng.normal(0, 1e-9 + noise, n)
    labels = (rng.random(n) < 1 / (1 + np.exp(-margins))).astype(np.float32)
    batch = Batch(labels, np.arange(0, 5 * n + 1, 5), keys.reshape(-1))
    return ExampleSample(batch, np.arange(0, n, 256), num_examples or n, num_examples is None)


def with_labels(labels: np.ndarray) -> ExampleSample:
    n = len(labels)
    batch = Batch(labels.astype(np.float32), np.arange(n + 1), np.zeros(n, np.uint64))
    return ExampleSample(batch, np.arange(0, n, 256), n, True)


def test_a_trial_pass_equals_a_real_pass() -> None:
    """Compare logistic_pass with a reference: the model's minibatch gradients and the FTRL rule in NumPy."""
    sample, rule = make_sample(300), FTRL(alpha=0.1, l1=0.5)
    unique, ids = np.unique(sample.batch.keys, return_inverse=True)
    n = len(unique) + 1
    rows, gradients, touched = np.zeros((n, ROW_WORDS), np.float32), np.zeros(n, np.float32), np.zeros(n, np.uint8)
    none = np.empty(0, np.float32)
    logistic_pass(
        sample.batch.indptr, ids.astype(np.int32), none, sample.batch.labels, none, np.arange(300), 0.25, 64,
        np.array(rule.hyper), rows, gradients, touched,
    )  # fmt: skip
    assert not gradients.any()
    assert not touched.any()
    model, scratch = SparseLogisticRegression(offset=0.25), KeyScratch()
    w, states = np.zeros(n, np.float32), [np.zeros(n, np.float32), np.zeros(n, np.float32)]
    at = {int(key): i for i, key in enumerate(unique)} | {int(BIAS_KEY): n - 1}
    for start in range(0, 300, 64):
        minibatch = model.prepare(sample.batch.slice(start, min(start + 64, 300)), scratch)
        places = [at[int(key)] for key in minibatch.keys[0]]
        (gradient,), _ = minibatch.gradients([w[places]])
        part, parts = w[places], [state[places] for state in states]
        update_rules.ftrl(part, parts, gradient, np.ones(len(part)), np.array(rule.hyper))
        w[places] = part
        for state, changed in zip(states, parts, strict=True):
            state[places] = changed
    np.testing.assert_allclose(rows[:, 0], w, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(rows[:, 2], states[1], rtol=1e-4, atol=1e-6)


def test_a_weight_equals_repetitions_of_the_example() -> None:
    """An example of weight 3 counts like three examples."""
    sample, rule, none = make_sample(100), np.array(FTRL(alpha=0.1).hyper), np.empty(0, np.float32)
    _, ids = np.unique(sample.batch.keys, return_inverse=True)
    results = []
    for weights, order in ((np.full(100, 3, np.float32), np.arange(100)), (none, np.repeat(np.arange(100), 3))):
        rows = np.zeros((51, ROW_WORDS), np.float32)
        logistic_pass(
            sample.batch.indptr, ids.astype(np.int32), none, sample.batch.labels, weights, order, 0.0, 300,
            rule, rows, np.zeros(51, np.float32), np.zeros(51, np.uint8),
        )  # fmt: skip
        results.append(rows)
    np.testing.assert_allclose(results[0], results[1], rtol=1e-4)


def test_the_rate_falls_with_the_number_of_features() -> None:
    assert suggested_alpha(make_sample()) == pytest.approx(0.35 / 5**0.5)
    halves = make_sample()
    halves.batch.values = np.full(len(halves.batch.keys), 2, np.float32)
    assert suggested_alpha(halves) == pytest.approx(0.35 / 20**0.5)


@pytest.mark.parametrize(("examples", "size"), [(1, 8), (500, 8), (2000, 16), (16_384, 256), (10**9, 256)])
def test_small_data_has_small_minibatches(examples: int, size: int) -> None:
    assert suggested_batch_size(examples) == size


def test_sorted_labels_are_detected() -> None:
    rng = np.random.default_rng(0)
    mixed = (rng.random(20_000) < 0.2).astype(np.float32)
    rare = (rng.random(20_000) < 0.001).astype(np.float32)
    drifting = (rng.random(20_000) < np.linspace(0.1, 0.4, 20_000)).astype(np.float32)
    assert not any(
        is_sorted_by_label(with_labels(numbers)) for numbers in (mixed, rare, drifting, np.zeros(1000), mixed[:50])
    )
    assert all(is_sorted_by_label(with_labels(np.sort(numbers))) for numbers in (mixed, rare, drifting))
    assert is_sorted_by_label(with_labels(np.repeat(rng.integers(0, 2, 40), 500)))
    classes, quantities = rng.integers(0, 10, 20_000), rng.normal(1e6, 5, 20_000)
    assert not any(is_sorted_by_label(with_labels(numbers)) for numbers in (classes, quantities))
    assert all(is_sorted_by_label(with_labels(np.sort(numbers))) for numbers in (classes, quantities))


def test_the_number_of_passes_depends_on_the_data() -> None:
    """Rare features would be overfit by many passes. A few frequent features would not."""
    rule = FTRL(alpha=0.2, l1=1.0)
    easy = tune(make_sample(8000, num_keys=20), 0.0, 64, [rule], is_mixed=False)[0]
    sparse = tune(make_sample(8000, num_keys=4000), 0.0, 64, [rule], is_mixed=False)[0]
    assert 1 <= sparse.passes <= 8
    assert easy.losses.mean < sparse.losses.mean
    again = tune(make_sample(8000, num_keys=4000), 0.0, 64, [rule], is_mixed=False)[0]
    assert (again.passes, again.losses.mean) == (sparse.passes, sparse.losses.mean)


def test_the_best_rule_comes_first() -> None:
    rules = [FTRL(alpha=alpha, l1=1.0) for alpha in (1e-4, 0.2, 100.0)]
    found = tune(make_sample(8000), 0.0, 64, rules, is_mixed=False)
    losses = [trial.losses.mean for trial in found]
    assert losses == sorted(losses)
    assert found[0].rule == rules[1]


def make_dense_sample(informative: int, n: int = 400, dim: int = 200) -> ExampleSample:
    rng = np.random.default_rng(1)
    values = rng.normal(0, 1, (n, dim)).astype(np.float32)
    labels = (rng.random(n) < 1 / (1 + np.exp(-3 * values[:, :informative].mean(1) * informative**0.5))).astype(
        np.float32
    )
    keys = np.tile(np.arange(dim, dtype=np.uint64), n)
    batch = Batch(labels, np.arange(0, n * dim + 1, dim), keys, values.reshape(-1))
    return ExampleSample(batch, np.arange(0, n, 256), n, True)


def test_a_large_penalty_is_chosen_only_if_few_of_many_features_have_an_effect() -> None:
    usual, sparse = FTRL(alpha=0.05, l1=1.0), [FTRL(alpha=0.05, l1=100.0), FTRL(alpha=0.1, l1=100.0)]
    for informative, is_better in ((2, True), (200, False), (0, False)):
        sample = make_dense_sample(max(informative, 1))
        if not informative:  # no feature has an effect: a model without weights is best
            sample.batch.labels = np.random.default_rng(2).permutation(sample.batch.labels)
        found = tune(sample, 0.0, 8, [usual], sparse=sparse, is_mixed=False)
        assert (found[0].rule in sparse) == is_better
        assert found[-1].rule == usual
    assert wants_sparsity(sample)
    assert not wants_sparsity(make_sample(8000, num_keys=20))
    assert wants_sparsity(make_sample(8000, num_keys=4000))


def test_higher_rates_are_tried_if_the_true_weights_drift() -> None:
    rng = np.random.default_rng(6)
    n, faster = 12_000, [FTRL(alpha=1.0, l1=1.0)]
    keys = rng.integers(0, 200, (n, 5))
    first, last = rng.normal(0, 1.5, (2, 200))
    rules = [FTRL(alpha=0.15, l1=1.0), FTRL(alpha=0.3, l1=1.0)]
    for share, is_faster in ((np.linspace(0, 1, n), True), (np.zeros(n), False)):
        margins = (1 - share) * first[keys].sum(1) + share * last[keys].sum(1)
        labels = (rng.random(n) < 1 / (1 + np.exp(-margins))).astype(np.float32)
        batch = Batch(labels, np.arange(0, 5 * n + 1, 5), keys.reshape(-1).astype(np.uint64))
        sample = ExampleSample(batch, np.arange(0, n, 256), n, True)
        assert (tune(sample, 0.0, 64, rules, faster=faster, is_mixed=False)[0].rule in faster) == is_faster


def test_copies_are_held_out_together() -> None:
    """Otherwise the model would memorize the copies: the chosen passes would be too many, and the loss too small."""
    once = make_sample(600, num_keys=400)
    rows = np.random.default_rng(3).permutation(np.repeat(np.arange(600), 5))
    five = ExampleSample(once.batch.take(rows), np.arange(0, 3000, 256), 3000, True)
    groups = copies_of(five.batch)
    assert groups is not None
    assert len(np.unique(groups)) == 600
    assert copies_of(once.batch) is None
    few = make_sample(3000, num_keys=2, noise=1.0)
    assert copies_of(few.batch) is None  # equal rows with different labels are no copies
    rules = [FTRL(alpha=0.2, l1=1.0)]
    fresh, copied = (tune(sample, 0.0, 16, rules, is_mixed=False)[0] for sample in (once, five))
    assert copied.losses.mean == pytest.approx(fresh.losses.mean, rel=0.1)
    assert copied.passes <= fresh.passes


@pytest.mark.parametrize("num_rows", [4100, 9000])
def test_no_copy_of_a_held_out_example_is_in_the_training_part(num_rows: int) -> None:
    """There are 100 groups of copies. Each group is held out completely."""
    batch = make_sample(100, num_keys=400).batch.take(np.random.default_rng(3).integers(0, 100, num_rows))
    groups = copies_of(batch)
    assert groups is not None
    held_out = []
    for trained, held in held_out_splits(batch, is_mixed=False):
        assert not set(groups[trained]) & set(groups[held])
        assert sorted([*trained, *held]) == list(range(num_rows))
        held_out += held.tolist()
    assert sorted(held_out) == (list(range(num_rows)) if num_rows <= SMALL else sorted(set(held_out)))


def test_the_trial_uses_the_weights_of_examples() -> None:
    """The result with examples of weight 0 equals the result without these examples."""
    sample, rule = make_sample(9000, num_keys=300), [FTRL(alpha=0.2, l1=1.0)]
    is_odd = np.random.default_rng(4).random(9000) < 0.5
    wrong = sample.batch.take(np.arange(9000))
    wrong.labels = np.where(is_odd, 1 - wrong.labels, wrong.labels).astype(np.float32)
    confused = tune(ExampleSample(wrong, sample.starts, 9000, True), 0.0, 64, rule, is_mixed=False)[0].losses.mean
    wrong.weights = np.where(is_odd, 0, 1).astype(np.float32)
    weighted = tune(ExampleSample(wrong, sample.starts, 9000, True), 0.0, 64, rule, is_mixed=False)[0].losses.mean
    plain = tune(sample, 0.0, 64, rule, is_mixed=False)[0].losses.mean
    assert abs(weighted - plain) < 0.3 * abs(confused - plain)


@pytest.mark.parametrize("n", [1, 2, 3, 7])
def test_very_few_examples_can_be_tuned(n: int) -> None:
    assert tune(make_sample(n), 0.0, 8, [FTRL()], is_mixed=False)[0].passes >= 1


def test_small_gains_on_few_examples_are_ignored() -> None:
    """A better loss counts only in part if the difference may be chance."""
    usual = HeldOutLosses.of(np.tile([0.4, 0.8], 10), np.ones(20))
    noisy = HeldOutLosses.of(np.tile([0.9, 0.2], 10), np.ones(20))
    assert noisy.mean < usual.mean < noisy.pessimistic_mean(usual)
    assert usual.pessimistic_mean(usual) == usual.mean
    sample = make_sample(500, num_keys=100)
    assert tune(sample, 0.0, 8, [FTRL(alpha=0.01)], is_mixed=False)[0].passes > 16


def test_few_examples_are_learned_better_with_an_l2_penalty() -> None:
    """Compare the mean losses of five models on new examples. Each model is trained on 400 examples."""
    means = []
    for penalties in ((0.0,), suggested_l2(make_sample(400))):
        rules = [FTRL(alpha=rate / 5**0.5, l1=1.0, l2=l2) for rate in (0.35, 0.7) for l2 in penalties]
        losses = []
        for seed in range(5):
            batch = make_sample(3400, num_keys=100, noise=1.0, seed=seed).batch
            split = (np.arange(400), np.arange(400, 3400))
            sample = ExampleSample(batch.take(split[0]), np.zeros(1, np.int64), 400, True)
            found = tune(sample, 0.0, 8, rules, is_mixed=False)[0]
            on_fresh = SampleTrial(batch, 0.0, 8, [split]).run(found.rule, max_passes=found.passes)
            losses.append(on_fresh.losses.mean)
        means.append(np.mean(losses))
    assert means[1] < means[0]
    assert suggested_l2(make_sample(8000)) == (0.0,)


def test_more_data_than_in_the_sample_gets_fewer_passes() -> None:
    assert passes_for_all(40, make_sample(1000)) == 40
    assert passes_for_all(40, make_sample(1000, num_examples=4000)) == 10
    assert passes_for_all(40, make_sample(1000, num_examples=10**7)) == 6
    assert passes_for_all(2, make_sample(1000, num_examples=10**7)) == 2


def test_the_offset_is_the_log_odds_and_is_corrected_by_calibration() -> None:
    labels = np.tile([1, 0, 0, 0], 1000).astype(np.float32)
    model = SparseLogisticRegression().starting_from(labels)
    assert model.offset == pytest.approx(np.log(1 / 3), abs=1e-3)
    assert np.isfinite(SparseLogisticRegression().starting_from(np.zeros(10, np.float32)).offset)
    fine = np.full(4000, 0.251, np.float32)
    assert model.calibrated(labels, fine) is model
    doubled = model.calibrated(labels, np.full(4000, 0.5, np.float32))
    assert doubled.offset == pytest.approx(model.offset + np.log(1 / 3), abs=3e-3)
    weights = np.where(labels > 0, 3, 1).astype(np.float32)
    assert SparseLogisticRegression().starting_from(labels, weights).offset == pytest.approx(0, abs=1e-3)
    assert model.calibrated(labels, np.full(4000, 0.5, np.float32), weights) is model
    few = SparseLogisticRegression().calibrated(labels[:20], np.full(20, 0.35, np.float32))
    assert few.offset == 0  # 5 positives are too few for a correction


@pytest.mark.parametrize("num_examples", [*range(1, 10), 17])
def test_few_examples_do_not_change_the_offset(num_examples: int) -> None:
    model, labels = SparseLogisticRegression(), np.zeros(num_examples, np.float32)
    for probability in (1e-12, 0.1, 0.9):
        assert model.calibrated(labels, np.full(num_examples, probability, np.float32)) is model


def test_an_offset_is_corrected_by_the_significant_part() -> None:
    labels = np.tile([1, 0, 0, 0], 10_000).astype(np.float32)
    exact = SparseLogisticRegression(offset=float(np.log(1 / 3)))
    # predictions too high by 0.05 in log odds, with a standard error of 0.0115
    off = np.full(40_000, 1 / (1 + np.exp(-exact.offset - 0.05)), np.float32)
    corrected = exact.calibrated(labels, off).offset - exact.offset
    assert -0.05 < corrected < -0.045
    little, much = (
        exact.calibrated(labels, off, None, Optimism(shift, 0.04)).offset - exact.offset for shift in (0.05, 0.5)
    )
    assert -0.05 < little < -0.03  # the shift of the trial is within its error
    assert much == pytest.approx(0.45, abs=0.01)


@pytest.mark.parametrize("num_positives", [25, 200])
def test_the_bias_on_all_data_is_corrected_completely(num_positives: int) -> None:
    """On all data, even a bias below the standard error (0.07 for 200 of 8,000 labels) is corrected."""
    labels = np.zeros(8000, np.float32)
    labels[:: 8000 // num_positives] = 1
    model = SparseLogisticRegression().starting_from(labels)
    low = np.full(8000, 1 / (1 + np.exp(0.06 - model.offset)), np.float32)
    assert model.calibrated(labels, low).offset == pytest.approx(model.offset, abs=0.01)
    found = model.calibrated(labels, low, None, Optimism(0.1, 0.2), is_complete=True)
    assert found.offset - model.offset == pytest.approx(0.06, abs=0.03)  # starting_from() adds half a click
    nothing = model.calibrated(np.zeros(8000, np.float32), low, is_complete=True)  # only one class
    assert -1 < nothing.offset - model.offset <= 0
    poisson = PoissonRegression().starting_from(labels)
    counts = poisson.calibrated(labels, low, is_complete=True)
    assert counts.mean / poisson.mean == pytest.approx(labels.sum() / low.sum(), rel=0.01)


def test_drifting_rates_use_the_latest_values() -> None:
    rng = np.random.default_rng(5)
    predictions = np.full(32_000, 0.3, np.float32)
    for rates, now in ((np.full(32_000, 0.33), 0.33), (np.repeat([0.2, 0.4], 16_000), 0.4)):
        labels = (rng.random(32_000) < rates).astype(np.float32)
        model = SparseLogisticRegression(offset=float(np.log(0.3 / 0.7))).calibrated(labels, predictions)
        assert 1 / (1 + np.exp(-model.offset)) == pytest.approx(now, rel=0.02)


def test_a_continued_model_keeps_the_offset() -> None:
    assert SparseLogisticRegression().continued_from(SparseLogisticRegression(offset=-2.0)) == SparseLogisticRegression(
        offset=-2.0
    )


def test_predictions_include_the_offset() -> None:
    sample = make_sample(50)
    plain, shifted = (
        SparseLogisticRegression(offset=offset).prepare(sample.batch, KeyScratch()) for offset in (0.0, 1.5)
    )
    zeros = np.zeros(len(plain.keys[0]), np.float32)
    assert plain.predict([zeros]).tolist() == [0.5] * 50
    assert shifted.predict([zeros]) == pytest.approx(1 / (1 + np.exp(-1.5)))
    margins, probabilities, residuals = np.zeros((3, 50), np.float32)
    csr_dot(sample.batch.indptr, np.zeros(250, np.int32), np.empty(0, np.float32), zeros, margins)
    assert plain.gradients([zeros])[1] == pytest.approx(
        logistic(margins, sample.batch.labels, probabilities, residuals)
    )


def _sample_with_positives(n: int, num_positives: int) -> ExampleSample:
    labels = np.zeros(n, np.float32)
    labels[np.random.default_rng(0).permutation(n)[:num_positives]] = 1
    return with_labels(labels)


@pytest.mark.parametrize(("num_positives", "folds"), [(20_000, 1), (4_500, 1), (1_500, 3), (100, 5)])
def test_more_parts_are_held_out_if_one_class_is_rare(num_positives: int, folds: int) -> None:
    sample = _sample_with_positives(40_000, num_positives)
    splits = list(held_out_splits(sample.batch, is_mixed=True))
    assert len(splits) == folds
    assert len(np.unique(np.concatenate([held for _, held in splits]))) == folds * 5_000
    assert all(np.ptp(held) > 35_000 for _, held in splits)  # spread over the file
    ((_, newest),) = held_out_splits(sample.batch, is_mixed=False)
    assert newest.tolist() == list(range(35_000, 40_000))
    assert len(suggested_l2(sample)) == (3 if folds == 5 else 1)


def test_drifting_weights_are_detected() -> None:
    """The weights of features change in the newest eighth of the data, but the rate of positives does not."""
    batch, other = (make_sample(12_000, seed=0).batch, make_sample(12_000, seed=0).batch)
    rule = FTRL(alpha=0.2, l1=1.0)
    assert not has_drifting_loss(batch, 0.0, 64, rule)
    other.labels = np.append(batch.labels[:10_500], 1 - batch.labels[10_500:]).astype(np.float32)
    assert has_drifting_loss(other, 0.0, 64, rule)


def test_the_first_rule_is_chosen_unless_another_rule_is_significantly_better() -> None:
    chances = 0
    for seed in range(6):
        rules = [FTRL(alpha=alpha, l1=1.0) for alpha in (0.2, 0.28, 0.14)]
        found = tune(make_sample(6_000, num_keys=300, noise=2.0, seed=seed), 0.0, 64, rules, is_mixed=True)
        (first,) = (trial for trial in found if trial.rule == rules[0])
        assert found[0] is first or found[0].losses.is_below(first.losses)
        chances += found[0] is first and min(trial.losses.mean for trial in found) < first.losses.mean
    assert chances


def test_held_out_examples_are_mixed_unless_weights_or_rates_drift() -> None:
    sample = make_sample(12_000)
    assert suits_mixing(sample, sample, 0.0, 64)
    drifting, labels = make_sample(12_000), sample.batch.labels
    drifting.batch.labels = np.append(labels[:10_500], 1 - labels[10_500:]).astype(np.float32)
    assert not suits_mixing(drifting, drifting, 0.0, 64)
    is_raised = (np.arange(12_000) > 9_000) & (np.random.default_rng(0).random(12_000) < 0.4)
    drifting.batch.labels = np.maximum(labels, is_raised).astype(np.float32)
    assert not suits_mixing(drifting, drifting, 0.0, 64)
    drifting.batch.labels = np.sort(labels)
    assert suits_mixing(drifting, drifting, 0.0, 64)


def test_one_part_is_held_out_if_labels_are_no_classes() -> None:
    batch = make_sample(12_000).batch
    batch.labels = np.random.default_rng(0).gamma(2.0, 2.0, 12_000).astype(np.float32)
    assert num_folds(batch) == 1
    batch.labels = np.ones(12_000, np.float32)
    assert num_folds(batch) == 1


def test_the_error_of_a_shift_accounts_for_runs_of_equal_labels() -> None:
    rng = np.random.default_rng(0)
    runs = np.arange(8000) // 16
    independent = (rng.random(8000) < 0.3).astype(np.float64)
    repeated = (rng.random(500) < 0.3).astype(np.float64)[runs]
    none, counts = np.zeros(8000), np.ones(8000)
    plain = log_odds_shift(none, repeated, counts)[1]
    assert log_odds_shift(none, independent, counts, runs)[1] == pytest.approx(plain, rel=0.1)
    # 16 equal labels count as one label
    assert log_odds_shift(none, repeated, counts, runs)[1] == pytest.approx(4 * plain, rel=0.1)
