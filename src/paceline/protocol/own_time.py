"""The time that a process has run, for the timeouts of the processes that it watches.

A process that was stopped, or whose machine was paused, has received no heartbeats for that time. By its clock all
others would be silent. So a pause counts as a short time, in which heartbeats arrive again.
"""

from __future__ import annotations


class OwnTime:
    """A clock on which the time between two readings is at most `longest_s`. At the first reading it is `now_s`.

    Read it more often than every `longest_s`, or it is slow.
    """

    def __init__(self, longest_s: float, now_s: float = 0.0) -> None:
        self.now_s = now_s
        """The time at the last reading."""
        self._longest_s = longest_s
        self._last_s: float | None = None

    def read(self, clock_s: float) -> float:
        """Take the time of any clock, which may jump. Return the seconds since the last reading by that clock."""
        elapsed_s = 0.0 if self._last_s is None else max(clock_s - self._last_s, 0.0)
        self._last_s = clock_s
        self.now_s += min(elapsed_s, self._longest_s)
        return elapsed_s
