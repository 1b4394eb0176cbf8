"""The planted defects can still be planted, and one of them is found (`make mutants` looks for all)."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.mutants.__main__ import look_for
from tests.mutants.defects import DEFECTS, Defect

import paceline

SOURCE = Path(paceline.__file__).parent


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda each: each.name)
def test_a_defect_can_be_planted(defect: Defect) -> None:
    text = (SOURCE / defect.module).read_text()
    wrong = defect.apply(text)
    assert wrong != text
    compile(wrong, defect.module, "exec")


def test_names_are_distinct() -> None:
    assert len({each.name for each in DEFECTS}) == len(DEFECTS)


def test_the_simulation_and_the_unit_tests_find_one() -> None:
    defect = next(each for each in DEFECTS if each.name == "filter-fast-path")
    finding = look_for(Defect(**{**vars(defect), "unit": ("tests/unit/protocol/test_delivery.py",)}), 25)
    assert finding.seeds is not None
    assert finding.unit
    assert finding.integration is None
