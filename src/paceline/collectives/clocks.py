"""Compare the clocks of the ranks, so that their events can be shown on one axis of time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import numpy as np

from paceline.collectives.group import Group

_NUM_TRIPS: Final = 8
_TAG: Final = 2


def clock_offsets(group: Group, clock_ns: Callable[[], int] = time.monotonic_ns) -> list[int]:
    """Return each rank's clock minus the clock of rank 0, in nanoseconds.

    All ranks must call this function. On ranks other than rank 0, the list is empty. Rank 0 exchanges a few messages
    with each rank, and uses the fastest exchange. The error is at most half the time of this exchange.
    """
    value = np.zeros(1, np.int64)
    if group.rank:
        for _ in range(_NUM_TRIPS):
            group.recv(value, 0, tag=_TAG)
            value[0] = clock_ns()
            group.send(value, 0, tag=_TAG)
        return []
    offsets = [0]
    for rank in range(1, group.size):
        trips: list[tuple[int, int]] = []
        for _ in range(_NUM_TRIPS):
            start = clock_ns()
            group.send(value, rank, tag=_TAG)
            group.recv(value, rank, tag=_TAG)
            end = clock_ns()
            trips.append((end - start, int(value[0]) - (start + end) // 2))
        offsets.append(min(trips)[1])
    return offsets
