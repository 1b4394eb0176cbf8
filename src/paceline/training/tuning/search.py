"""Search a model's settings on a sample of the data: try a few, then the neighbours of the best settings.

Linear models are tried with several rates and L1 penalties. In models with factors, the weights have the rate, penalty
and passes of a logistic regression on the same data. The search varies the rates and penalties of the factors, and the
number of occurrences after which a feature gets factors. It also tries weights without a penalty, because a penalty
removes the weight of a feature that matters only in pairs. For the layers of deep models, several rates and penalties
are tried.

A logistic regression is tried on the same examples. If the trial has all the data, the best settings are chosen.
Features get factors if the model with factors is better than the logistic regression by more than a standard error. If
the trial has only a part of the data, features are rarer in it than in all data. In this case, other settings must be
better than the usual ones by more than a standard error. Features get factors unless the logistic regression is better
by more than two standard errors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

from paceline.data.sampling import ExampleSample
from paceline.models.base import Optimism, SparseModel
from paceline.models.deep.base import DeepModel
from paceline.models.features.counting import MOST_COUNTED
from paceline.models.fm import FactorModel
from paceline.ps import FTRL, UpdateRule
from paceline.training.tuning.choices import passes_for_all
from paceline.training.tuning.model_trial import SECONDS, ModelTrial, TriedModel
from paceline.training.tuning.trial import MAX_PASSES, SMALL, HeldOutLosses, SampleTrial

Settings = Mapping[str, Any]

FACTORS: Final[tuple[Settings, ...]] = tuple(
    {"factor_lr": 0.1, "factor_l2": l2, "factor_min_count": 1} for l2 in (0.3, 0.1, 0.03, 0.01)
)
"""Settings of factors that are tried in addition to the usual settings."""
NO_FACTORS: Final[Settings] = {"factor_min_count": MOST_COUNTED}
_OTHER_L2 = (0.55, 1.8)
_OTHER_RATES = (0.3, 3.0)
_OTHER_COUNTS = (1, 30)
_TOWER_RATES = (0.25, 2.5)
_TOWER_L2 = 0.1
_OTHER_L1 = (0.1, 10.0, 100.0)
_ROUNDS = 2
_WIDE_ROUNDS = 5
_LEAST_REFINED = 200  # with fewer examples, similar settings cannot be distinguished
_LEAST_GAIN = 1e-3  # features get factors only if the loss decreases by more than this fraction
_CHANCE = 2.0  # standard errors, if the trial has a part of the data or few examples
_WIDE = 4.0  # with --tune, a trial takes this many times as long


@dataclasses.dataclass(frozen=True, kw_only=True)
class TunedModel:
    """The best settings of a model. `note` is a sentence for the user about the search."""

    model: SparseModel
    rule: UpdateRule
    passes: int
    optimism: Optimism | None = None
    note: str | None = None


def tune_linear(
    model: SparseModel,
    sample: ExampleSample,
    batch_size: int,
    rules: Sequence[UpdateRule],
    *,
    is_mixed: bool,
    passes: int | None,
    default: TunedModel | None = None,
    given: Collection[str] = (),
) -> TunedModel:
    """Return the best settings of a linear model, of `rules` and the neighbours of the best rule.

    If many rules are tried, some are better by chance. Therefore another rule must be better than the first one by more
    than a standard error (two for up to 5,000 examples). Settings that the user has `given`, such as ``l1``, do not
    change. If `default` is not None, its rule is the first, and the search tries more.
    """
    is_wide = default is not None
    trial = ModelTrial(
        model, sample, batch_size, is_mixed=is_mixed, passes=passes, seconds=SECONDS * (_WIDE if is_wide else 1.0)
    )
    tried = trial.run_all([(model, rule) for rule in rules])
    best = min(tried, key=_mean_loss)
    seen = set(rules)
    for _ in range(_WIDE_ROUNDS if is_wide else _ROUNDS if trial.num_examples >= _LEAST_REFINED else 0):
        neighbours = [rule for rule in _next_rules(best.rule, given) if len(rules) > 1 and rule not in seen]
        seen.update(neighbours)
        former, best = best, min([best, *trial.run_all([(model, rule) for rule in neighbours])], key=_mean_loss)
        if best is former:
            break
    if not best.losses.is_below(tried[0].losses, _CHANCE if trial.num_examples <= SMALL else 1.0):
        if default is not None:
            return default
        best = tried[0]
    return TunedModel(model=model, rule=best.rule, passes=passes or passes_for_all(best.passes, sample))


def _next_rules(rule: UpdateRule, given: Collection[str]) -> list[UpdateRule]:
    if not isinstance(rule, FTRL):
        return []
    return [
        *(dataclasses.replace(rule, l1=rule.l1 * factor) for factor in _OTHER_L1 if "l1" not in given),
        *(dataclasses.replace(rule, alpha=rule.alpha * factor) for factor in (0.6, 1.7) if "alpha" not in given),
    ]


class FactorSearch:
    """A search for the settings of a model with factors on a sample."""

    def __init__(
        self,
        model: FactorModel,
        sample: ExampleSample,
        batch_size: int,
        *,
        is_mixed: bool,
        passes: int | None,
        default: TunedModel | None = None,
    ) -> None:
        self._model, self._sample, self._passes, self._default = model, sample, passes, default
        self._is_wide = default is not None
        seconds = SECONDS * (_WIDE if self._is_wide else 1.0)
        self._trial = ModelTrial(model, sample, batch_size, is_mixed=is_mixed, passes=passes, seconds=seconds)
        self._linear = SampleTrial(self._trial.batch, model.offset, batch_size, self._trial.splits)
        self._tried: dict[tuple[SparseModel, UpdateRule], TriedModel] = {}

    def run(self, linear: TunedModel, unpenalized: UpdateRule) -> TunedModel:
        """Return the best settings.

        `linear` has the settings of a logistic regression. `unpenalized` is its rule without an L1 penalty, or with the
        user's penalty. If there is a default, the search tries more, and other settings must be better than the default
        by more than a standard error.
        """
        rule = linear.rule
        usual = self._try([({}, rule)])[0]
        self._try([(settings, rule) for settings in FACTORS])
        if self._is_thorough:
            best = min(self._tried.values(), key=_mean_loss)
            for _ in range(_WIDE_ROUNDS if self._is_wide else _ROUNDS):
                self._try(self._next_to(best, unpenalized))
                former, best = best, min(self._tried.values(), key=_mean_loss)
                if not best.losses.is_below(former.losses):
                    break
        elif not self._trial.is_complete:
            self._try([(self._settings_of(min(self._tried.values(), key=_mean_loss).model), unpenalized)])
        chosen = self._chosen(usual)
        of_linear = self._losses_of_linear(rule)
        has_factors = of_linear is None or self._has_gain(chosen.losses, of_linear)
        found = chosen.losses if of_linear is None or has_factors else of_linear
        if self._default is not None and not found.is_below(self._losses_of(self._default)):
            return self._default
        if of_linear is not None and not has_factors:
            without = self._model.with_defaults(NO_FACTORS)
            if without.value_of("factor_min_count") == MOST_COUNTED:
                note = (
                    f"factors do not help here: {self._model.loss_name} on held-out examples is "
                    f"{chosen.losses.mean:.4f} with factors and {of_linear.mean:.4f} without. No feature gets factors. "
                    "Pass --factor-min-count to use them"
                )
                return dataclasses.replace(linear, model=without, note=note)
        optimism = self._trial.optimism(chosen) if self._trial.is_complete else linear.optimism
        if self._passes is not None:
            wanted = self._passes
        elif chosen is usual and not self._trial.is_complete:
            wanted = linear.passes
        else:
            wanted = passes_for_all(chosen.passes, self._sample, self._trial.num_represented)
        return TunedModel(model=chosen.model, rule=chosen.rule, passes=wanted, optimism=optimism)

    @property
    def _is_thorough(self) -> bool:
        return self._is_wide or (self._trial.is_complete and self._trial.num_examples >= _LEAST_REFINED)

    def _chosen(self, usual: TriedModel) -> TriedModel:
        best = min(self._tried.values(), key=_mean_loss)
        return best if self._trial.is_complete or best.losses.is_below(usual.losses) else usual

    def _losses_of(self, found: TunedModel) -> HeldOutLosses:
        of_linear = self._losses_of_linear(found.rule) if found.note is not None else None
        return of_linear or self._try([(self._settings_of(found.model), found.rule)])[0].losses

    def _has_gain(self, with_factors: HeldOutLosses, without: HeldOutLosses) -> bool:
        if self._trial.is_complete:
            return with_factors.is_below(without) and with_factors.mean < (1 - _LEAST_GAIN) * without.mean
        return not without.is_below(with_factors, _CHANCE)

    def _losses_of_linear(self, rule: UpdateRule) -> HeldOutLosses | None:
        if not isinstance(rule, FTRL):
            return None
        most = MAX_PASSES if self._trial.is_complete and self._passes is None else self._trial.max_passes
        return self._linear.run(rule, max_passes=most).losses

    def _settings_of(self, model: SparseModel) -> dict[str, Any]:
        return {name: getattr(model, name) for name in self._model.usual}

    def _try(self, settings: Iterable[tuple[Settings, UpdateRule]]) -> list[TriedModel]:
        wanted = [(self._model.with_defaults(found), rule) for found, rule in settings]
        new = [pair for pair in dict.fromkeys(wanted) if pair not in self._tried]
        self._tried |= dict(zip(new, self._trial.run_all(new), strict=True))
        return [self._tried[pair] for pair in wanted]

    def _next_to(self, best: TriedModel, unpenalized: UpdateRule) -> list[tuple[Settings, UpdateRule]]:
        found = self._settings_of(best.model)
        changes = [
            *({"factor_l2": found["factor_l2"] * factor} for factor in _OTHER_L2),
            *({"factor_lr": found["factor_lr"] * factor} for factor in _OTHER_RATES),
            *({"factor_min_count": count} for count in _OTHER_COUNTS),
        ]
        if isinstance(self._model, DeepModel):
            changes = [
                *(change for change in changes if "factor_lr" not in change),
                *({"tower_lr": found["tower_lr"] * factor} for factor in _TOWER_RATES),
                {"tower_l2": _TOWER_L2},
            ]
        return [(found, unpenalized), *(({**found, **change}, best.rule) for change in changes)]


def _mean_loss(tried: TriedModel) -> float:
    return tried.losses.mean
