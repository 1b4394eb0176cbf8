"""A scheduler follows the table of phases."""

from __future__ import annotations

import pytest

from paceline.protocol.scheduler.cluster import PHASE, Phase
from paceline.protocol.transitions import OUTSIDE

from .watching import check_table


def test_every_event_leads_to_one_phase() -> None:
    check_table(PHASE)
    for row in PHASE.transitions:
        if row.source != OUTSIDE:
            assert Phase(row.source).after(row.event) is Phase(row.target)


def test_nothing_follows_on_an_impossible_event() -> None:
    with pytest.raises(ValueError, match="unpack"):
        Phase.SUPERSEDED.after("form")
