"""Virtual time: a heap of things to do, run in the order of their times."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any, TypeAlias

Action: TypeAlias = Callable[..., None]


class SimulatedClock:
    """The time of a simulation, in seconds, and what is to happen when.

    Things of the same time happen in the order of their numbers, which is that in which they were first planned.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_events = 0
        self.trace_hash = 0
        """Of the times and numbers of all that happened: two runs that differ in one event differ here."""
        self._heap: list[tuple[float, int, Action, tuple[Any, ...]]] = []
        self._number = 0

    def at(self, time_s: float, action: Action, *args: Any) -> None:
        """Call `action(*args)` at a time, now if that is past."""
        self._number += 1
        heapq.heappush(self._heap, (time_s, self._number, action, args))

    def after(self, delay_s: float, action: Action, *args: Any) -> None:
        """Call `action(*args)` after a delay."""
        self._number += 1
        heapq.heappush(self._heap, (self.now_s + delay_s, self._number, action, args))

    def again_at(self, time_s: float, action: Action, *args: Any) -> None:
        """Put off what is happening now; what is put off to the same time stays in its order."""
        heapq.heappush(self._heap, (time_s, self._current, action, args))

    def step(self) -> bool:
        """Let the next thing happen; False if there is none."""
        if not self._heap:
            return False
        time_s, self._current, action, args = heapq.heappop(self._heap)
        if time_s > self.now_s:
            self.now_s = time_s
        self.num_events += 1
        self.trace_hash = hash((self.trace_hash, time_s, self._current))
        action(*args)
        return True
