"""Pauses between attempts to reach a peer."""

from __future__ import annotations

import math
import secrets


class Backoff:
    """A sequence of pauses. Each pause is twice the previous pause, up to a maximum.

    Every pause is shortened by a random fraction of at most `spread` (0 to 1), so that the clients of a lost peer do
    not all reconnect at the same moment.
    """

    def __init__(self, first_s: float, longest_s: float, *, spread: float = 0.0) -> None:
        self._first_s, self._longest_s, self._spread = first_s, longest_s, spread
        self._pause_s = first_s
        self._random = secrets.SystemRandom()  # the random module's state belongs to the user's seeded program

    def next_s(self, left_s: float = math.inf) -> float:
        pause_s = self._pause_s * self._random.uniform(1.0 - self._spread, 1.0)
        self._pause_s = min(2.0 * self._pause_s, self._longest_s)
        return max(min(pause_s, left_s), 0.0)

    def reset(self) -> None:
        self._pause_s = self._first_s
