"""Find a rank whose steps take much longer than the other ranks' steps, and decide when it has recovered."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from typing import Final

_NUM_STEPS: Final = 5
"""The median is taken over this number of latest steps. So a single long step, such as a checkpoint, has no effect."""
_NUM_RECOVERED: Final = 3
"""A rank has recovered after this number of consecutive steps within the limit."""


class StepTimes:
    """The latest step times of a quorum's ranks, without waiting times. These are equal on all ranks.

    A rank is a straggler if the median of its times is more than `factor` times the median of the other ranks' medians.
    At least `min_ranks` other ranks must remain.
    """

    def __init__(self, factor: float, min_ranks: int) -> None:
        self.factor = factor
        self._min_ranks = min_ranks
        self._steps: deque[tuple[float, ...]] = deque(maxlen=_NUM_STEPS)
        self.num_steps = 0
        """Steps since the last :meth:`reset`."""

    def reset(self) -> None:
        """Forget all times, because the ranks or their shares of the samples have changed."""
        self._steps.clear()
        self.num_steps = 0

    def record(self, times_s: Sequence[float]) -> None:
        """Record one step; `times_s[r]` is the time of rank r."""
        self._steps.append(tuple(times_s))
        self.num_steps += 1

    def medians(self) -> list[float]:
        """Return the median of each rank's latest times; empty without a step."""
        return [statistics.median(times_s) for times_s in zip(*self._steps, strict=True)]

    def others(self, rank: int) -> float:
        """Return the median of the other ranks' median step times."""
        return statistics.median(time_s for other, time_s in enumerate(self.medians()) if other != rank)

    def straggler(self) -> int | None:
        """Return the slowest rank if it is a straggler."""
        medians = self.medians()
        if len(self._steps) < _NUM_STEPS or len(medians) <= max(self._min_ranks, 1):
            return None
        slowest = max(range(len(medians)), key=lambda rank: medians[rank])
        return slowest if medians[slowest] > self.factor * self.others(slowest) else None

    def has_recovered(self, limit_s: float) -> bool:
        """Return whether the latest steps of a rank that computes alone are within the limit."""
        latest = list(self._steps)[-_NUM_RECOVERED:]
        return len(latest) == _NUM_RECOVERED and all(time_s <= limit_s for (time_s,) in latest)
