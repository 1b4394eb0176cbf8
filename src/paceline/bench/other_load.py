"""Measure the disturbance of a benchmark: the share of core time used by other processes and machines."""

from __future__ import annotations

import os
import time
from typing import Final

import psutil

_IDLE: Final = ("idle", "iowait", "guest", "guest_nice")
"""Not busy times. The guest times are left out, because the user time already includes them."""


class OtherLoad:
    """Measures from its creation on. After a child is reaped, its time is a part of this process's own time."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self.busy_s, self.own_s = busy_s(), own_s()

    def share(self) -> float:
        """Return the other processes' share of all core time, from 0 to 1."""
        other_s = (busy_s() - self.busy_s) - (own_s() - self.own_s)
        total_s = (time.monotonic() - self._start) * (psutil.cpu_count() or 1)
        return min(max(other_s / max(total_s, 1e-9), 0.0), 1.0)


def busy_s() -> float:
    """Return the busy time of all cores since the machine started."""
    return float(sum(value for name, value in psutil.cpu_times()._asdict().items() if name not in _IDLE))


def own_s() -> float:
    """Return the core time of this process and its children."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
