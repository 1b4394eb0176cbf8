"""Update rules and initializers: validation and encoding."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
from tests.reference.rule_cases import RULE_CASES

import paceline
import paceline.ps
from paceline.errors import UsageError
from paceline.kernels import initializers as kernel_initializers
from paceline.kernels.parameters import NUM_HYPER
from paceline.tables import rules
from paceline.tables.initializers import INITIALIZERS, Constant, Initializer, Normal, Uniform, Zeros
from paceline.tables.rules import FTRL, RULES, SGD, Adagrad, Adam, AdamW, Momentum, RMSprop, Rprop, UpdateRule
from paceline.tables.settings import from_fields, to_fields

EXAMPLES: list[UpdateRule] = [
    SGD(lr=1, weight_decay=0.5),
    Adagrad(lr=0.1, eps=0, initial_accumulator=0.1, weight_decay=0.1),
    Adam(lr=0.1, betas=(0.5, 0.25)),
    Rprop(lr=0.1, etas=(0.25, 2), step_sizes=(0.5, 4)),
    FTRL(alpha=0.1, beta=0.5, l1=2, l2=3),
    *(case.rule for case in RULE_CASES.values()),
]
STARTS: list[Initializer] = [Zeros(), Constant(value=2), Uniform(low=-1, high=1), Normal(mean=1, std=0)]


@pytest.mark.parametrize("rule", EXAMPLES)
def test_rules_are_encoded_as_fields(rule: UpdateRule) -> None:
    fields = to_fields(rule)
    assert fields["kind"] == type(rule).__name__
    assert from_fields(RULES, fields) == rule
    as_json = {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}
    assert from_fields(RULES, as_json) == rule
    assert fields == to_fields(rule)  # from_fields did not change them


@pytest.mark.parametrize("start", STARTS)
def test_initializers_are_encoded_as_fields(start: Initializer) -> None:
    assert from_fields(INITIALIZERS, to_fields(start)) == start


@pytest.mark.parametrize(("kinds", "examples"), [(RULES, EXAMPLES), (INITIALIZERS, STARTS)])
def test_every_kind_has_an_example(kinds: dict[str, type], examples: list[object]) -> None:
    assert set(kinds.values()) == {type(example) for example in examples}


def test_every_rule_is_found_by_name_and_number() -> None:
    assert set(rules.__all__) == {*RULES, "RULES", "UpdateRule"}
    for name, rule in RULES.items():
        assert getattr(paceline, name) is getattr(paceline.ps, name) is rule
        assert name in paceline.__all__
    for name, start in INITIALIZERS.items():
        assert start.code == getattr(kernel_initializers, name.upper())
        assert getattr(paceline, name) is start
    for example in EXAMPLES:
        assert len(example.hyper) == NUM_HYPER
        assert all(math.isfinite(value) for value in example.hyper)


def test_a_second_rule_with_the_same_name_or_number_is_rejected() -> None:
    with pytest.raises(UsageError, match="an update rule SGD exists already"):
        type("SGD", (UpdateRule,), {"code": 99})
    with pytest.raises(UsageError, match="FTRL has the code 6 already"):
        type("MyFTRL", (FTRL,), {})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SGD(lr=-1), r"SGD\(lr=-1\): expected a number of 0 or more"),
        (lambda: SGD(lr=math.nan), r"SGD\(lr=nan\): expected a number"),
        (lambda: SGD(lr=math.inf), r"SGD\(lr=inf\): expected a number"),
        (lambda: SGD(lr="0.1"), r"SGD\(lr='0.1'\): expected a number"),  # type: ignore[arg-type]
        (lambda: SGD(lr=True), r"SGD\(lr=True\): expected a number"),
        (lambda: SGD(lr=0.1, weight_decay=-0.1), r"SGD\(weight_decay=-0.1\)"),
        (
            lambda: Momentum(lr=0.1, momentum=1.5),
            r"Momentum\(momentum=1.5\): expected a number from 0 to 1",
        ),
        (lambda: Momentum(lr=0.1, nesterov=1), r"Momentum\(nesterov=1\): expected True or False"),  # type: ignore[arg-type]
        (lambda: Adam(lr=0.1, amsgrad=1), r"Adam\(amsgrad=1\): expected True or False"),  # type: ignore[arg-type]
        (lambda: Rprop(lr=0.1, etas=(0.5, 0.9)), r"Rprop\(etas=\(0.5, 0.9\)\): expected one between 0 and 1"),
        (lambda: Rprop(lr=0.1, step_sizes=(-1, 1)), r"Rprop\(step_sizes=\(-1, 1\)\): expected two numbers from 0"),
        (lambda: Adagrad(lr=0.1, eps=-1), r"Adagrad\(eps=-1\)"),
        (lambda: Adagrad(lr=0.1, initial_accumulator=None), r"Adagrad\(initial_accumulator=None\)"),  # type: ignore[arg-type]
        (lambda: RMSprop(lr=0.1, alpha=2), r"RMSprop\(alpha=2\)"),
        (
            lambda: Adam(lr=0.1, betas=(0.9, 1.0)),
            r"Adam\(betas=\(0.9, 1.0\)\): expected two numbers in \[0, 1\)",
        ),
        (lambda: Adam(lr=0.1, betas=(0.9,)), r"Adam\(betas=\(0.9,\)\): expected two numbers"),  # type: ignore[arg-type]
        (lambda: Adam(lr=0.1, betas=0.9), r"Adam\(betas=0.9\): expected two numbers"),  # type: ignore[arg-type]
        (lambda: AdamW(lr=0.1, betas=("a", "b")), r"AdamW\(betas=\('a', 'b'\)\): expected two numbers"),  # type: ignore[arg-type]
        (lambda: FTRL(alpha=0), r"FTRL\(alpha=0\): expected a number greater than 0"),
        (lambda: FTRL(l1=-1), r"FTRL\(l1=-1\)"),
        (lambda: Constant(value=math.nan), r"Constant\(value=nan\)"),
        (lambda: Uniform(low=1, high=0), r"Uniform\(low=1\): expected a number of at most 0"),
        (lambda: Uniform(low=0, high=None), r"Uniform\(high=None\): expected a number"),  # type: ignore[arg-type]
        (lambda: Normal(std=-1), r"Normal\(std=-1\): expected a number of 0 or more"),
    ],
)
def test_invalid_settings_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"kind": "Sgd", "lr": 1},
            "unknown kind 'Sgd': expected one of ASGD, Adadelta, Adagrad, Adam, AdamW, Adamax, FTRL, Momentum",
        ),
        ({"lr": 1}, "unknown kind None"),
        ({"kind": ["SGD"]}, "unknown kind"),
        ({"kind": "SGD", "lr": 1, "speed": 2}, "SGD does not take these settings: .*speed"),
        ({"kind": "SGD"}, "SGD does not take these settings: .*lr"),
        ({"kind": "SGD", "lr": -1}, "expected a number"),
    ],
)
def test_unknown_fields_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        from_fields(RULES, fields)


def test_rules_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SGD(lr=0.1).lr = 1.0  # type: ignore[misc]
    with pytest.raises(TypeError):
        UpdateRule()  # type: ignore[abstract]


def test_a_rule_can_only_be_replaced_by_a_rule_with_the_same_state() -> None:
    Adam(lr=0.2, maximize=True).check_follows(Adam(lr=0.1), "table 'w'")
    with pytest.raises(UsageError, match="updated by Adam, and its state belongs to that rule: it cannot become SGD"):
        SGD(lr=0.1).check_follows(Adam(lr=0.1), "table 'w'")
    message = "Adam with the state exp_avg, exp_avg_sq, max_exp_avg_sq, step instead of exp_avg, exp_avg_sq, step"
    with pytest.raises(UsageError, match=message):
        Adam(lr=0.1, amsgrad=True).check_follows(Adam(lr=0.1), "table 'w'")
