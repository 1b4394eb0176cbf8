"""Comparison of the ranks' clocks."""

from __future__ import annotations

import time

from paceline.collectives import Group
from paceline.collectives.clocks import clock_offsets
from paceline.testing import run_ranks

HOUR_NS = 3_600_000_000_000


def test_offsets_of_clocks() -> None:
    """The clock of each rank is ahead by a known time."""

    def compare(group: Group) -> list[int]:
        return clock_offsets(group, lambda: time.monotonic_ns() + group.rank * HOUR_NS)

    offsets_ns, *others = run_ranks(3, compare)
    assert others == [[], []]
    assert [round(offset_ns / HOUR_NS, 3) for offset_ns in offsets_ns] == [0.0, 1.0, 2.0]
