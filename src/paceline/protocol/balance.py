"""Divide the samples of a step among ranks, in proportion to the ranks' speeds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from paceline.protocol.stragglers import StepTimes

_FEWEST_STEPS: Final = 10
"""Number of steps with equal shares after a change of the ranks. Then the shares may change for the first time."""
_MOST_STEPS: Final = 160
"""Maximum number of steps between changes of shares. A change is costly: loaders drop their prefetched batches."""
_LEAST_GAIN: Final = 0.1
"""New shares must save at least this fraction of the step time."""
_SHORTEST_S: Final = 1e-9


def divide(count: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """Divide `count` samples among ranks so that the slowest rank ends as early as possible; return the shares.

    The shares are integers with the sum `count`, proportional to the positive `speeds`. Each rank has one sample or
    more, unless there are fewer samples than ranks.
    """
    ranks, total, least = range(len(speeds)), sum(speeds), int(count >= len(speeds))
    shares = [max(int(count * speed / total), least) for speed in speeds]
    while sum(shares) < count:
        shares[min(ranks, key=lambda rank: (shares[rank] + 1) / speeds[rank])] += 1
    while sum(shares) > count:
        large = (rank for rank in ranks if shares[rank] > least)
        shares[max(large, key=lambda rank: (shares[rank] / speeds[rank], rank))] -= 1
    return tuple(shares)


def divide_step(count: int, size: int, shares: Sequence[int] | None = None) -> tuple[int, ...]:
    """Divide `count` samples among `size` ranks in proportion to `shares`; None for equal shares."""
    # If a step has fewer samples than ranks, some ranks have the share 0. These ranks may get samples of a larger step.
    return divide(count, [1.0] * size if shares is None else [max(share, 0.5) for share in shares])


class Balance:
    """Chooses the ranks' shares of each step from the ranks' step times. The result is equal on all ranks of a quorum.

    `global_batch` is the number of samples in a step, summed over all ranks.
    """

    def __init__(self, global_batch: int) -> None:
        self._global_batch = global_batch
        self.reset()

    def reset(self) -> None:
        """Return to equal shares, because the ranks have changed."""
        self.shares: tuple[int, ...] | None = None
        """The shares of the next step, by rank; None for equal shares."""
        self._num_steps = _FEWEST_STEPS

    def update(self, times: StepTimes) -> None:
        """Choose new shares if they save enough time, given the `times` of the steps with the present shares."""
        if not times.num_steps or times.num_steps % self._num_steps:
            return
        times_s = [max(time_s, _SHORTEST_S) for time_s in times.medians()]
        present = divide_step(self._global_batch, len(times_s), self.shares)
        speeds = [max(share, 1) / time_s for share, time_s in zip(present, times_s, strict=True)]
        shares = divide(self._global_batch, speeds)
        expected_s = max(share / speed for share, speed in zip(shares, speeds, strict=True))
        if expected_s <= (1 - _LEAST_GAIN) * max(times_s):
            self.shares = shares
            self._num_steps = min(2 * self._num_steps, _MOST_STEPS)
            times.reset()
