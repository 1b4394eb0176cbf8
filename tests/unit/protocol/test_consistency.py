"""Consistency and stale-gradient policies as values and as text."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.protocol import (
    Accept,
    BoundedDelay,
    Consistency,
    DelayCompensate,
    DropStale,
    Eventual,
    Sequential,
    StalePolicy,
    parse_consistency,
    parse_stale_policy,
)

SPELLINGS: list[tuple[Consistency, str, int | None]] = [
    (Sequential(), "sequential", 0),
    (Sequential(aggregate="mean"), "sequential:mean", 0),
    (BoundedDelay(tau=0), "bounded:0", 0),
    (BoundedDelay(tau=4), "bounded:4", 4),
    (Eventual(), "eventual", None),
]

POLICIES: list[tuple[StalePolicy, str]] = [
    (Accept(), "accept"),
    (DropStale(beyond=8), "drop:8"),
    (DelayCompensate(), "compensate:0.04"),
]


@pytest.mark.parametrize(("value", "text", "tau"), SPELLINGS)
def test_consistency_equals_the_text(value: Consistency, text: str, tau: int | None) -> None:
    assert str(value) == text
    assert parse_consistency(text) == value
    assert value.tau == tau


@pytest.mark.parametrize(("value", "text"), POLICIES)
def test_policy_equals_the_text(value: StalePolicy, text: str) -> None:
    assert str(value) == text
    assert parse_stale_policy(text) == value


def test_longer_notations_are_accepted() -> None:
    assert parse_consistency(" sequential:sum ") == Sequential()
    assert parse_stale_policy("compensate") == DelayCompensate()


@given(st.integers(0, 10**12))
def test_texts_of_counts_can_be_parsed(count: int) -> None:
    assert parse_consistency(str(BoundedDelay(tau=count))) == BoundedDelay(tau=count)
    assert parse_stale_policy(str(DropStale(beyond=count))) == DropStale(beyond=count)


@given(st.floats(min_value=0, allow_infinity=False, allow_nan=False))
def test_the_text_of_a_strength_can_be_parsed(strength: float) -> None:
    assert parse_stale_policy(str(DelayCompensate(strength=strength))) == DelayCompensate(strength=strength)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "bounded",
        "bounded:",
        "bounded:-1",
        "bounded:1.5",
        "bounded:٣",
        "sequential:",
        "sequential:max",
        "eventual:1",
    ],
)
def test_unknown_consistency_is_rejected(text: str) -> None:
    with pytest.raises(UsageError, match="expected 'sequential'"):
        parse_consistency(text)


@pytest.mark.parametrize("text", ["", "accept:1", "drop", "drop:x", "compensate:nan", "compensate:-1", "compensate:x"])
def test_unknown_policy_is_rejected(text: str) -> None:
    with pytest.raises(UsageError, match="expected 'accept'"):
        parse_stale_policy(text)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (Sequential, {"aggregate": "max"}),
        (BoundedDelay, {"tau": -1}),
        (BoundedDelay, {"tau": 1.0}),
        (BoundedDelay, {"tau": True}),
        (DropStale, {"beyond": -1}),
        (DelayCompensate, {"strength": float("inf")}),
        (DelayCompensate, {"strength": -0.1}),
    ],
)
def test_illegal_values_are_rejected(kind: Any, fields: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="expected"):
        kind(**fields)


def test_consistency_is_immutable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        BoundedDelay(tau=1).tau = 2  # type: ignore[misc]


def test_the_number_of_a_setting_may_be_positional() -> None:
    assert BoundedDelay(4) == BoundedDelay(tau=4)
    assert DropStale(8) == DropStale(beyond=8)
