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
        self._busy_s, self._own_s = _busy_s(), _own_s()

    def share(self) -> float:
        """Return the part of all cores' time that others have had, from 0 to 1."""
        others_s = (_busy_s() - self._busy_s) - (_own_s() - self._own_s)
        total_s = (time.monotonic() - self._start) * (psutil.cpu_count() or 1)
        return min(max(others_s / max(total_s, 1e-9), 0.0), 1.0)


def _busy_s() -> float:
    return float(sum(value for name, value in psutil.cpu_times()._asdict().items() if name not in _IDLE))


def _own_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
