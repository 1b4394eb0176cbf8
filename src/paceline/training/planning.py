"""Plan a training: use the given options and choose the rest on a sample of the data."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable

import numpy as np

from paceline.data import FORMATS, BadLines, open_dataset
from paceline.data.batch import Batch
from paceline.data.example_sampling import sample_examples
from paceline.data.key_scaling import KeyScaling, read_key_scaling
from paceline.data.sampling import ExampleSample
from paceline.errors import UsageError
from paceline.models.base import Optimism, SparseModel
from paceline.models.clicks import ClickProbabilityModel
from paceline.models.fm import FactorModel
from paceline.models.rate_drift import changed_rates
from paceline.models.stored import StoredModel, read_stored_model
from paceline.models.update import rule_of
from paceline.ps import FTRL, RULES, UpdateRule, from_fields
from paceline.training.bad_data import describe_bad_lines, no_line_left, plain_bad_lines
from paceline.training.files.data_files import weighting_of
from paceline.training.files.numeric_scales import choose_key_scaling, scale_columns
from paceline.training.options import TrainOptions
from paceline.training.plan import TrainingPlan
from paceline.training.snapshots import Resumption
from paceline.training.tuning.choices import (
    FASTER_RATES,
    L1,
    LINEAR_RATES,
    RATES,
    SPARSE,
    WIDE_L1,
    WIDE_RATES,
    has_steady_loss,
    is_sorted_by_label,
    passes_for_all,
    suggested_alpha,
    suggested_batch_size,
    suggested_l2,
    tune,
    wants_sparsity,
)
from paceline.training.tuning.scale_trial import scaled_sample
from paceline.training.tuning.search import FactorSearch, TunedModel, tune_linear
from paceline.training.tuning.trial import TriedRule

_EPOCHS = 4  # number of passes if no trial chooses it
_BATCH_SIZE = 256
_SHARDS_AT_ONCE = 8
_OPTIMISM_OF_MANY = Optimism(0.0, 0.02)  # assumed if no trial used all the data: a model cannot memorize many examples


def plan_training(
    options: TrainOptions,
    warn: Callable[[str], None] = lambda text: None,
    examples: ExampleSample | None = None,
) -> TrainingPlan:
    """Choose the missing options on a sample of the data, or continue the plan of ``options.resume``.

    If `examples` (of :class:`paceline.data.Sample`) is None, a sample is read. Raises DataError if there is no example,
    and ModelError if there is no snapshot to resume from.
    """
    for name, value in (("epochs", options.epochs), ("batch_size", options.batch_size)):
        if value is not None and value < 1:
            raise UsageError(f"{name}={value}: expected a positive whole number")
    if options.resume is not None:
        return _plan_of_snapshot(options, Resumption.find(options.resume, warn), examples)
    if options.init_from is not None:
        return _plan_of_model(options, read_stored_model(options.init_from), examples)
    if options.adapt == "no":
        return _fixed_plan(options)
    sample, format = _sample(options, examples)
    scaling = _find_scaling(options, sample, format)
    return plan_on_sample(options, sample, scaling)


def _sample(options: TrainOptions, examples: ExampleSample | None) -> tuple[ExampleSample, str]:
    labels = options.model.read_labels_as
    if examples is None:
        with open_dataset(options.data, options.format, options.columns, labels=labels) as dataset:
            sample, format = sample_examples(dataset), dataset.source_format
    else:
        assert options.format is not None
        assert options.columns is not None
        sample, format = scale_columns(examples, options.columns, labels), options.format
    lines = sample.bad_lines or BadLines(0, ())
    bad = describe_bad_lines([plain_bad_lines(lines, {(0, 0): lines.count})])
    if not sample.batch.num_examples:
        raise no_line_left(options.data[0], "trained on", bad)
    bad.check(sample.num_read, options.reading.max_malformed, options.format)
    return dataclasses.replace(sample, batch=weighting_of(options).weighted(sample.batch)), format


def _find_scaling(options: TrainOptions, sample: ExampleSample, format: str) -> KeyScaling | None:
    if not FORMATS[format].is_keyed or options.numeric_scale == "none":
        return None
    return choose_key_scaling(
        sample, options.numeric_scale, absent_is_zero=FORMATS[format].absent_is_zero, model=options.model
    )


def plan_on_sample(options: TrainOptions, sample: ExampleSample, scaling: KeyScaling | None) -> TrainingPlan:
    """Choose the missing options on a sample, whose values `scaling` scales first."""
    sample = scaled_sample(sample, scaling)
    is_sorted = is_sorted_by_label(sample)
    model = options.model
    if model.labels == "clicks":  # other models already have the settings that depend on labels
        model = model.starting_from(sample.batch.labels, sample.batch.weights)
    clicks = model if isinstance(model, ClickProbabilityModel) and not is_sorted else None
    rates = None if clicks is None else changed_rates(sample.batch.labels, sample.batch.weights)
    crossed = dataclasses.replace(sample, batch=model.crossed(sample.batch))
    batch_size = options.batch_size or suggested_batch_size(sample.num_examples, options.model.least_batch_size)
    is_mixed = rates is None
    if clicks is not None and is_mixed and options.epochs is None:
        is_mixed = has_steady_loss(crossed, clicks.offset, batch_size)
    found = _find_settings(options, model, crossed, batch_size, is_mixed=is_mixed)
    return TrainingPlan(
        model=found.model,
        epochs=found.passes,
        batch_size=batch_size,
        update=found.rule,
        note=found.note,
        scaling=scaling,
        shards_at_once=_shards_at_once(options, is_sorted=is_sorted),
        order=options.passes.order or "shuffle",
        optimism=found.optimism if sample.is_whole and found.optimism is not None else _OPTIMISM_OF_MANY,
        rates=rates,
        recent=_recent(sample, is_sorted=is_sorted),
        chosen_on=sample.batch.num_examples,
        num_examples=sample.num_examples,
    )


def _plan_of_model(options: TrainOptions, stored: StoredModel, examples: ExampleSample | None) -> TrainingPlan:
    update = _rule_after(from_fields(RULES, stored.tables[0].spec.update), options)
    plan = dataclasses.replace(_fixed_plan(options), update=update, scaling=read_key_scaling(stored.described))
    if options.adapt == "no":
        return plan
    sample = scaled_sample(_sample(options, examples)[0], plan.scaling)
    is_sorted = is_sorted_by_label(sample)
    return dataclasses.replace(
        plan,
        num_examples=sample.num_examples,
        batch_size=options.batch_size or suggested_batch_size(sample.num_examples, options.model.least_batch_size),
        shards_at_once=_shards_at_once(options, is_sorted=is_sorted),
        chosen_on=sample.batch.num_examples,
    )


def _shards_at_once(options: TrainOptions, *, is_sorted: bool) -> int:
    return _SHARDS_AT_ONCE if is_sorted and options.passes.order != "file" else 1


def _fixed_plan(options: TrainOptions) -> TrainingPlan:
    return TrainingPlan(
        model=options.model.with_defaults(),
        epochs=options.epochs or _EPOCHS,
        batch_size=options.batch_size or _BATCH_SIZE,
        update=rule_of(options.update, FTRL().alpha, L1),
        order=options.passes.order or "shuffle",
    )


def _rule_after(former: UpdateRule, options: TrainOptions) -> UpdateRule:
    if isinstance(options.update, UpdateRule) or not isinstance(former, FTRL):
        return rule_of(options.update, FTRL().alpha, L1)
    rule = options.update(former.alpha, former.l1, former.l2)
    if not isinstance(rule, FTRL):
        return rule
    return dataclasses.replace(rule, beta=former.beta if rule.beta == FTRL().beta else rule.beta)


def given_settings(options: TrainOptions) -> list[str]:
    """Return the names of the update rule's settings that the user gave. Trials must not change them."""
    one, other = (rule_of(options.update, suggested, suggested) for suggested in (0.25, 0.5))
    return [name for name in ("alpha", "l1") if getattr(one, name, None) == getattr(other, name, None)]


def _find_settings(
    options: TrainOptions, model: SparseModel, sample: ExampleSample, batch_size: int, *, is_mixed: bool
) -> TunedModel:
    """Return the best settings for the data. The sample has its interactions already.

    With ``--tune``, other settings must be better than the default settings by more than a standard error.
    """
    rule, default = rule_of(options.update, suggested_alpha(sample), L1), None
    if options.adapt == "widely":
        narrow = dataclasses.replace(options, adapt="yes")
        default = _find_settings(narrow, model, sample, batch_size, is_mixed=is_mixed)
        rule = default.rule
    is_open = any(getattr(model, name) is None for name in model.usual)
    if options.epochs is not None and not is_open and default is None:
        return TunedModel(model=model, rule=rule, passes=options.epochs)
    if not isinstance(model, ClickProbabilityModel) or not isinstance(rule, FTRL):
        plain = dataclasses.replace(model.with_defaults(), interactions=None)
        rules = [rule, *_rules_of(options, sample, itertools.product(LINEAR_RATES, [L1], [0.0]))]
        found = tune_linear(
            plain, sample, batch_size, list(dict.fromkeys(rules)),
            is_mixed=is_mixed, passes=options.epochs, default=default, given=given_settings(options),
        )  # fmt: skip
        return dataclasses.replace(found, model=model.with_defaults())
    linear = TunedModel(model=model.with_defaults(), rule=rule, passes=options.epochs or 1)
    if options.epochs is None or default is not None:
        tried = _tuned(options, sample, model.offset, batch_size, rule, is_mixed=is_mixed)
        passes = options.epochs or passes_for_all(tried.passes, sample)
        linear = dataclasses.replace(linear, rule=tried.rule, passes=passes, optimism=tried.optimism)
    if not isinstance(model, FactorModel):
        return default if default is not None and linear.rule == default.rule else linear
    if not is_open and default is None:
        return linear
    search = FactorSearch(
        dataclasses.replace(model, interactions=None), sample, batch_size,
        is_mixed=is_mixed, passes=options.epochs, default=default,
    )  # fmt: skip
    found = search.run(linear, rule_of(options.update, getattr(linear.rule, "alpha", rule.alpha), 0.0))
    return dataclasses.replace(found, model=dataclasses.replace(found.model, interactions=model.interactions))


def _rules_of(
    options: TrainOptions, sample: ExampleSample, settings: Iterable[tuple[float, float, float]]
) -> list[FTRL]:
    """Return update rules with these rates, L1 and L2 penalties. Settings in the options take precedence."""
    rules = (rule_of(options.update, suggested_alpha(sample, rate), l1, l2) for rate, l1, l2 in settings)
    return list(dict.fromkeys(rule for rule in rules if isinstance(rule, FTRL)))


def _tuned(
    options: TrainOptions, sample: ExampleSample, offset: float, batch_size: int, rule: FTRL, *, is_mixed: bool
) -> TriedRule:
    """Return the best rule for a logistic regression of the sample.

    With ``--tune``, another rule must be better than the default `rule` by more than a standard error.
    """
    is_wide = options.adapt == "widely"
    rates, penalties = (WIDE_RATES, WIDE_L1) if is_wide else (RATES, (L1,))
    usual = itertools.product(rates, penalties, suggested_l2(sample))
    rules = list(dict.fromkeys([rule, *_rules_of(options, sample, usual)]))
    sparse, faster = (
        [rule for rule in _rules_of(options, sample, settings) if rule not in rules]
        for settings in (SPARSE if wants_sparsity(sample) else (), [(rate, L1, 0.0) for rate in FASTER_RATES])
    )
    found = tune(sample, offset, batch_size, rules, sparse=sparse, faster=faster, is_mixed=is_mixed)
    default = next(tried for tried in found if tried.rule == rule)
    return default if is_wide and not found[0].losses.is_below(default.losses) else found[0]


def _recent(sample: ExampleSample, *, is_sorted: bool) -> Batch:
    batch = sample.batch
    return batch.take(np.random.default_rng(0).permutation(batch.num_examples)) if is_sorted else batch


def _plan_of_snapshot(options: TrainOptions, resumption: Resumption, examples: ExampleSample | None) -> TrainingPlan:
    training = resumption.training
    shards_at_once, scaling = int(training["shards_at_once"]), read_key_scaling(training["dataset"])
    optimism = training.get("optimism")
    if shards_at_once > 1 and options.passes.order == "file":
        raise UsageError(f"--order file: the training of {resumption.snapshot} mixes shards. Resume it without --order")
    sample = None if optimism is None else scaled_sample(_sample(options, examples)[0], scaling)
    return TrainingPlan(
        model=options.model.continued_from(resumption.model).with_defaults(),
        epochs=options.epochs or int(training["epochs"]),
        order=options.passes.order or str(training["order"]),
        batch_size=options.batch_size or int(training["batch_size"]),
        update=_rule_after(from_fields(RULES, training["update"]), options),
        scaling=scaling,
        shards_at_once=shards_at_once,
        optimism=None if optimism is None else Optimism(*map(float, optimism)),
        recent=None if sample is None else _recent(sample, is_sorted=is_sorted_by_label(sample)),
        num_examples=int(training["num_examples"]),
        resumed=resumption.snapshot,
        run=training["run"],
    )
