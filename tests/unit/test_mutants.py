"""The planted defects can still be planted, and the tests find one of them (`make mutants` runs all)."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from tests.mutants import DEFECTS, Defect
from tests.mutants.__main__ import Limits, run_checks

import paceline

SOURCE = Path(paceline.__file__).parent
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda case: case.name)
def test_a_defect_can_be_planted(defect: Defect) -> None:
    text = (SOURCE / defect.module).read_text()
    wrong = defect.apply(text)
    assert wrong != text
    compile(wrong, defect.module, "exec")


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda case: case.name)
def test_every_defect_names_tests(defect: Defect) -> None:
    assert defect.unit or defect.integration
    for path in (*defect.unit, *defect.integration):
        assert (ROOT / path).exists()


def test_names_of_defects_are_distinct() -> None:
    assert len({defect.name for defect in DEFECTS}) == len(DEFECTS)


def test_the_page_reports_every_defect() -> None:
    """``python -m tests.mutants --write`` writes the report into the page."""
    page = (ROOT / "docs/explanation/protocol.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([a-z-]+)` \| ([^|]+) \|(.*)\|$", page.partition("## Planted defects")[2], re.MULTILINE)
    assert [(name, effect) for name, effect, _ in rows] == [(defect.name, defect.effect) for defect in DEFECTS]
    assert [name for name, _, found in rows if not re.search(r"yes|[1-9]", found)] == []


@pytest.mark.thorough
def test_the_simulation_and_the_unit_tests_find_a_defect() -> None:
    defect = next(defect for defect in DEFECTS if defect.name == "filter-fast-path")
    finding = run_checks(replace(defect, unit=("tests/unit/protocol/test_delivery.py",)), Limits(seeds=25))
    assert finding.seeds is not None
    assert finding.unit
    assert finding.integration is None
