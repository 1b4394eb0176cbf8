"""How much a benchmark was disturbed: what share of the cores went to other processes and other machines meanwhile."""

from __future__ import annotations

import os
import time
from typing import Final

import psutil

_IDLE: Final = ("idle", "iowait", "guest", "guest_nice")
"""Guests' time is in the user's already."""


class Others:
    """Looks from its making on. Processes that this one started count as its own once they have been waited for."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self.busy_s, self.own_s = busy_s(), own_s()

    def share(self) -> float:
        """Return the part of all cores' time that others have had, from 0 to 1."""
        others_s = (busy_s() - self.busy_s) - (own_s() - self.own_s)
        total_s = (time.monotonic() - self._start) * (psutil.cpu_count() or 1)
        return min(max(others_s / max(total_s, 1e-9), 0.0), 1.0)


def busy_s() -> float:
    """Return for how long the cores have worked, since the machine began."""
    return float(sum(value for name, value in psutil.cpu_times()._asdict().items() if name not in _IDLE))


def own_s() -> float:
    """Return for how long they have worked for this process and its children."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
