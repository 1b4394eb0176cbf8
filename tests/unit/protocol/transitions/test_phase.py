"""The transitions of a scheduler's phases follow the state table."""

from __future__ import annotations

import pytest

from paceline.protocol.scheduler.cluster import PHASE, Phase
from paceline.protocol.transitions import OUTSIDE

from .watching import check_table


def test_every_event_has_one_next_phase() -> None:
    check_table(PHASE)
    for row in PHASE.transitions:
        if row.source != OUTSIDE:
            assert Phase(row.source).after(row.event) is Phase(row.target)


def test_an_impossible_event_has_no_next_phase() -> None:
    with pytest.raises(ValueError, match="unpack"):
        Phase.SUPERSEDED.after("form")
