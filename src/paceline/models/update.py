"""Update rules by name, with settings that suit sparse logistic regression."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Final, TypeAlias

from paceline.errors import UsageError
from paceline.tables.rules import FTRL, RULES, UpdateRule
from paceline.tables.settings import TINY, check_number

_KINDS: Final[dict[str, Any]] = {
    kind.__name__.lower(): kind
    for kind in sorted(RULES.values(), key=lambda kind: (kind is not FTRL, kind.code))  # FTRL, the default, comes first
    if kind.logistic_rate is not None
}
UPDATE_NAMES: Final = tuple(_KINDS)


RuleChoice: TypeAlias = Callable[[float, float, float], UpdateRule]
"""A function that returns an update rule, given a learning rate, an L1 penalty and an L2 penalty."""


def suited_ftrl(alpha: float, l1: float, l2: float) -> FTRL:
    return FTRL(alpha=alpha, l1=l1, l2=l2)


def rule_of(update: UpdateRule | RuleChoice, alpha: float, l1: float, l2: float = 0.0) -> UpdateRule:
    """Return `update` if it is a rule; otherwise call it with the learning rate and penalties, and return its rule."""
    return update if isinstance(update, UpdateRule) else update(alpha, l1, l2)


def make_update(
    name: str = "ftrl",
    *,
    lr: float | None = None,
    l1: float | None = None,
    l2: float | None = None,
    beta: float | None = None,
    option_format: str = "--{} ",
) -> UpdateRule:
    """Create an update rule. For FTRL, `lr` is alpha; for other rules, `l2` is the weight decay. Raises UsageError.

    `option_format` formats option names in errors: ``--{} `` on the command line, ``{}=`` in Python.

    FTRL's defaults (alpha 0.05, beta 1, l1 1, l2 0) give the best known result on the Criteo sample.
    """
    for option, value, least in (("lr", lr, TINY), ("beta", beta, TINY), ("l1", l1, 0.0), ("l2", l2, 0.0)):
        if value is not None:
            check_number(f"{option_format.format(option)}{value:g}", value, least)
    kind = _KINDS.get(name)
    if kind is None:
        raise UsageError(f"unknown update rule {name!r}: expected one of {', '.join(UPDATE_NAMES)}")
    rate = kind.logistic_rate if lr is None else lr
    if kind is FTRL:
        return FTRL(
            alpha=rate,
            beta=1.0 if beta is None else beta,
            l1=1.0 if l1 is None else l1,
            l2=0.0 if l2 is None else l2,
        )
    if l1 and not _has_l1(kind):
        able = " or ".join(update for update in UPDATE_NAMES if _has_l1(_KINDS[update]))
        raise UsageError(f"{name} has no L1 penalty. Leave --l1 out, or use --update {able}")
    if beta is not None:
        raise UsageError(f"--beta applies only to FTRL. Leave it out with --update {name}")
    penalties = {"weight_decay": l2 or 0.0, **({"l1": l1 or 0.0} if _has_l1(kind) else {})}
    rule: UpdateRule = kind(lr=rate, **penalties)
    return rule


def _has_l1(kind: type[Any]) -> bool:
    return any(field.name == "l1" for field in dataclasses.fields(kind))
