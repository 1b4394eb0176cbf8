"""The update rules of the command line."""

from __future__ import annotations

import inspect

from paceline.cli.train_flags import UpdateFlags
from paceline.models.update import UPDATE_NAMES, make_update
from paceline.tables.rules import FTRL, RULES


def test_every_rule_with_a_rate_for_click_logs_is_a_choice() -> None:
    assert UPDATE_NAMES[0] == "ftrl"
    assert {*UPDATE_NAMES} == {name.lower() for name, kind in RULES.items() if kind.logistic_rate}
    for name in UPDATE_NAMES:
        rule = make_update(name, l2=0.5)
        assert type(rule).__name__.lower() == name
        assert rule.numbers[0] == type(rule).logistic_rate
        assert (rule.l2 if isinstance(rule, FTRL) else rule.numbers[1]) == 0.5
        has_l1 = hasattr(rule, "l1")
        assert has_l1 == (name in ("ftrl", "sgd", "adagrad", "adam", "adamw"))
        if has_l1:
            assert make_update(name, l1=0.25).l1 == 0.25  # type: ignore[attr-defined]
        assert name in inspect.getsource(UpdateFlags)  # the help text of --update, which needs no numba
