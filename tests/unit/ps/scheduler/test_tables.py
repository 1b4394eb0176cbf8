"""The tables of a cluster."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.errors import TableMismatchError, UsageError
from paceline.ps.messages import KnownTable, TableSpec
from paceline.ps.scheduler.runtime import Tables
from paceline.tables.bounds import MAX_TABLES
from paceline.tables.initializers import Zeros
from paceline.tables.rules import SGD, Adam
from paceline.tables.settings import to_fields


def spec(name: str, *, lr: float = 0.1, dim: int = 1) -> TableSpec:
    return TableSpec(name=name, kind="sparse", dim=dim, update=to_fields(SGD(lr=lr)), initializer=to_fields(Zeros()))


def test_a_table_keeps_its_number() -> None:
    tables = Tables()
    assert [tables.declare(spec(name)).number for name in ("a", "b", "a")] == [1, 2, 1]
    assert tables.specs == [spec("a"), spec("b")]


def test_other_settings_are_rejected_and_change_nothing() -> None:
    tables = Tables()
    tables.declare(spec("a"))
    with pytest.raises(TableMismatchError, match="use the same settings in every process"):
        tables.declare(spec("a", dim=2))
    assert tables.specs == [spec("a")]


def test_after_a_change_of_hyperparameters_both_declarations_are_valid() -> None:
    tables = Tables()
    tables.declare(spec("a"))
    tables.change_update("a", to_fields(SGD(lr=0.5)))
    assert tables.specs == [spec("a", lr=0.5)]
    assert tables.declare(spec("a")) == tables.declare(spec("a", lr=0.5))
    assert tables.declare(spec("a")) == KnownTable(number=1, declared=spec("a"), spec=spec("a", lr=0.5), revision=1)
    with pytest.raises(TableMismatchError):
        tables.declare(spec("a", lr=0.7))


@pytest.mark.parametrize(("name", "rule"), [("a", Adam(lr=0.1)), ("b", SGD(lr=0.5))])
def test_changes_to_another_rule_or_of_an_undeclared_table_are_rejected(name: str, rule: Any) -> None:
    tables = Tables()
    tables.declare(spec("a"))
    with pytest.raises(UsageError):
        tables.change_update(name, to_fields(rule))
    assert tables.specs == [spec("a")]


def known(number: int, table: TableSpec) -> KnownTable:
    return KnownTable(number=number, declared=table, spec=table)


def test_tables_of_members_are_adopted_and_numbers_continue() -> None:
    tables = Tables()
    changed = KnownTable(number=3, declared=spec("a"), spec=spec("a", lr=0.5))
    tables.restore([changed, known(3, spec("a")), known(1, spec("b"))])
    assert tables.specs == [spec("b"), spec("a", lr=0.5)]
    assert tables.declare(spec("a")).number == 3
    assert tables.declare(spec("c")).number == 4


@pytest.mark.parametrize("second", [known(1, spec("b")), known(2, spec("a", dim=2))])
def test_the_first_of_two_tables_with_one_number_or_name_is_kept(second: KnownTable) -> None:
    tables = Tables()
    tables.restore([known(1, spec("a")), second])
    assert tables.specs == [spec("a")]


def test_the_number_of_tables_is_limited() -> None:
    tables = Tables()
    tables.restore([known(MAX_TABLES, spec("last"))])
    with pytest.raises(UsageError, match="at most"):
        tables.declare(spec("one more"))
    assert tables.declare(spec("last")).number == MAX_TABLES
