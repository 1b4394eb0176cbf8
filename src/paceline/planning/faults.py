"""Predict the share of the time in which a training with failing machines makes progress. Pure.

Failures of a machine are independent, and the time between them is exponential. Sources: Young 1974 and Daly 2006,
"A higher order estimate of the optimum checkpoint interval for restart dumps", for restarts from snapshots.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

_MOST_EXPONENT: Final = 700.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFaults:
    """The failures of each machine, and the times that they cost, in seconds."""

    mtbf_s: float
    """Mean time between two failures of one machine."""
    recovery_s: float
    """Time until the processes of a failed machine run again."""
    snapshot_every_s: float

    def share_with_restarts(self, machines: int) -> float:
        """Return the share of progress if every failure ends all ranks, which continue from the last snapshot.

        Work is kept if the time between two snapshots passes without a failure. With the rate r of failures, the
        interval T and the recovery R, the mean time per interval is (exp(r T) - 1) (1 / r + R).
        """
        rate = machines / self.mtbf_s
        exponent = rate * self.snapshot_every_s
        if exponent > _MOST_EXPONENT:
            return 0.0
        return self.snapshot_every_s / (math.expm1(exponent) * (1 / rate + self.recovery_s))

    def share_without_restarts(self) -> float:
        """Return the share of progress if the other ranks continue: the share of the time in which a machine works."""
        return self.mtbf_s / (self.mtbf_s + self.recovery_s)
